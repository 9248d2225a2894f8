"""The shared-memory regions that this process has mapped: a worker computes in them in place.

The file is the client's, who may shorten it at any moment. Every mapping is guarded: what is
missing reads as zeros, the kernel that reads it comes to its end, and its request is refused.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad.errors import InvalidProblem
from convgrad_service.backends.cpu.guard import Guard
from convgrad_service.engine.arena import Arena
from convgrad_service.engine.regions import InRegion
from convgrad_service.problems.base import TensorSpec

__all__ = ["Place", "Segments", "array_at", "numbers_of"]

Place = int | InRegion
"""Where a tensor lies: an offset in the arena, or a place in a client's region."""


class _Segment:
    def __init__(self, descriptor: int) -> None:
        size_bytes = os.fstat(descriptor).st_size
        self.bytes = np.frombuffer(mmap.mmap(descriptor, size_bytes), np.uint8)
        self.guard = Guard(self.bytes.ctypes.data, size_bytes)
        # The mapping goes with the last tensor in it, and the guard just before.
        weakref.finalize(self.bytes, self.guard.remove).atexit = False


class Segments:
    """Mappings by the number that the hub gave each region. Safe to use from any thread."""

    def __init__(self) -> None:
        self._segments: dict[int, _Segment] = {}

    def open(self, number: int, descriptor: int) -> None:
        """Map a region's file, unless it is mapped; the caller keeps and closes the descriptor."""
        if number not in self._segments:
            self._segments[number] = _Segment(descriptor)

    def close(self, number: int) -> None:
        """Unmap a region that no job uses any more."""
        self._segments.pop(number, None)

    def array(self, place: InRegion, spec: TensorSpec) -> NDArray[Any]:
        """A writable tensor in a region.

        Raises
        ------
        InvalidProblem
            The file is too short to hold it.
        """
        segment = self._segments[place.file]
        found = segment.bytes[place.offset : place.offset + spec.size_bytes]
        if found.size < spec.size_bytes:
            raise _shortened()
        return found.view(spec.dtype.numpy).reshape(spec.shape)

    def check(self, places: Iterable[Place]) -> None:
        """Call it when a job is done.

        Raises
        ------
        InvalidProblem
            Something of the job's regions was missing: what was computed from it is worth nothing.
        """
        for place in places:
            if isinstance(place, InRegion) and self._segments[place.file].guard.lost() is not None:
                raise _shortened()


def array_at(place: Place, spec: TensorSpec, arena: Arena, segments: Segments) -> NDArray[Any]:
    """A writable tensor, wherever it lies."""
    if isinstance(place, InRegion):
        return segments.array(place, spec)
    return arena.array(place, spec)


def numbers_of(*places: Mapping[str, Place]) -> set[int]:
    """The regions that places lie in."""
    return {place.file for each in places for place in each.values() if isinstance(place, InRegion)}


def _shortened() -> InvalidProblem:
    return InvalidProblem(
        "the file of a shared-memory region has been shortened since it was registered; "
        "register it again"
    )
