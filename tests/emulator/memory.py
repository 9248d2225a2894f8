"""Buffers for emulated kernels, separated by inaccessible memory."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

__all__ = ["Buffers", "Stretch"]

# A buffer ends at a page boundary, so that accesses behind it fault at once. The bytes between the
# start of its first page and the buffer hold a pattern, to detect writes.
PAGE_BYTES = mmap.PAGESIZE
FENCE_BYTES = 256 * 1024
# The widest access of the hardware: kernels read the end of a row as a whole aligned chunk.
CHUNK_BYTES = 16
PATTERN = 0x5A


class Stretch(ctypes.Structure):
    """See ``emulator.hpp``."""

    _fields_ = (("begin", ctypes.c_void_p), ("end", ctypes.c_void_p), ("name", ctypes.c_char_p))


class Buffers:
    """Named buffers of these sizes, filled with one byte, each between two fences.

    Buffers are aligned to 16 bytes only, although those of a GPU are aligned to 256.
    """

    def __init__(self, sizes: Mapping[str, int], filled: int) -> None:
        pages = {name: _whole(max(size, 1), PAGE_BYTES) for name, size in sizes.items()}
        size = sum(pages.values()) + (len(pages) + 1) * FENCE_BYTES
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole: NDArray[np.uint8] = np.frombuffer(self._memory, np.uint8)
        base = whole.ctypes.data
        self._beside: dict[str, list[NDArray[np.uint8]]] = {}
        bytes_: dict[str, NDArray[np.uint8]] = {}
        at = 0
        _forbid(base, FENCE_BYTES)
        for name, wanted in sizes.items():
            at += FENCE_BYTES
            page_end = at + pages[name]
            start = page_end - _whole(wanted, CHUNK_BYTES)
            whole[at:page_end] = PATTERN
            bytes_[name] = whole[start : start + wanted]
            bytes_[name][...] = filled
            self._beside[name] = [whole[at:start], whole[start + wanted : page_end]]
            at = page_end
            _forbid(base + at, FENCE_BYTES)
        self.bytes: Mapping[str, NDArray[np.uint8]] = MappingProxyType(bytes_)
        """The bytes of each buffer."""
        self.addresses = {name: array.ctypes.data for name, array in bytes_.items()}
        self.stretches = (Stretch * len(sizes))(
            *(
                Stretch(address, address + sizes[name], name.encode())
                for name, address in self.addresses.items()
            )
        )

    def spilled(self) -> str | None:
        """Return the name of the first buffer with a write next to it, or None."""
        for name, beside in self._beside.items():
            if any((stretch != PATTERN).any() for stretch in beside):
                return name
        return None


def _whole(size: int, unit: int) -> int:
    return -(-size // unit) * unit


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _forbid(address: int, size: int) -> None:
    assert _libc.mprotect(address, size, 0) == 0, ctypes.get_errno()
