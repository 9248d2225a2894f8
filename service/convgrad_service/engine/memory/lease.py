"""Leases of the arena's memory, and the queue of requests that wait for one.

A request leases memory for all its inputs and outputs at once, so no request ever holds memory
while it waits for more, and there is no deadlock. Leases are granted in the order of arrival: small
requests do not overtake a large one that waits.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from convgrad.errors import DeviceOutOfMemory, Overloaded, ProblemTooLarge
from convgrad_service.engine.memory.arena import PAGE_BYTES, FreeList
from convgrad_service.engine.shm.registry import RegionPart, RegionSlice

__all__ = ["Lease", "LeasePool", "leased", "out_of_memory"]

# Nobody knows when memory will be free again; the SDK's first retries wait a second anyway.
_RETRY_AFTER_S = 1.0
# Up to this size, pages are discarded on the event loop.
_DISCARD_INLINE_BYTES = 4 * 2**20


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
        self.unresolved: tuple[RegionPart, ...] = ()
        """Shared memory that the hub is to look up when a job is submitted."""
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


async def leased(future: asyncio.Future[Lease]) -> Lease:
    """Await a reservation; a lease granted just as the caller is cancelled is released."""
    try:
        return await future
    except asyncio.CancelledError:
        if future.done() and not future.cancelled() and future.exception() is None:
            future.result().release()
        raise


def out_of_memory() -> DeviceOutOfMemory:
    """Return the error for a machine with less memory than the arena was configured for."""
    return DeviceOutOfMemory(
        "the server could not allocate the memory for this request", retry_after_s=1.0
    )


@dataclass(slots=True, eq=False)
class _Waiting:
    size_bytes: int
    future: asyncio.Future[Lease]
    timer: asyncio.TimerHandle
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
        self._waiting: deque[_Waiting] = deque()

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

    def can_grant(self, size_bytes: int) -> bool:
        """Return whether `try_reserve` would return a lease."""
        return not self._waiting and self._blocks.fits(size_bytes)

    def try_reserve(self, size_bytes: int) -> Lease | None:
        """Return a lease, or None if it would have to wait."""
        if self._waiting:
            return None
        offset = self._blocks.allocate(size_bytes)
        return None if offset is None else Lease(offset, size_bytes, self._released)

    def reserve(self, size_bytes: int, until_s: float) -> asyncio.Future[Lease]:
        """Return a future lease, granted as soon as its turn has come and memory is free.

        At ``until_s`` (of time.monotonic()) the future fails with Overloaded. Cancelling it leaves
        the queue.

        Raises
        ------
        ProblemTooLarge
            The pool is smaller than ``size_bytes``.
        Overloaded
            The queue is full.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Lease] = loop.create_future()
        if (lease := self.try_reserve(size_bytes)) is not None:
            future.set_result(lease)
            return future
        if size_bytes > self.limit_bytes:
            raise ProblemTooLarge(
                f"the request would hold {size_bytes:,} bytes of memory, more than the "
                f"{self.limit_bytes:,} that this server has for all requests together"
            )
        now_s = time.monotonic()
        wait_s = until_s - now_s
        if len(self._waiting) >= self._max_waiting or wait_s <= 0:
            raise self._overloaded(size_bytes)
        timer = loop.call_later(wait_s, self._time_out, future, size_bytes)
        self._waiting.append(_Waiting(size_bytes, future, timer, now_s))
        future.add_done_callback(self._left)
        return future

    def _time_out(self, future: asyncio.Future[Lease], size_bytes: int) -> None:
        if not future.done():
            future.set_exception(self._overloaded(size_bytes))

    def _left(self, future: asyncio.Future[Lease]) -> None:
        # Granted or not, the one behind it may be next.
        for waiting in self._waiting:
            if waiting.future is future:
                waiting.timer.cancel()
                self._waiting.remove(waiting)
                break
        self._grant()

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
            first = self._waiting[0]
            if not first.future.done():
                offset = self._blocks.allocate(first.size_bytes)
                if offset is None:
                    return
                first.future.set_result(Lease(offset, first.size_bytes, self._released))
            first.timer.cancel()
            self._waiting.popleft()

    def _overloaded(self, size_bytes: int) -> Overloaded:
        return Overloaded(
            f"other requests hold {self.used_bytes:,} of the {self.limit_bytes:,} bytes of memory "
            f"that this server has for all requests together; this one needs {size_bytes:,}",
            retry_after_s=_RETRY_AFTER_S,
        )
