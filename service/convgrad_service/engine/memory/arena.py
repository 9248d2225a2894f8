"""The arena: memory shared by all processes of a server, which holds the tensors of requests.

It is an anonymous memory file (memfd), passed to each process as a descriptor. No other program
can open it, it needs no space in /dev/shm, and the kernel frees it with the last process.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from bisect import bisect_left
from mmap import PAGESIZE as PAGE_BYTES
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad_service.problems.base import TensorSpec

__all__ = ["PAGE_BYTES", "Arena", "FreeList"]


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


class Arena:
    """``size_bytes`` of shared memory, mapped into this process.

    A page takes physical memory only once it has been written, so a large arena is free until used.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.size_bytes = os.fstat(descriptor).st_size
        self._memory = mmap.mmap(descriptor, self.size_bytes)
        self._bytes = np.frombuffer(self._memory, np.uint8)

    @classmethod
    def create(cls, size_bytes: int) -> Arena:
        """Create an arena; raises OSError if the system has no memfd."""
        descriptor = os.memfd_create("convgrad-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, size_bytes)
        # Any process that shrank the file would make the others crash on their next access.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        return cls(descriptor)

    @property
    def address(self) -> int:
        """The address of the mapping in this process."""
        return int(self._bytes.ctypes.data)

    def view(self, offset: int, size_bytes: int) -> memoryview:
        """Return a range of bytes, writable."""
        return self._bytes[offset : offset + size_bytes].data

    def array(self, offset: int, spec: TensorSpec) -> NDArray[Any]:
        """Return the tensor at an offset, writable."""
        return np.ndarray(spec.shape, spec.dtype.numpy, self._bytes, offset)

    def discard(self, offset: int, size_bytes: int) -> None:
        """Return whole pages to the system; they read as zeros afterwards."""
        self._memory.madvise(mmap.MADV_REMOVE, offset, size_bytes)

    def resident_bytes(self) -> int:
        """Return the physical memory in use."""
        return os.fstat(self.descriptor).st_blocks * 512

    def close(self) -> None:
        """Close the descriptor; the mapping lives until its last array is gone."""
        os.close(self.descriptor)
