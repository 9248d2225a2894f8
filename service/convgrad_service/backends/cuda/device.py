"""The GPUs of this machine."""

from __future__ import annotations

import ctypes
import uuid
from typing import Any

from convgrad.errors import DeviceUnavailable
from convgrad_service.plans.cuda.device import CudaDevice

__all__ = ["cuda_driver_major", "describe", "device_count", "import_cupy", "uuid_of"]

OLDEST = (8, 0)


def import_cupy() -> Any:
    """Import CuPy.

    Raises
    ------
    DeviceUnavailable
        It is not installed, or does not work here.
    """
    try:
        import cupy
    except ImportError as error:
        raise DeviceUnavailable(
            f"CuPy cannot be imported ({error}); expected convgrad[cuda13] or convgrad[cuda12]"
        ) from error
    return cupy


def device_count() -> int:
    """Return the number of GPUs that CUDA finds; 0 without CUDA."""
    try:
        runtime = import_cupy().cuda.runtime
    except DeviceUnavailable:
        return 0
    try:
        return int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError:
        return 0


def cuda_driver_major() -> int:
    """Return the major version of CUDA that the driver supports."""
    return int(import_cupy().cuda.runtime.driverGetVersion()) // 1000


def uuid_of(index: int) -> str:
    """Return a GPU's UUID as NVIDIA's tools print it; empty if the driver does not report one.

    It is read from the driver, because CuPy's property ends at the first zero byte.
    """
    raw = (ctypes.c_ubyte * 16)()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    if driver.cuInit(0) != 0 or driver.cuDeviceGetUuid_v2(raw, index) != 0:
        return ""
    return f"GPU-{uuid.UUID(bytes=bytes(raw))}"


def describe(index: int, memory_limit_bytes: int | None = None) -> CudaDevice:
    """Describe the GPU of this index; ``memory_limit_bytes`` caps the memory that it reports.

    Raises
    ------
    DeviceUnavailable
        There is no such GPU, or it is older than sm_80.
    """
    count = device_count()
    if index >= count:
        raise DeviceUnavailable(f"GPU {index} is not there: CUDA finds {count} GPUs")
    properties = import_cupy().cuda.runtime.getDeviceProperties(index)
    capability = properties["major"], properties["minor"]
    name = properties["name"].decode()
    if capability < OLDEST:
        raise DeviceUnavailable(
            f"{name} has compute capability {capability[0]}.{capability[1]}; expected 8.0 or later"
        )
    memory = int(properties["totalGlobalMem"])
    return CudaDevice(
        name=name,
        capability=capability,
        multiprocessors=properties["multiProcessorCount"],
        shared_bytes_per_block=properties["sharedMemPerBlockOptin"],
        shared_bytes_per_multiprocessor=properties["sharedMemPerMultiprocessor"],
        l2_bytes=properties["l2CacheSize"],
        memory_bytes=min(memory, memory_limit_bytes or memory),
    )
