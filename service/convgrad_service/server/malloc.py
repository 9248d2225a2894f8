"""Makes glibc's malloc keep large freed blocks, up to a limit.

By default it maps each large block anew and unmaps it when freed, so every body costs a page fault,
with zeroing, for each 4 KiB. Kept pages are reused for the next body.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading

# From malloc.h. Setting any of them disables glibc's dynamic adjustment of the others.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8
_INT_MAX = 2**31 - 1  # mallopt takes an int
# Memory beyond the limit is returned once it has been unused at this many checks in a row.
_CHECKS = 3


def keep_large_blocks(kept_bytes: int, *, check_s: float = 2.0) -> bool:
    """Tune malloc in this process; return whether this is glibc and it accepted the options.

    All blocks then come from the heap instead of separate mappings. At most ``kept_bytes`` of
    the heap stay resident while unused, except for about 3 ``check_s``. Call it early in the
    process.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        heap = _Heap(ctypes.CDLL(None), kept_bytes)
    except (AttributeError, OSError):  # musl, for example, or glibc before 2.33
        return False
    options = {
        _M_MMAP_MAX: 0,
        # Per-thread arenas would map blocks larger than 64 MiB regardless of M_MMAP_MAX.
        _M_ARENA_MAX: 1,
        _M_TRIM_THRESHOLD: min(kept_bytes, _INT_MAX),
        _M_TOP_PAD: 64 * 2**20,
    }
    if not all(heap.mallopt(option, value) == 1 for option, value in options.items()):
        return False
    threading.Thread(target=heap.check_for_ever, args=(check_s,), name="heap", daemon=True).start()
    return True


class _Mallinfo2(ctypes.Structure):
    """``struct mallinfo2``; ``uordblks`` is the number of bytes in blocks that are in use."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


class _Heap:
    """Returns unused pages between blocks to the system.

    M_TRIM_THRESHOLD applies to the end of the heap only: one small block there would keep whatever
    has been freed below it.
    """

    def __init__(self, libc: ctypes.CDLL, kept_bytes: int) -> None:
        self.mallopt, self._mallinfo2, self._trim = libc.mallopt, libc.mallinfo2, libc.malloc_trim
        self.mallopt.argtypes, self.mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
        self._mallinfo2.argtypes, self._mallinfo2.restype = [], _Mallinfo2
        self._trim.argtypes, self._trim.restype = [ctypes.c_size_t], ctypes.c_int
        self._page_bytes = mmap.PAGESIZE
        # Open for good: there may be no descriptor left when it is read.
        self._statm = os.open("/proc/self/statm", os.O_RDONLY)
        self._kept_bytes = kept_bytes
        self._least_bytes = self._unused_bytes()
        self._checks_above = 0

    def check_for_ever(self, every_s: float) -> None:
        """Check repeatedly whether too much stays unused."""
        never = threading.Event()
        while not never.wait(every_s):
            self._check()

    def _check(self) -> None:
        unused_bytes = self._unused_bytes()
        self._least_bytes = min(self._least_bytes, unused_bytes)
        if unused_bytes - self._least_bytes <= self._kept_bytes:
            self._checks_above = 0
            return
        self._checks_above += 1
        if self._checks_above == _CHECKS:
            self._trim(0)
            self._least_bytes, self._checks_above = self._unused_bytes(), 0

    def _unused_bytes(self) -> int:
        """Return the resident private memory that is not in blocks in use.

        Some of it is not heap, such as stacks, so it is compared with the least seen so far.
        """
        fields = os.pread(self._statm, 256, 0).split()
        resident, shared = int(fields[1]), int(fields[2])
        return (resident - shared) * self._page_bytes - int(self._mallinfo2().uordblks)
