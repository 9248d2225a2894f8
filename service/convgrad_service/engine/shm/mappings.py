"""A worker's mappings of shared-memory regions, in which it computes in place.

The client owns the file and may truncate it at any moment. Every mapping is guarded: missing pages
read as zeros, so that a running kernel ends normally, and its request is then refused.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad.errors import InvalidProblem
from convgrad_service.backends.base import (
    DeviceMemory,
    DeviceTensor,
    MappingGuard,
    ServingBackend,
    guard_mapping,
)
from convgrad_service.engine.shm.registry import RegionSlice
from convgrad_service.problems.base import TensorSpec

# Kernels may rely on this for vector loads.
_ALIGNMENT_BYTES = 64


class _Mapping:
    def __init__(self, descriptor: int, end: int, backend: ServingBackend) -> None:
        size_bytes = min(os.fstat(descriptor).st_size, end)
        if size_bytes == 0:  # it has become empty; mmap would map what it has become since
            raise truncated()
        try:
            memory = mmap.mmap(descriptor, size_bytes)
        except ValueError:  # it has just become shorter
            raise truncated() from None
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise  # a shortage of this process, which a new one does not have
            raise InvalidProblem(
                f"a shared-memory region, up to byte {size_bytes:,} of its file, cannot be mapped: "
                f"{error.strerror}"
            ) from None
        self.bytes = np.frombuffer(memory, np.uint8)
        address = int(self.bytes.ctypes.data)
        self.guard = guard_mapping(address, size_bytes)
        backend.adopt(address, size_bytes)
        finalizer = weakref.finalize(self.bytes, _unmap, memory, self.guard, backend, address)
        finalizer.atexit = False


def _unmap(memory: mmap.mmap, guard: MappingGuard, backend: ServingBackend, address: int) -> None:
    """Clean up once the last array of a mapping is gone.

    ``memory`` is referenced until the end so that no other mapping can get its address before.
    """
    guard.remove()
    backend.disown(address)


class RegionMappings:
    """Mappings, for a backend, by the hub's region number. Safe to use from any thread."""

    def __init__(self, backend: ServingBackend) -> None:
        self._backend = backend
        self._mappings: dict[int, _Mapping] = {}
        self._refused: dict[int, str] = {}
        self._on_device: dict[int, DeviceMemory] = {}
        self._opening = threading.Lock()

    def open(self, number: int, descriptor: int, end: int) -> None:
        """Map a region's file up to ``end`` unless it is mapped; the caller closes the descriptor.

        Raises
        ------
        InvalidProblem
            The file is empty, or cannot be mapped; `array` then raises the same.
        OSError
            This process has no descriptor left.
        """
        with self._opening:
            if number in self._mappings:
                return
            try:
                self._mappings[number] = _Mapping(descriptor, end, self._backend)
            except InvalidProblem as error:
                self._refused[number] = error.detail
                raise
            self._refused.pop(number, None)

    def open_on_device(self, number: int, handle: bytes, size_bytes: int) -> None:
        """Open device memory by its IPC handle unless it is open.

        Raises
        ------
        InvalidProblem
            It is gone, or has become smaller.
        """
        with self._opening:
            if number not in self._on_device:
                self._on_device[number] = self._backend.open_handle(handle, size_bytes)

    def close(self, number: int) -> None:
        """Unmap a region that is no longer in use."""
        self._mappings.pop(number, None)
        self._refused.pop(number, None)
        if (memory := self._on_device.pop(number, None)) is not None:
            memory.close()

    def on_device(self, place: RegionSlice, spec: TensorSpec) -> DeviceTensor:
        """Return a tensor in device memory."""
        memory = self._on_device.get(place.region)
        if memory is None:
            raise InvalidProblem("a region of CUDA shared memory could not be opened")
        return memory.array(place.offset, spec)

    def array(self, place: RegionSlice, spec: TensorSpec) -> NDArray[Any]:
        """Return a tensor in a region's file, writable.

        Raises
        ------
        InvalidProblem
            The file is too short to hold it.
        """
        mapping = self._mappings.get(place.region)
        if mapping is None:
            refused = self._refused.get(place.region)
            raise truncated() if refused is None else InvalidProblem(refused)
        found = mapping.bytes[place.offset : place.offset + spec.size_bytes]
        if found.size < spec.size_bytes:
            raise truncated()
        return found.view(spec.dtype.numpy).reshape(spec.shape)

    def check(self, numbers: Iterable[int]) -> None:
        """Check the regions of a finished job.

        Raises
        ------
        InvalidProblem
            Pages of a region were missing, so the result is wrong.
        """
        for number in numbers:
            mapping = self._mappings.get(number)
            if mapping is not None and mapping.guard.lost() is not None:
                raise truncated()


def not_in_place(
    places: Mapping[str, RegionSlice], outputs: Collection[str], specs: Mapping[str, TensorSpec]
) -> set[str]:
    """Return the tensors in regions that cannot be computed in place.

    These are misaligned tensors, and ``outputs`` that overlap another tensor.
    """
    extents = {
        name: (place.identity, place.offset, place.offset + specs[name].size_bytes)
        for name, place in places.items()
    }
    # Files are mapped from their start, on whole pages; backends check device memory themselves.
    names = {
        name
        for name, ((device, _), start, _) in extents.items()
        if device >= 0 and start % _ALIGNMENT_BYTES
    }
    for name in outputs:
        if name not in extents:
            continue
        file, start, end = extents[name]
        for other, (other_file, other_start, other_end) in extents.items():
            if other != name and file == other_file and start < other_end and other_start < end:
                names.add(name)
    return names


def truncated() -> InvalidProblem:
    """Return the error for a request whose shared-memory file was truncated."""
    return InvalidProblem(
        "the file of a shared-memory region has been shortened since it was registered; "
        "register it again"
    )
