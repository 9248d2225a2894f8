"""The CUDA backend: CUDA C++ kernels, compiled by NVRTC at run time and launched through CuPy.

CuPy is imported when a backend is created: the service runs without it. This package imports
nothing itself, so that a process that does not compute does not load the planning of kernels.
"""
