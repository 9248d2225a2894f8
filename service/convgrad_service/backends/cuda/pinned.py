"""Host memory that is not ours but that the GPU copies from and to by itself, once page-locked."""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right
from itertools import pairwise
from typing import Any

from numpy.typing import NDArray

from convgrad_service.backends.cuda.device import import_cupy

__all__ = ["GRANULE_BYTES", "Pinned"]

_log = logging.getLogger("convgrad.backends.cuda")

GRANULE_BYTES = 64 * 2**20
"""What is page-locked at a time, when it is first used. Locking takes 0.2 s a GiB, and takes the
memory from the system for good, so a server locks no more than its requests have used."""

_PORTABLE = 1  # cudaHostRegisterPortable: for every context of the process


class _Range:
    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end
        self.locked: set[int] = set()
        self.refused = False

    def granule(self, number: int) -> tuple[int, int]:
        """Address and size of a granule."""
        start = self.start + number * GRANULE_BYTES
        return start, min(GRANULE_BYTES, self.end - start)


class Pinned:
    """Ranges of host memory, page-locked piece by piece. Safe to use from any thread.

    Where the system refuses to lock one, copies of what lies there go the longer way.
    """

    def __init__(self) -> None:
        self._runtime: Any = import_cupy().cuda.runtime
        self._lock = threading.Lock()
        # By where they start; replaced and never changed, so that readers need no lock.
        self._ranges: tuple[_Range, ...] = ()

    def adopt(self, address: int, size_bytes: int) -> None:
        """Take on a range, which starts on a page and stays mapped until `disown`."""
        added = _Range(address, address + size_bytes)
        with self._lock:
            self._ranges = tuple(sorted((*self._ranges, added), key=_start))

    def disown(self, address: int) -> None:
        """Let go of the range that starts there, which nothing copies from or to any more."""
        with self._lock:
            (found,) = (each for each in self._ranges if each.start == address)
            self._ranges = tuple(each for each in self._ranges if each is not found)
            for number in found.locked:
                try:
                    self._runtime.hostUnregister(found.granule(number)[0])
                except self._runtime.CUDARuntimeError as error:
                    _log.warning("host memory cannot be given back: %s", error)

    def stretches(self, array: NDArray[Any]) -> list[tuple[int, int]] | None:
        """Address and size of each part of an array that can be copied at once.

        None where the array lies elsewhere, or not in one piece.
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
        # A copy may not cross from one locked piece into the next.
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
