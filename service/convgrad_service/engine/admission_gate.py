"""Admission of requests while the engine is overloaded, with a rate limit on refusals.

A refusal takes up to two milliseconds, with a body to drain, and a client that ignores Retry-After
retries immediately: a few hundred of those would keep a process busy with refusals alone. So only a
limited number of requests per second is refused. The others wait, with their bodies unread, until
there is room or it is their turn to be refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable

__all__ = ["AdmissionGate"]

# A token bucket; the rate is raised if the last in line would wait for longer than _MAX_WAIT_S.
_MIN_REFUSALS_PER_S, _MAX_WAIT_S = 10.0, 20.0
_REFUSAL_BURST = 16.0
# How often the queues are checked without any other event.
_POLL_S = 0.005
# An admitted request reserves a slot of the engine's queue for one to two of these periods while
# its body is received; after that, a slow body must not block others.
_ARRIVING_S = 0.5


class AdmissionGate:
    """The line in front of an engine; ``room`` returns its free queue slots.

    For the event loop's thread.
    """

    def __init__(self, room: Callable[[], int]) -> None:
        self._room = room
        # Admitted requests whose bodies are being received, by period of admission.
        self._arriving: dict[int, int] = {}
        self._waiting: deque[asyncio.Future[int | None]] = deque()
        self._to_refuse: deque[asyncio.Future[int | None]] = deque()
        self._polling: asyncio.TimerHandle | None = None
        self._tokens = _REFUSAL_BURST
        self._refilled_s = time.monotonic()

    def try_admit(self) -> int | None:
        """Admit a request if nobody waits and there is room; see `admit`."""
        if self._waiting or self._free() <= 0:
            return None
        return self._admitted()

    async def admit(self) -> int | None:
        """Wait until a request is admitted or may be refused.

        Returns the argument for `arrived`, or None for a refusal.
        """
        return await self._wait(self._waiting)

    async def wait_to_refuse(self) -> None:
        """Wait until an admitted request may be refused."""
        await self._wait(self._to_refuse)

    def arrived(self, arrival: int) -> None:
        """Free the slot of an admitted request that is queued now, or never will be."""
        if arrival in self._arriving:
            self._arriving[arrival] -= 1
        if self._waiting or self._to_refuse:
            asyncio.get_running_loop().call_soon(self._update)

    def _free(self) -> int:
        """Return the queue slots that are neither taken nor reserved."""
        room = self._room()
        if room <= 0 or not self._arriving:
            return room
        now = int(time.monotonic() / _ARRIVING_S)
        return room - self._arriving.get(now, 0) - self._arriving.get(now - 1, 0)

    def _admitted(self) -> int:
        now = int(time.monotonic() / _ARRIVING_S)
        if now not in self._arriving:
            self._arriving = {now: 0, now - 1: self._arriving.get(now - 1, 0)}
        self._arriving[now] += 1
        return now

    async def _wait(self, line: deque[asyncio.Future[int | None]]) -> int | None:
        turn: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        line.append(turn)
        self._update()
        try:
            return await turn
        finally:
            if turn.cancelled():
                with contextlib.suppress(ValueError):  # its turn came just before
                    line.remove(turn)

    def _update(self) -> None:
        """Admit and refuse as many of those who wait as possible."""
        free = self._free()
        while free > 0 and (self._waiting or self._to_refuse):
            free -= 1
            if self._waiting:
                _end(self._waiting.popleft(), self._admitted())
            else:
                # It is refused, but its retry will find room.
                _end(self._to_refuse.popleft(), None)
        while (line := self._to_refuse or self._waiting) and self._take_token():
            _end(line.popleft(), None)
        if line and self._polling is None:
            self._polling = asyncio.get_running_loop().call_later(_POLL_S, self._poll)

    def _poll(self) -> None:
        self._polling = None
        self._update()

    def _take_token(self) -> bool:
        now_s = time.monotonic()
        wanted_per_s = (len(self._waiting) + len(self._to_refuse)) / _MAX_WAIT_S
        gained = (now_s - self._refilled_s) * max(wanted_per_s, _MIN_REFUSALS_PER_S)
        self._tokens, self._refilled_s = min(self._tokens + gained, _REFUSAL_BURST), now_s
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


def _end(turn: asyncio.Future[int | None], arrival: int | None) -> None:
    if not turn.done():  # else it was cancelled
        turn.set_result(arrival)
