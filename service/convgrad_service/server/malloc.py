"""Telling glibc's malloc that large blocks are wanted again soon.

By default it maps each large block anew and gives it back when freed, so every body costs a page
fault for each 4 KiB of it, zeroing included. Kept, the same pages serve the next body.
"""

from __future__ import annotations

import ctypes
import sys

__all__ = ["keep_large_blocks"]

# From malloc.h. Setting any of them turns glibc's own adapting off.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8
_INT_MAX = 2**31 - 1  # mallopt takes an int


def keep_large_blocks(kept_bytes: int) -> bool:
    """Tune malloc for this process; True if there is a glibc and it agreed.

    Blocks come from the heap and never from maps of their own, and the heap is given back only
    beyond ``kept_bytes`` of free space at its end. Call it before the heap holds much.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # musl, or a libc that hides it
        return False
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    wanted = {
        _M_MMAP_MAX: 0,
        # A thread's own arena maps what is larger than itself (64 MiB), whatever M_MMAP_MAX says.
        _M_ARENA_MAX: 1,
        _M_TRIM_THRESHOLD: min(kept_bytes, _INT_MAX),
        _M_TOP_PAD: 64 * 2**20,
    }
    return all(mallopt(option, value) == 1 for option, value in wanted.items())
