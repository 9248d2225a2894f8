"""The arena: memory shared by all processes of a server, leased to requests for their tensors.

It is an anonymous memory file (memfd), passed to each process as a descriptor. No other program
can open it, it needs no space in /dev/shm, and the kernel frees it with the last process.

A request leases memory for all its inputs and outputs at once, so no request ever holds memory
while it waits for more, and there is no deadlock. Leases are granted in the order of arrival: small
requests do not overtake a large one that waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import mmap
import os
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from mmap import PAGESIZE as PAGE_BYTES
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from convgrad.errors import DeviceOutOfMemory, Overloaded, ProblemTooLarge
from convgrad_service.engine.shm.registry import RegionSlice
from convgrad_service.problems.base import TensorSpec

# Nobody knows when memory will be free again; the SDK's first retries wait a second anyway.
_RETRY_AFTER_S = 1.0
# Up to this size, pages are discarded on the event loop.
_DISCARD_INLINE_BYTES = 4 * 2**20


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


def memory_file(name: str, size_bytes: int) -> int:
    """Create an anonymous memory file; raises OSError."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size_bytes)
    # Any process that shrank the file would make the others crash on their next access.
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


class Arena:
    """``size_bytes`` of shared memory, mapped into this process.

    A page takes physical memory only once it has been written, so a large arena is free until used.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.size_bytes = os.fstat(descriptor).st_size
        self._memory = mmap.mmap(descriptor, self.size_bytes)
        self._view = memoryview(self._memory)
        self._bytes = np.frombuffer(self._memory, np.uint8)

    @classmethod
    def create(cls, size_bytes: int) -> Arena:
        """Create an arena; raises OSError if the system has no memfd."""
        return cls(memory_file("convgrad-arena", size_bytes))

    @property
    def address(self) -> int:
        """The address of the mapping in this process."""
        return int(self._bytes.ctypes.data)

    def view(self, offset: int, size_bytes: int) -> memoryview:
        """Return a range of bytes, writable."""
        return self._view[offset : offset + size_bytes]

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


class Lease:
    """A block of the arena, freed when its last holder releases it. For the event loop's thread.

    The request holds it, and so does every thread or worker that may still access the memory after
    the request has been cancelled or has missed its deadline.
    """

    def __init__(self, offset: int, size_bytes: int, on_release: Callable[[Lease], None]) -> None:
        self.offset = offset
        self.size_bytes = size_bytes
        self.regions: tuple[RegionSlice, ...] = ()
        """Shared memory that is in use as long as the lease."""
        self._on_release = on_release
        self._release_regions: Callable[[tuple[RegionSlice, ...]], None] | None = None
        self._holders = 1

    def attach(
        self,
        regions: tuple[RegionSlice, ...],
        release: Callable[[tuple[RegionSlice, ...]], None],
    ) -> None:
        """Hold ``regions`` as well; ``release`` is called with them at the end."""
        self.regions, self._release_regions = regions, release

    def retain(self) -> None:
        """Add a holder."""
        self._holders += 1

    def release(self, _: object = None) -> None:
        """Remove a holder; the ignored argument makes this usable as a future's callback."""
        self._holders -= 1
        if self._holders == 0:
            if self._release_regions is not None:
                self._release_regions(self.regions)
            self._on_release(self)


def out_of_memory() -> DeviceOutOfMemory:
    """Return the error for a machine with less memory than the arena was configured for."""
    return DeviceOutOfMemory(
        "the server could not allocate the memory for this request", retry_after_s=1.0
    )


class _Waiter(NamedTuple):
    size_bytes: int
    granted: asyncio.Future[Lease]
    since_s: float


