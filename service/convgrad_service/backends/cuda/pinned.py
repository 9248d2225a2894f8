"""Page-locking of shared memory, so that the GPU copies from and to it without staging."""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right
from itertools import pairwise
from typing import Any

from numpy.typing import NDArray

from convgrad_service.backends.cuda.device import import_cupy

__all__ = ["Pinned"]

_log = logging.getLogger("convgrad.backends.cuda")

GRANULE_BYTES = 64 * 2**20
"""Unit of page-locking, on first use. Locking takes 0.2 s for each GiB, and locked memory cannot be
swapped, so a server locks only what its requests use."""

_PORTABLE = 1  # cudaHostRegisterPortable: for every context of the process


class _Range:
    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end
        self.locked: set[int] = set()
        self.refused = False

    def granule(self, number: int) -> tuple[int, int]:
        """Return address and size of a granule."""
        start = self.start + number * GRANULE_BYTES
        return start, min(GRANULE_BYTES, self.end - start)


class Pinned:
    """Ranges of host memory, page-locked by granules. Thread-safe.

    If the system refuses to lock a granule, tensors in its range are copied through staging.
    """

    def __init__(self) -> None:
        self._runtime: Any = import_cupy().cuda.runtime
        self._lock = threading.Lock()
        # Sorted by start. The tuple is replaced and never modified, so that readers need no lock.
        self._ranges: tuple[_Range, ...] = ()

    def adopt(self, address: int, size_bytes: int) -> None:
        """Add a range, which starts at a page boundary and stays mapped until `disown`."""
        added = _Range(address, address + size_bytes)
        with self._lock:
            self._ranges = tuple(sorted((*self._ranges, added), key=_start))

    def disown(self, address: int) -> None:
        """Unlock and remove the range at an address, which must not be in use."""
        with self._lock:
            (found,) = (each for each in self._ranges if each.start == address)
            self._ranges = tuple(each for each in self._ranges if each is not found)
            for number in found.locked:
                try:
                    self._runtime.hostUnregister(found.granule(number)[0])
                except self._runtime.CUDARuntimeError as error:
                    _log.warning("host memory cannot be unlocked: %s", error)

    def stretches(self, array: NDArray[Any]) -> list[tuple[int, int]] | None:
        """Return address and size of each part of an array that one copy may cover.

        None if the array is not contiguous, or not in locked memory.
        """
        address, end = array.ctypes.data, array.ctypes.data + array.nbytes
        ranges = self._ranges
        found = ranges[bisect_right(ranges, address, key=_start) - 1] if ranges else None
        if found is None or not found.start <= address <= end <= found.end:
            return None
        if not array.flags.c_contiguous:
            return None
        first = (address - found.start) // GRANULE_BYTES
        last = max(first, (end - 1 - found.start) // GRANULE_BYTES)
        for number in range(first, last + 1):
            if number not in found.locked and not self._lock_granule(found, number):
                return None
        # A copy may not cross from one locked granule into the next.
        cuts = [found.granule(number)[0] for number in range(first + 1, last + 1)]
        bounds = [address, *cuts, end]
        return [(low, high - low) for low, high in pairwise(bounds)]

    def _lock_granule(self, found: _Range, number: int) -> bool:
        with self._lock:
            if number in found.locked:
                return True
            if found.refused:
                return False
            try:
                self._runtime.hostRegister(*found.granule(number), _PORTABLE)
            except self._runtime.CUDARuntimeError as error:
                _log.warning("host memory cannot be page-locked, copies will be slower: %s", error)
                found.refused = True
                return False
            found.locked.add(number)
            return True


def _start(found: _Range) -> int:
    return found.start
