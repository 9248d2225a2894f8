"""A first-fit allocator of a range of bytes, in whole pages."""

from __future__ import annotations

from bisect import bisect_left
from mmap import PAGESIZE as PAGE_BYTES

__all__ = ["PAGE_BYTES", "FreeList"]


class FreeList:
    """The free blocks of ``size_bytes`` bytes from ``start``.

    First fit from the lowest address, so that a server that is not full keeps reusing the same warm
    pages. Adjacent free blocks are merged. Blocks are whole pages, so that each can be returned to
    the system on its own.
    """

    def __init__(self, start: int, size_bytes: int) -> None:
        self.start = start
        self.size_bytes = size_bytes // PAGE_BYTES * PAGE_BYTES
        self.used_bytes = 0
        # Parallel lists, sorted by offset; no two blocks are adjacent.
        self._offsets = [start] if self.size_bytes else []
        self._sizes = [self.size_bytes] if self.size_bytes else []

    @staticmethod
    def rounded(size_bytes: int) -> int:
        """Return the bytes that an allocation of ``size_bytes`` takes."""
        return max(PAGE_BYTES, -(-size_bytes // PAGE_BYTES) * PAGE_BYTES)

    def fits(self, size_bytes: int) -> bool:
        """Return whether `allocate` would find a block."""
        return max(self._sizes, default=0) >= self.rounded(size_bytes)

    def allocate(self, size_bytes: int) -> int | None:
        """Return the offset of a new block, or None if no free block is large enough."""
        wanted = self.rounded(size_bytes)
        for index, free in enumerate(self._sizes):
            if free < wanted:
                continue
            offset = self._offsets[index]
            if free == wanted:
                del self._offsets[index], self._sizes[index]
            else:
                self._offsets[index] += wanted
                self._sizes[index] -= wanted
            self.used_bytes += wanted
            return offset
        return None

    def free(self, offset: int, size_bytes: int) -> None:
        """Free a block that `allocate` returned for the same size."""
        size = self.rounded(size_bytes)
        index = bisect_left(self._offsets, offset)
        self._offsets.insert(index, offset)
        self._sizes.insert(index, size)
        self.used_bytes -= size
        self._merge(index)
        if index > 0:
            self._merge(index - 1)

    def _merge(self, index: int) -> None:
        """Merge the block at ``index`` with the next one if they are adjacent."""
        if index + 1 == len(self._offsets):
            return
        if self._offsets[index] + self._sizes[index] == self._offsets[index + 1]:
            self._sizes[index] += self._sizes[index + 1]
            del self._offsets[index + 1], self._sizes[index + 1]
