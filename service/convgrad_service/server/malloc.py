"""Makes glibc's malloc keep large freed blocks.

By default it maps each large block anew and unmaps it when freed, so every body costs a page fault,
with zeroing, for each 4 KiB. Kept pages are reused for the next body.
"""

from __future__ import annotations

import ctypes
import sys

__all__ = ["keep_large_blocks"]

# From malloc.h. Setting any of them disables glibc's dynamic adjustment of the others.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8
_INT_MAX = 2**31 - 1  # mallopt takes an int


def keep_large_blocks(kept_bytes: int) -> bool:
    """Tune malloc in this process; return whether this is glibc and it accepted the options.

    All blocks then come from the heap instead of separate mappings, and the heap shrinks only when
    more than ``kept_bytes`` at its end are free. Call it early in the process.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # musl, for example
        return False
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    options = {
        _M_MMAP_MAX: 0,
        # Per-thread arenas would map blocks larger than 64 MiB regardless of M_MMAP_MAX.
        _M_ARENA_MAX: 1,
        _M_TRIM_THRESHOLD: min(kept_bytes, _INT_MAX),
        _M_TOP_PAD: 64 * 2**20,
    }
    return all(mallopt(option, value) == 1 for option, value in options.items())
