"""Host memory that is not ours but that the GPU copies from and to by itself, once page-locked."""

from __future__ import annotations

import logging
import threading
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


class Pinned:
    """A range of host memory, page-locked piece by piece. Safe to use from any thread.

    Where the system refuses to lock it, there simply is none, and copies go the longer way.
    """

    def __init__(self) -> None:
        self._runtime: Any = import_cupy().cuda.runtime
        self._lock = threading.Lock()
        self._start = self._end = 0
        self._locked: set[int] = set()

    def adopt(self, address: int, size_bytes: int) -> None:
        """Take on a range, which starts on a page and stays mapped as long as the process lives."""
        self._start, self._end = address, address + size_bytes

    def stretches(self, array: NDArray[Any]) -> list[tuple[int, int]] | None:
        """Address and size of each part of an array that can be copied at once.

        None where the array lies elsewhere, or not in one piece.
        """
        address, end = array.ctypes.data, array.ctypes.data + array.nbytes
        if not self._start <= address <= end <= self._end or not array.flags.c_contiguous:
            return None
        first = (address - self._start) // GRANULE_BYTES
        last = max(first, (end - 1 - self._start) // GRANULE_BYTES)
        for granule in range(first, last + 1):
            if granule not in self._locked and not self._lock_granule(granule):
                return None
        # A copy may not cross from one locked piece into the next.
        cuts = [self._start + granule * GRANULE_BYTES for granule in range(first + 1, last + 1)]
        bounds = [address, *cuts, end]
        return [(low, high - low) for low, high in pairwise(bounds)]

    def _lock_granule(self, granule: int) -> bool:
        start = self._start + granule * GRANULE_BYTES
        with self._lock:
            if granule in self._locked:
                return True
            if self._start == self._end:
                return False
            try:
                size = min(GRANULE_BYTES, self._end - start)
                self._runtime.hostRegister(start, size, _PORTABLE)
            except self._runtime.CUDARuntimeError as error:
                _log.warning("host memory cannot be page-locked, copies will be slower: %s", error)
                self._start = self._end = 0
                return False
            self._locked.add(granule)
            return True
