"""Which parts of a range of bytes are free, and which part is given out next."""

from __future__ import annotations

from bisect import bisect_left

__all__ = ["PAGE_BYTES", "FreeList"]

PAGE_BYTES = 4096
"""Places begin and end on pages, so that one can be given back to the system alone."""


class FreeList:
    """The free parts of ``size_bytes`` bytes from ``start``: first fit, lowest first.

    Lowest first, so that a server that is not full keeps using the same pages, which are mapped and
    warm. Neighbours that are free are one free part, so nothing stays cut up once it is given back.
    """

    def __init__(self, start: int, size_bytes: int) -> None:
        self.start = start
        self.size_bytes = size_bytes // PAGE_BYTES * PAGE_BYTES
        self.used_bytes = 0
        # Sorted, never touching each other; the sizes stand at the same index.
        self._offsets = [start]
        self._sizes = [self.size_bytes]

    @staticmethod
    def rounded(size_bytes: int) -> int:
        """What a place of ``size_bytes`` takes."""
        return max(PAGE_BYTES, -(-size_bytes // PAGE_BYTES) * PAGE_BYTES)

    def take(self, size_bytes: int) -> int | None:
        """The offset of a place of this size, or None where none is free."""
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

    def give(self, offset: int, size_bytes: int) -> None:
        """Take back a place that `take` gave for the same size."""
        size = self.rounded(size_bytes)
        index = bisect_left(self._offsets, offset)
        self._offsets.insert(index, offset)
        self._sizes.insert(index, size)
        self.used_bytes -= size
        self._join(index)
        if index > 0:
            self._join(index - 1)

    def _join(self, index: int) -> None:
        """Make one of the free part at ``index`` and the next, where they touch."""
        if index + 1 == len(self._offsets):
            return
        if self._offsets[index] + self._sizes[index] == self._offsets[index + 1]:
            self._sizes[index] += self._sizes[index + 1]
            del self._offsets[index + 1], self._sizes[index + 1]
