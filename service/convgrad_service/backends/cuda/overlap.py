"""Launches with attributes, which CuPy cannot ask for: that may start while the kernel before them
still runs (programmatic dependent launch), or whose blocks form clusters. From sm_90 on.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

from convgrad.errors import DeviceUnavailable
from convgrad_service.plans.cuda_program import Launch

__all__ = ["launch_with_attributes"]

# CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_CLUSTER_DIMENSION, _SERIALIZATION = 4, 6


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("padding", ctypes.c_int),
        ("value", ctypes.c_uint * 16),
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


def launch_with_attributes(function: int, step: Launch, filled: bytearray, stream: int) -> None:
    """Put a launch on a stream. A kernel that overlaps waits itself for what the one before it
    writes.

    Raises:
        DeviceUnavailable: the driver refused it.
    """
    wanted = []
    if step.overlaps:
        wanted.append(_Attribute(_SERIALIZATION, 0, (1,)))
    if step.cluster > 1:
        wanted.append(_Attribute(_CLUSTER_DIMENSION, 0, (step.cluster, 1, 1)))
    attributes = (_Attribute * len(wanted))(*wanted)
    argument = (ctypes.c_char * len(filled)).from_buffer(filled)
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
    config = _Config(
        step.grid,
        step.block,
        step.shared_bytes,
        stream,
        ctypes.addressof(attributes),
        len(wanted),
    )
    status = _driver().cuLaunchKernelEx(
        ctypes.byref(config), ctypes.c_void_p(function), arguments, None
    )
    if status != 0:
        raise DeviceUnavailable(f"launching {step.instance.name} failed: CUDA error {status}")


@lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
