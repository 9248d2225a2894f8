"""Launches that may start while the kernel before them still runs, which CuPy cannot ask for.

(CUDA calls it programmatic dependent launch; from compute capability 9.0 on.)
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

from convgrad.errors import DeviceUnavailable
from convgrad_service.plans.cuda_program import Launch

__all__ = ["OverlappingLaunch"]

# CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_SERIALIZATION = 6


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("padding", ctypes.c_int),
        ("value", ctypes.c_int),
        ("unused", ctypes.c_char * 60),
    )


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


class OverlappingLaunch:
    """A launch with its arguments filled, whose kernel waits itself for what the one before it
    writes. Calling it puts it on a stream.

    Raises
    ------
    DeviceUnavailable
        The driver refused it.
    """

    __slots__ = ("_arguments", "_function", "_kept", "_step")

    def __init__(self, function: int, step: Launch, filled: bytearray) -> None:
        self._function, self._step = ctypes.c_void_p(function), step
        structure = (ctypes.c_char * len(filled)).from_buffer(filled)
        self._arguments = (ctypes.c_void_p * 1)(ctypes.addressof(structure))
        self._kept = structure, _Attribute(id=_SERIALIZATION, value=1)

    def __call__(self, stream: int) -> None:
        step, (_, attribute) = self._step, self._kept
        config = _Config(
            step.grid, step.block, step.shared_bytes, stream, ctypes.addressof(attribute), 1
        )
        status = _driver().cuLaunchKernelEx(
            ctypes.byref(config), self._function, self._arguments, None
        )
        if status != 0:
            raise DeviceUnavailable(f"launching {step.instance.name} failed: CUDA error {status}")


@lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
