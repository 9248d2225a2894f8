"""The CUDA backend: CUDA C++ kernels, compiled by NVRTC at run time and launched through CuPy.

CuPy is imported when a backend is created: the service runs without it.
"""

from __future__ import annotations

from convgrad_service.backends.cuda.backend import CudaBackend
from convgrad_service.backends.cuda.device import device_count

__all__ = ["CudaBackend", "device_count"]
