"""Who holds which part of the arena, and who waits for some.

A request leases one place for its inputs and outputs together, so that no request ever holds a
part while it waits for another, and none can wait for ever. Places are given in the order in which
they were asked for: a large request that waits is not overtaken by small ones until it starves.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from convgrad.errors import DeviceOutOfMemory, Overloaded, ProblemTooLarge
from convgrad_service.engine.memory.free_list import FreeList
from convgrad_service.engine.shm.registry import InRegion, RegionPart

__all__ = ["Lease", "LeasePool", "leased", "out_of_memory"]

# When the memory of others will be free again cannot be known; a second is what the SDK's first
# retries would wait anyway.
_RETRY_AFTER_S = 1.0
_FORGET_AT_ONCE_BYTES = 4 * 2**20


class Lease:
    """A place in the arena, given back when its last holder releases it. For the loop's thread.

    A request holds it, and so does each thread and each worker that still touches its memory after
    the caller has gone or the deadline has passed.
    """

    def __init__(self, offset: int, size_bytes: int, give: Callable[[Lease], None]) -> None:
        self.offset = offset
        self.size_bytes = size_bytes
        self.regions: tuple[InRegion, ...] = ()
        """Places in shared memory that are held with it."""
        self.parts: tuple[RegionPart, ...] = ()
        """Shared memory that the hub is to find and hold while a job in it runs."""
        self._give = give
        self._give_regions: Callable[[tuple[InRegion, ...]], None] | None = None
        self._holders = 1

    def keep(
        self, regions: tuple[InRegion, ...], give: Callable[[tuple[InRegion, ...]], None]
    ) -> None:
        """Hold these places too; ``give`` is called with them in the end."""
        self.regions, self._give_regions = regions, give

    def retain(self) -> None:
        """Add a holder."""
        self._holders += 1

    def release(self, _: object = None) -> None:
        """Remove a holder. (What it ignores lets it be a future's callback.)"""
        self._holders -= 1
        if self._holders == 0:
            if self._give_regions is not None:
                self._give_regions(self.regions)
            self._give(self)


async def leased(future: asyncio.Future[Lease]) -> Lease:
    """What a reservation comes to; a caller that leaves just as it is granted gives it back."""
    try:
        return await future
    except asyncio.CancelledError:
        if future.done() and not future.cancelled() and future.exception() is None:
            future.result().release()
        raise


def out_of_memory() -> DeviceOutOfMemory:
    """What a request is refused with where the machine has not the memory that the arena allows."""
    return DeviceOutOfMemory(
        "the server could not allocate the memory for this request", retry_after_s=1.0
    )


@dataclass(slots=True, eq=False)
class _Waiting:
    size_bytes: int
    future: asyncio.Future[Lease]
    timer: asyncio.TimerHandle


class LeasePool:
    """Leases of one range of the arena. For the loop's thread.

    ``forget`` gives pages back to the system; it is called for what is freed beyond the first
    ``keep_bytes`` of the range, which stay warm for the next request.
    """

    def __init__(
        self,
        places: FreeList,
        *,
        max_waiting: int = 64,
        keep_bytes: int | None = None,
        forget: Callable[[int, int], None] | None = None,
    ) -> None:
        self._places = places
        self._max_waiting = max_waiting
        self._keep_end = places.start + (places.size_bytes if keep_bytes is None else keep_bytes)
        self._forget = forget
        self._waiting: deque[_Waiting] = deque()

    def keep_all(self) -> None:
        """Give nothing back to the system from now on."""
        self._forget = None

    @property
    def limit_bytes(self) -> int:
        """What all leases together may hold."""
        return self._places.size_bytes

    @property
    def used_bytes(self) -> int:
        """What they hold now, in whole pages."""
        return self._places.used_bytes

    @property
    def waiting(self) -> int:
        """Reservations that wait."""
        return len(self._waiting)

    def take(self, size_bytes: int) -> Lease | None:
        """A lease at once, or None: too much is held by others, or they have waited for longer."""
        if self._waiting:
            return None
        offset = self._places.take(size_bytes)
        return None if offset is None else Lease(offset, size_bytes, self._freed)

    def reserve(self, size_bytes: int, until_s: float) -> asyncio.Future[Lease]:
        """A lease, at once or as soon as its turn has come and others have left enough.

        ``until_s``, a time.monotonic(), ends the wait with Overloaded. A cancelled future leaves
        the line.

        Raises
        ------
        ProblemTooLarge
            There is less memory than that in all.
        Overloaded
            As many wait as may.
        """
        if (lease := self.take(size_bytes)) is not None:
            taken: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
            taken.set_result(lease)
            return taken
        if size_bytes > self.limit_bytes:
            raise ProblemTooLarge(
                f"the request would hold {size_bytes:,} bytes of memory, more than the "
                f"{self.limit_bytes:,} that this server has for all requests together"
            )
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Lease] = loop.create_future()
        wait_s = until_s - time.monotonic()
        if len(self._waiting) >= self._max_waiting or wait_s <= 0:
            raise self._overloaded(size_bytes)
        timer = loop.call_later(wait_s, self._give_up, future, size_bytes)
        self._waiting.append(_Waiting(size_bytes, future, timer))
        future.add_done_callback(self._left)
        return future

    def _give_up(self, future: asyncio.Future[Lease], size_bytes: int) -> None:
        if not future.done():
            future.set_exception(self._overloaded(size_bytes))

    def _left(self, future: asyncio.Future[Lease]) -> None:
        # Whether it got its place or gave up, whoever stood behind it may be next.
        for waiting in self._waiting:
            if waiting.future is future:
                waiting.timer.cancel()
                self._waiting.remove(waiting)
                break
        self._serve()

    def _freed(self, lease: Lease) -> None:
        first = max(lease.offset, self._keep_end)
        size = lease.offset + self._places.rounded(lease.size_bytes) - first
        if self._forget is None or size <= 0:
            self._give(lease)
        elif size <= _FORGET_AT_ONCE_BYTES:
            self._forget(first, size)
            self._give(lease)
        else:
            # A tenth of a second a GiB, which no other request is to wait for.
            loop = asyncio.get_running_loop()
            gone = loop.run_in_executor(None, self._forget, first, size)
            gone.add_done_callback(lambda _: self._give(lease))

    def _give(self, lease: Lease) -> None:
        self._places.give(lease.offset, lease.size_bytes)
        self._serve()

    def _serve(self) -> None:
        while self._waiting:
            first = self._waiting[0]
            if not first.future.done():
                offset = self._places.take(first.size_bytes)
                if offset is None:
                    return
                first.future.set_result(Lease(offset, first.size_bytes, self._freed))
            first.timer.cancel()
            self._waiting.popleft()

    def _overloaded(self, size_bytes: int) -> Overloaded:
        return Overloaded(
            f"other requests hold {self.used_bytes:,} of the {self.limit_bytes:,} bytes of memory "
            f"that this server has for all requests together; this one needs {size_bytes:,}",
            retry_after_s=_RETRY_AFTER_S,
        )
