"""The shared-memory regions that this process has mapped: a worker computes in them in place.

The file is the client's, who may shorten it at any moment. Every mapping is guarded: what is
missing reads as zeros, the kernel that reads it comes to its end, and its request is refused.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from convgrad.errors import InvalidProblem
from convgrad_service.backends.base import (
    DeviceMemory,
    DeviceTensor,
    MappingGuard,
    guard_mapping,
)
from convgrad_service.engine.bounded_cache import BoundedCache
from convgrad_service.engine.shm.registry import InRegion
from convgrad_service.problems.base import TensorSpec

__all__ = ["Adopter", "RegionMappings", "apart", "shortened"]


# What kernels may rely on for whole vectors.
_ALIGNMENT_BYTES = 64


class Adopter(Protocol):
    """Who is told of memory in which tensors will lie: a `ServingBackend`, for one."""

    def adopt(self, address: int, size_bytes: int) -> None: ...

    def disown(self, address: int) -> None: ...


class _Segment:
    def __init__(self, descriptor: int, adopter: Adopter | None) -> None:
        found = os.fstat(descriptor)
        try:
            memory = mmap.mmap(descriptor, found.st_size)
        except ValueError:  # it has become empty
            raise shortened() from None
        except OSError as error:
            raise InvalidProblem(
                f"the file of a shared-memory region, {found.st_size:,} bytes, cannot be mapped: "
                f"{error.strerror}"
            ) from None
        self.bytes = np.frombuffer(memory, np.uint8)
        address = int(self.bytes.ctypes.data)
        self.guard = guard_mapping(address, found.st_size)
        if adopter is not None:
            adopter.adopt(address, found.st_size)
        ending = weakref.finalize(self.bytes, _let_go, memory, self.guard, adopter, address)
        ending.atexit = False


def _let_go(memory: mmap.mmap, guard: MappingGuard, adopter: Adopter | None, address: int) -> None:
    """Called when the last tensor in a mapping has gone.

    It holds the mapping until this is done: before that, no other may have its address.
    """
    guard.remove()
    if adopter is not None:
        adopter.disown(address)


class RegionMappings:
    """Mappings by the number that the hub gave each region. Safe to use from any thread."""

    def __init__(
        self,
        open_handle: Callable[[bytes, int], DeviceMemory],
        adopter: Adopter | None = None,
    ) -> None:
        self._open_handle, self._adopter = open_handle, adopter
        self._segments: dict[int, _Segment] = {}
        self._refused: dict[int, InvalidProblem] = {}
        self._on_device: dict[int, DeviceMemory] = {}
        self._opening = threading.Lock()
        self.tensors = BoundedCache()
        """Of places that are used again and again, as long as no region goes."""

    def open(self, number: int, descriptor: int) -> None:
        """Map a region's file, unless it is mapped; the caller keeps and closes the descriptor.

        Raises
        ------
        InvalidProblem
            The file has become empty, or is too large to be mapped. Until it is closed, `array`
            raises the same.
        """
        with self._opening:
            if number in self._segments:
                return
            try:
                self._segments[number] = _Segment(descriptor, self._adopter)
            except InvalidProblem as error:
                self._refused[number] = error
                raise
            self._refused.pop(number, None)

    def open_on_device(self, number: int, handle: bytes, size_bytes: int) -> None:
        """Open a region of a device's memory, unless it is open.

        Raises
        ------
        InvalidProblem
            It cannot be opened any more, or has become smaller.
        """
        with self._opening:
            if number not in self._on_device:
                self._on_device[number] = self._open_handle(handle, size_bytes)

    def close(self, number: int) -> None:
        """Unmap a region that no job uses any more."""
        self.tensors.clear()
        self._segments.pop(number, None)
        self._refused.pop(number, None)
        if (memory := self._on_device.pop(number, None)) is not None:
            memory.close()

    def on_device(self, place: InRegion, spec: TensorSpec) -> DeviceTensor:
        """A tensor in a region of a device's memory."""
        memory = self._on_device.get(place.file)
        if memory is None:
            raise InvalidProblem("a region of CUDA shared memory could not be opened")
        return memory.array(place.offset, spec)

    def array(self, place: InRegion, spec: TensorSpec) -> NDArray[Any]:
        """A writable tensor in a region.

        Raises
        ------
        InvalidProblem
            The file is too short to hold it.
        """
        segment = self._segments.get(place.file)
        if segment is None:
            raise self._refused.get(place.file) or shortened()
        found = segment.bytes[place.offset : place.offset + spec.size_bytes]
        if found.size < spec.size_bytes:
            raise shortened()
        return found.view(spec.dtype.numpy).reshape(spec.shape)

    def check(self, numbers: Iterable[int]) -> None:
        """Call it with a job's regions when the job is done.

        Raises
        ------
        InvalidProblem
            Something of a region was missing: what was computed from it is worth nothing.
        """
        for number in numbers:
            segment = self._segments.get(number)
            if segment is not None and segment.guard.lost() is not None:
                raise shortened()


def apart(
    places: Mapping[str, InRegion], outputs: Collection[str], specs: Mapping[str, TensorSpec]
) -> set[str]:
    """Of the tensors in regions those that cannot be computed in place.

    Their address suits no kernel, or one of the ``outputs`` lies where another tensor lies too.
    """
    extents = {
        name: (place.identity, place.offset, place.offset + specs[name].size_bytes)
        for name, place in places.items()
    }
    # Files are mapped from their start, on whole pages; of devices, backends know what suits.
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


def shortened() -> InvalidProblem:
    """What a request is refused with whose shared memory is not all there any more."""
    return InvalidProblem(
        "the file of a shared-memory region has been shortened since it was registered; "
        "register it again"
    )