class LeasePool:
    """Leases of one range of the arena. For the event loop's thread.

    ``discard`` returns freed pages to the system, except for those that hold the first
    ``keep_bytes`` of the range, which stay warm for the next request.
    """

    def __init__(
        self,
        blocks: FreeList,
        *,
        max_waiting: int = 64,
        keep_bytes: int | None = None,
        discard: Callable[[int, int], None] | None = None,
    ) -> None:
        self._blocks = blocks
        self._max_waiting = max_waiting
        kept = blocks.size_bytes if keep_bytes is None else keep_bytes
        # Only whole pages can be discarded.
        self._keep_end = blocks.start + -(-kept // PAGE_BYTES) * PAGE_BYTES
        self._discard = discard
        self._waiting: deque[_Waiter] = deque()

    def stop_discarding(self) -> None:
        """Return no more pages to the system."""
        self._discard = None

    @property
    def limit_bytes(self) -> int:
        """The total size of the range."""
        return self._blocks.size_bytes

    @property
    def used_bytes(self) -> int:
        """The size of all current leases, in whole pages."""
        return self._blocks.used_bytes

    @property
    def waiting(self) -> int:
        """The number of waiting reservations."""
        return len(self._waiting)

    @property
    def waited_s(self) -> float:
        """How long the first reservation in line has waited; 0 if there is none."""
        return time.monotonic() - self._waiting[0].since_s if self._waiting else 0.0

    def try_reserve(self, size_bytes: int) -> Lease | None:
        """Return a lease, or None if it would have to wait."""
        if self._waiting:
            return None
        offset = self._blocks.allocate(size_bytes)
        return None if offset is None else Lease(offset, size_bytes, self._released)

    async def reserve(self, size_bytes: int, wait_s: float) -> Lease:
        """Return a lease as soon as its turn has come and memory is free.

        Raises
        ------
        ProblemTooLarge
            The pool is smaller than ``size_bytes``.
        Overloaded
            Memory is not free within ``wait_s``, or the queue for it is full.
        """
        if (lease := self.try_reserve(size_bytes)) is not None:
            return lease
        if size_bytes > self.limit_bytes:
            raise ProblemTooLarge(
                f"the request would hold {size_bytes:,} bytes of memory, more than the "
                f"{self.limit_bytes:,} that this server has for all requests together"
            )
        if len(self._waiting) >= self._max_waiting:
            raise self._overloaded(size_bytes)
        granted: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(size_bytes, granted, time.monotonic())
        self._waiting.append(waiter)
        try:
            async with asyncio.timeout(wait_s):
                return await granted
        except (TimeoutError, asyncio.CancelledError) as error:
            if not granted.cancelled():  # it was granted just as the caller left
                granted.result().release()
            if isinstance(error, TimeoutError):
                raise self._overloaded(size_bytes) from None
            raise
        finally:
            with contextlib.suppress(ValueError):
                self._waiting.remove(waiter)
                self._grant()  # it was in the way of others

    def _released(self, lease: Lease) -> None:
        first = max(lease.offset, self._keep_end)
        size = lease.offset + self._blocks.rounded(lease.size_bytes) - first
        if self._discard is None or size <= 0:
            self._free(lease)
        elif size <= _DISCARD_INLINE_BYTES:
            self._discard(first, size)
            self._free(lease)
        else:
            # In a thread: it takes a tenth of a second per GiB.
            loop = asyncio.get_running_loop()
            discarded = loop.run_in_executor(None, self._discard, first, size)
            discarded.add_done_callback(lambda _: self._free(lease))

    def _free(self, lease: Lease) -> None:
        self._blocks.free(lease.offset, lease.size_bytes)
        self._grant()

    def _grant(self) -> None:
        """Grant leases from the front of the queue while memory lasts."""
        while self._waiting:
            size_bytes, granted, _ = self._waiting[0]
            if not granted.done():
                offset = self._blocks.allocate(size_bytes)
                if offset is None:
                    return
                granted.set_result(Lease(offset, size_bytes, self._released))
            self._waiting.popleft()

    def _overloaded(self, size_bytes: int) -> Overloaded:
        return Overloaded(
            f"other requests hold {self.used_bytes:,} of the {self.limit_bytes:,} bytes of memory "
            f"that this server has for all requests together; this one needs {size_bytes:,}",
            retry_after_s=_RETRY_AFTER_S,
        )
