"""Tensors that are in the GPU's memory already and are read and written there.

They belong to other processes, by CUDA IPC handles, or are stored tensors (`residents`).
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

__all__ = ["CudaTensor", "IpcMemory", "on_the_host", "read_in_place", "write_in_place"]

_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess, the only flag there is
_HANDLE_BYTES = 64


@dataclass(frozen=True, slots=True)
class CudaTensor:
    """A tensor in GPU memory, or a slice of one; ``strides`` are in bytes.

    ``owner`` keeps the memory alive.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    owner: Any

    @classmethod
    def whole(cls, address: int, spec: TensorSpec, owner: Any) -> CudaTensor:
        """Return a row-major tensor."""
        dtype = np.dtype(spec.dtype.numpy)
        strides = tuple(dtype.itemsize * prod(spec.shape[i + 1 :]) for i in range(len(spec.shape)))
        return cls(address, spec.shape, strides, dtype, owner)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def is_aligned(self) -> bool:
        """Whether kernels can use it in place: it is aligned and contiguous."""
        return self.address % ALIGNMENT == 0 and self.rows[0] == 1

    @property
    def rows(self) -> tuple[int, int, int]:
        """The number of equidistant rows that it consists of, their pitch and width in bytes.

        Raises
        ------
        ValueError
            It is sliced in more than one dimension, so there are no such rows.
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

    def __getitem__(self, cut: Slices) -> CudaTensor:
        """Return a slice of it, of step 1."""
        bounds = [
            each.indices(extent)[:2]
            for each, extent in zip(cut, self.shape[: len(cut)], strict=True)
        ]
        starts = [start * stride for (start, _), stride in zip(bounds, self.strides, strict=False)]
        shape = (*(stop - start for start, stop in bounds), *self.shape[len(cut) :])
        return CudaTensor(self.address + sum(starts), shape, self.strides, self.dtype, self.owner)

    def copy_to(self, address: int, stream: Any) -> None:
        """Start to copy it to contiguous device memory."""
        self._copy(address, "DeviceToDevice", stream, out=True)

    def copy_from(self, address: int, stream: Any) -> None:
        """Start to fill it from contiguous device memory."""
        self._copy(address, "DeviceToDevice", stream, out=False)

    def fill(self, array: NDArray[Any]) -> None:
        """Fill it from the host, and wait."""
        source = np.ascontiguousarray(array)
        self._copy(source.ctypes.data, "HostToDevice", out=False)

    def read(self, target: NDArray[Any]) -> None:
        """Copy it to a contiguous host array, and wait."""
        self._copy(target.ctypes.data, "DeviceToHost", out=True)

    def _copy(self, other: int, way: str, stream: Any = None, *, out: bool) -> None:
        """Copy it ``out`` to contiguous memory at an address, or in from there; wait for the copy
        if there is no stream."""
        count, pitch, width = self.rows
        runtime = import_cupy().cuda.runtime
        kind, own = getattr(runtime, f"memcpy{way}"), (self.address, pitch)
        target, source = ((other, width), own) if out else (own, (other, width))
        if stream is None:
            runtime.memcpy2D(*target, *source, width, count, kind)
        elif count == 1:
            runtime.memcpyAsync(target[0], source[0], width, kind, stream.ptr)
        else:
            runtime.memcpy2DAsync(*target, *source, width, count, kind, stream.ptr)


class IpcMemory:
    """A region of another process's allocation, mapped by its IPC handle into the current context.

    Raises
    ------
    InvalidProblem
        The handle cannot be opened, or the allocation is smaller than ``size_bytes``.
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

    def array(self, offset: int, spec: TensorSpec) -> CudaTensor:
        """A tensor in it."""
        return CudaTensor.whole(self._address + offset, spec, self)

    def close(self) -> None:
        """Unmap it; nothing may use it any longer."""
        self._runtime.ipcCloseMemHandle(self._address)


def read_in_place(
    tensors: Mapping[str, Any], addresses: dict[str, int], stream: Any
) -> dict[str, NDArray[Any]]:
    """Set the addresses of tensors on the device, and return the others, which must be uploaded.

    A tensor that is not aligned is copied to the address that it had.
    """
    for name, tensor in tensors.items():
        if isinstance(tensor, CudaTensor):
            if tensor.is_aligned:
                addresses[name] = tensor.address
            else:
                tensor.copy_to(addresses[name], stream)
    return on_the_host(tensors)


def write_in_place(outputs: Mapping[str, Any], addresses: dict[str, int]) -> dict[str, CudaTensor]:
    """Set the addresses of outputs on the device; return those that must be copied afterwards."""
    to_move = {}
    for name, place in outputs.items():
        target = place.device if isinstance(place, Mirrored) else place
        if isinstance(target, CudaTensor):
            if target.is_aligned:
                addresses[name] = target.address
            else:
                to_move[name] = target
    return to_move


def on_the_host(tensors: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Return the host arrays: plain tensors, and the host copies of `Mirrored` ones."""
    return {
        name: each.host if isinstance(each, Mirrored) else each
        for name, each in tensors.items()
        if not isinstance(each, CudaTensor)
    }


def _allocation_of(address: int) -> tuple[int, int]:
    """Return start and size of the allocation that contains an address in the current context."""
    driver = ctypes.CDLL("libcuda.so.1")
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    status = driver.cuMemGetAddressRange_v2(
        ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)
    )
    if status != 0:
        raise InvalidProblem(f"the size of a CUDA allocation cannot be found (CUDA error {status})")
    return base.value, size.value
