"""Tensors that lie in the GPU's memory already: no host copy is made of what is read or written.

Others' allocations are opened by their IPC handles; stored tensors are in `residents`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad.errors import InvalidProblem
from convgrad_service.backends.cuda.device import import_cupy
from convgrad_service.backends.cuda.residents import Mirrored
from convgrad_service.plans.cuda.program import ALIGNMENT
from convgrad_service.problems.base import Slices, TensorSpec

__all__ = [
    "IpcMemory",
    "OnDevice",
    "on_the_host",
    "read_in_place",
    "write_in_place",
]

_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess, the only flag there is
_HANDLE_BYTES = 64


@dataclass(frozen=True, slots=True)
class OnDevice:
    """A tensor on the GPU, or a part of one cut as arrays are; ``owner`` keeps its memory alive.

    ``strides`` count bytes.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    owner: Any

    @classmethod
    def whole(cls, address: int, spec: TensorSpec, owner: Any) -> OnDevice:
        """A tensor that lies row by row."""
        dtype = np.dtype(spec.dtype.numpy)
        strides = tuple(dtype.itemsize * prod(spec.shape[i + 1 :]) for i in range(len(spec.shape)))
        return cls(address, spec.shape, strides, dtype, owner)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def is_aligned(self) -> bool:
        """Whether a kernel can use it where it lies."""
        return self.address % ALIGNMENT == 0 and self.rows[0] == 1

    @property
    def rows(self) -> tuple[int, int, int]:
        """It as rows of equal distance: how many, how many bytes apart, how many bytes each.

        Raises ValueError where it is more scattered than cuts of one dimension leave it.
        """
        width, pitch, count = self.dtype.itemsize, 0, 1
        for extent, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if extent == 1:
                continue
            if count == 1 and stride == width:
                width *= extent
            elif count == 1:
                pitch, count = stride, extent
            elif stride == pitch * count:
                count *= extent
            else:
                raise ValueError(f"shape {self.shape} of strides {self.strides} is no set of rows")
        return count, pitch or width, width

    def __getitem__(self, cut: Slices) -> OnDevice:
        """The part that these slices, of step 1, leave."""
        bounds = [
            each.indices(extent)[:2]
            for each, extent in zip(cut, self.shape[: len(cut)], strict=True)
        ]
        starts = [start * stride for (start, _), stride in zip(bounds, self.strides, strict=False)]
        shape = (*(stop - start for start, stop in bounds), *self.shape[len(cut) :])
        return OnDevice(self.address + sum(starts), shape, self.strides, self.dtype, self.owner)

    def copy_to(self, address: int, stream: Any) -> None:
        """Copy it to device memory that lies row by row; returns before the copy ends."""
        count, pitch, width = self.rows
        _copy(address, width, self.address, pitch, width, count, stream)

    def copy_from(self, address: int, stream: Any) -> None:
        """Fill it from device memory that lies row by row; returns before the copy ends."""
        count, pitch, width = self.rows
        _copy(self.address, pitch, address, width, width, count, stream)

    def fill(self, array: NDArray[Any]) -> None:
        """Fill it from the host, and wait."""
        count, pitch, width = self.rows
        source = np.ascontiguousarray(array)
        runtime = import_cupy().cuda.runtime
        runtime.memcpy2D(
            self.address, pitch, source.ctypes.data, width, width, count,
            runtime.memcpyHostToDevice,
        )  # fmt: skip

    def read(self, target: NDArray[Any]) -> None:
        """Copy it to a contiguous array of the host, and wait."""
        count, pitch, width = self.rows
        runtime = import_cupy().cuda.runtime
        runtime.memcpy2D(
            target.ctypes.data, width, self.address, pitch, width, count,
            runtime.memcpyDeviceToHost,
        )  # fmt: skip


class IpcMemory:
    """A part of another process's allocation, opened by its handle; for the device's context.

    Raises
    ------
    InvalidProblem
        The handle opens nothing here, or the allocation is smaller than was said.
    """

    def __init__(self, handle: bytes, size_bytes: int) -> None:
        self._runtime = import_cupy().cuda.runtime
        if len(handle) != _HANDLE_BYTES:
            raise InvalidProblem(
                f"the raw handle has {len(handle)} bytes; CUDA's have {_HANDLE_BYTES}"
            )
        try:
            self._address: int = self._runtime.ipcOpenMemHandle(handle, _LAZY_PEER_ACCESS)
        except self._runtime.CUDARuntimeError as error:
            raise InvalidProblem(f"the raw handle cannot be opened: {error}") from None
        base, allocated_bytes = _allocation_of(self._address)
        usable_bytes = base + allocated_bytes - self._address
        if not 0 < size_bytes <= usable_bytes:
            self.close()
            raise InvalidProblem(
                f"the CUDA allocation has {usable_bytes:,} bytes; a region of {size_bytes:,} is "
                "not in it"
            )

    def array(self, offset: int, spec: TensorSpec) -> OnDevice:
        """A tensor in it."""
        return OnDevice.whole(self._address + offset, spec, self)

    def close(self) -> None:
        """Let go of it: nothing uses it any more."""
        self._runtime.ipcCloseMemHandle(self._address)


def read_in_place(
    tensors: Mapping[str, Any], addresses: dict[str, int], stream: Any
) -> dict[str, NDArray[Any]]:
    """Have kernels read tensors on the device where they are; the others, to be uploaded.

    What no kernel can read as it lies is copied to its address.
    """
    for name, tensor in tensors.items():
        if isinstance(tensor, OnDevice):
            if tensor.is_aligned:
                addresses[name] = tensor.address
            else:
                tensor.copy_to(addresses[name], stream)
    return on_the_host(tensors)


def write_in_place(outputs: Mapping[str, Any], addresses: dict[str, int]) -> dict[str, OnDevice]:
    """Have kernels write outputs on the device to where they belong; those that must be moved."""
    to_move = {}
    for name, place in outputs.items():
        target = place.device if isinstance(place, Mirrored) else place
        if isinstance(target, OnDevice):
            if target.is_aligned:
                addresses[name] = target.address
            else:
                to_move[name] = target
    return to_move


def on_the_host(tensors: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Those that are plain arrays, and the copies of those that are on both."""
    return {
        name: each.host if isinstance(each, Mirrored) else each
        for name, each in tensors.items()
        if not isinstance(each, OnDevice)
    }


def _copy(
    target: int, target_pitch: int, source: int, source_pitch: int, width: int, count: int,
    stream: Any,
) -> None:  # fmt: skip
    runtime = import_cupy().cuda.runtime
    kind = runtime.memcpyDeviceToDevice
    if count == 1:
        runtime.memcpyAsync(target, source, width, kind, stream.ptr)
        return
    runtime.memcpy2DAsync(
        target, target_pitch, source, source_pitch, width, count, kind, stream.ptr
    )


def _allocation_of(address: int) -> tuple[int, int]:
    """Where the allocation that holds an address begins, and its size; for a current context."""
    driver = ctypes.CDLL("libcuda.so.1")
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    status = driver.cuMemGetAddressRange_v2(
        ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)
    )
    if status != 0:
        raise InvalidProblem(f"the size of a CUDA allocation cannot be found (CUDA error {status})")
    return base.value, size.value
