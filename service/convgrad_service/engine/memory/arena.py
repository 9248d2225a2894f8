"""The memory that all processes of a server share: bodies land in it, answers leave from it.

An anonymous memory file, handed to each process as a descriptor. It has no name that another
program could open, needs no room in /dev/shm, and goes when its last process does.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad_service.engine.bounded_cache import BoundedCache
from convgrad_service.problems.base import TensorSpec

__all__ = ["ALIGNMENT_BYTES", "Arena", "arranged"]

ALIGNMENT_BYTES = 256
"""Every tensor begins on a multiple of this: whole cache lines, and what GPUs copy best."""


class Arena:
    """``size_bytes`` of shared memory, mapped into this process.

    Memory is taken from the system when a page is first written, so a large arena costs nothing
    until it is used.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.size_bytes = os.fstat(descriptor).st_size
        self._memory = mmap.mmap(descriptor, self.size_bytes)
        self._bytes = np.frombuffer(self._memory, np.uint8)
        self.tensors = BoundedCache()
        """Of places that are given again and again."""

    @classmethod
    def create(cls, size_bytes: int) -> Arena:
        """A new arena; raises OSError where the system has no memory files."""
        descriptor = os.memfd_create("convgrad-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, size_bytes)
        # A process that shrank it would make every other one fail at its next access.
        fcntl.fcntl(
            descriptor,
            fcntl.F_ADD_SEALS,
            fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL,
        )
        return cls(descriptor)

    @property
    def address(self) -> int:
        """Where it is mapped in this process."""
        return int(self._bytes.ctypes.data)

    def view(self, offset: int, size_bytes: int) -> memoryview:
        """Writable bytes of it."""
        return self._bytes[offset : offset + size_bytes].data

    def array(self, offset: int, spec: TensorSpec) -> NDArray[Any]:
        """A writable tensor at an offset."""
        flat = self._bytes[offset : offset + spec.size_bytes].view(spec.dtype.numpy)
        return flat.reshape(spec.shape)

    def forget(self, offset: int, size_bytes: int) -> None:
        """Give whole pages back to the system; they read as zeros from then on."""
        self._memory.madvise(mmap.MADV_REMOVE, offset, size_bytes)

    def resident_bytes(self) -> int:
        """What the system holds for it now."""
        return os.fstat(self.descriptor).st_blocks * 512

    def close(self) -> None:
        """Close the descriptor; the memory goes with the last array that refers to it."""
        os.close(self.descriptor)


def arranged(specs: Iterable[TensorSpec]) -> tuple[list[int], int]:
    """Where each tensor begins in one place that holds them all, and the size of the place."""
    offsets, end = [], 0
    for spec in specs:
        offsets.append(end)
        end += -(-spec.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return offsets, end
