"""Launches with attributes that CuPy does not offer, from sm_90 on.

These are programmatic dependent launch (a kernel may start while the previous one runs) and thread
block clusters.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

from convgrad.errors import DeviceUnavailable
from convgrad_service.plans.cuda.program import ArgumentBlock, Launch

__all__ = ["CLUSTER_DIMENSION", "AttributedLaunch", "LaunchConfig"]

# CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
CLUSTER_DIMENSION, _SERIALIZATION = 4, 6


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("padding", ctypes.c_int),
        ("value", ctypes.c_uint * 16),
    )


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig: a launch's grid and attributes, without its stream."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )

    @classmethod
    def of(cls, step: Launch) -> LaunchConfig:
        wanted = []
        if step.overlaps:
            wanted.append(_Attribute(_SERIALIZATION, 0, (1,)))
        if step.cluster > 1:
            wanted.append(_Attribute(CLUSTER_DIMENSION, 0, (step.cluster, 1, 1)))
        attributes = (_Attribute * len(wanted))(*wanted)
        address, count = ctypes.addressof(attributes), len(wanted)
        config = cls(step.grid, step.block, step.shared_bytes, None, address, count)
        config.kept = attributes  # alive as long as what points to it
        return config


class AttributedLaunch:
    """A launch that overlaps the previous one or has clusters. See `launch.Enqueued`.

    Raises
    ------
    DeviceUnavailable
        The driver refused the launch.
    """

    __slots__ = ("_config", "_given", "_kept", "_launch", "_name", "point")

    def __init__(self, function: int, step: Launch, block: ArgumentBlock) -> None:
        self._name = step.instance.name
        arguments = (ctypes.c_void_p * 1)(block.address)
        self._config = LaunchConfig.of(step)
        # Set up everything but the stream once: doing it in each launch takes four times as long.
        self._launch = _launcher()
        self._given = ctypes.byref(self._config), function, ctypes.addressof(arguments), None
        self._kept = arguments, block  # keeps alive what is pointed into
        self.point = block.point

    def __call__(self, stream: int) -> None:
        self._config.stream = stream
        status = self._launch(*self._given)
        if status != 0:
            raise DeviceUnavailable(f"launching {self._name} failed: CUDA error {status}")


@lru_cache(maxsize=1)
def _launcher() -> Any:
    launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    launch.argtypes = [ctypes.c_void_p] * 4
    return launch
