"""The arena: memory shared by all processes of a server, which holds the tensors of requests.

It is an anonymous memory file (memfd), passed to each process as a descriptor. No other program
can open it, it needs no space in /dev/shm, and the kernel frees it with the last process.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad_service.problems.base import TensorSpec

__all__ = ["Arena"]


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
