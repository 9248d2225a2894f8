"""Running ``hopper_probe.cu``: on the CPU by the emulator, or on a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from convgrad_service.backends.cuda.compile import Compiler
from convgrad_service.backends.cuda.device import cuda_driver_major, import_cupy
from convgrad_service.backends.cuda.kernels.core.tensor_maps import (
    MapField,
    MappedArguments,
    TensorMap,
    pack_maps,
)
from convgrad_service.backends.cuda.launch import Kernels
from convgrad_service.backends.cuda.nvrtc import find_nvrtc
from convgrad_service.plans.cuda.device import HOPPER
from convgrad_service.plans.cuda.program import Instance, Launch
from tests.emulator import memory
from tests.emulator.backend import Launching, filled_by, launch_of

__all__ = ["Emulated", "OnGpu", "ProbeArgs", "Prober", "probe_launch"]

SOURCE = str(Path(__file__).with_name("hopper_probe.cu"))
SHARED_BYTES, THREADS = 200 * 1024, 128

Buffers = Mapping[str, NDArray[Any]]


class ProbeArgs(ctypes.Structure):
    """As in the source."""

    _fields_ = (
        ("first", MapField),
        ("second", MapField),
        ("out", ctypes.c_uint64),
        ("at", ctypes.c_int * 5),
        ("by", ctypes.c_int * 3),
        ("bytes", ctypes.c_int),
        ("shift", ctypes.c_int * 2),
        ("eight", ctypes.c_int * 2),
        ("box_bytes", ctypes.c_int * 2),
        ("boxes", ctypes.c_int * 2),
        ("depth", ctypes.c_int),
    )


def probe_launch(
    entry: str,
    defines: Mapping[str, object],
    args: ProbeArgs,
    maps: Mapping[str, TensorMap],
    blocks: int = 1,
) -> Launch:
    """One launch: maps of the buffers of their own names, ``out`` of that name."""
    named = tuple((name, str(value)) for name, value in defines.items())
    instance = Instance(SOURCE, entry, (*named, ("BOUNDED_WAITS", "1")), HOPPER)
    packed = pack_maps(args, {name: (name, one) for name, one in maps.items()}, out="out")
    return Launch(instance, (blocks, 1, 1), (THREADS, 1, 1), packed, SHARED_BYTES)


class Prober(Protocol):
    """Runs a launch on buffers, and returns them as they are afterwards."""

    def __call__(self, launch: Launch, buffers: Buffers) -> dict[str, NDArray[Any]]: ...


class Emulated:
    """On the CPU."""

    def __call__(self, launch: Launch, buffers: Buffers) -> dict[str, NDArray[Any]]:
        held = memory.Buffers({name: array.nbytes for name, array in buffers.items()}, 0)
        for name, array in buffers.items():
            held.bytes[name][...] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        filled = filled_by(launch.arguments, held.addresses)
        wrong = launch_of(launch.instance)(
            Launching(
                filled.ctypes.data,
                held.stretches,
                len(held.stretches),
                launch.grid,
                launch.block[0],
                launch.shared_bytes,
            )
        )
        assert wrong is None, wrong.decode()
        return {
            name: array.view(buffers[name].dtype).reshape(buffers[name].shape).copy()
            for name, array in held.bytes.items()
        }


class OnGpu:
    """On the GPU, which must be Hopper."""

    def __init__(self) -> None:
        self._cupy = import_cupy()
        self._kernels = Kernels(Compiler(find_nvrtc(cuda_driver_major()), "sm_90a"))

    def __call__(self, launch: Launch, buffers: Buffers) -> dict[str, NDArray[Any]]:
        cupy = self._cupy
        held = {
            name: cupy.asarray(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
            for name, array in buffers.items()
        }
        addresses = {name: array.data.ptr for name, array in held.items()}
        assert isinstance(launch.arguments, MappedArguments)
        with cupy.cuda.Stream() as stream:
            self._kernels.run([launch], addresses, stream)
            stream.synchronize()
        return {
            name: array.get().view(buffers[name].dtype).reshape(buffers[name].shape)
            for name, array in held.items()
        }
