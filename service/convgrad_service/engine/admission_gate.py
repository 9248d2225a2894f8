"""Who may go on while the engine is overloaded: refusals must not cost what answers are made of.

A refusal takes up to two milliseconds, with a body to drop, and a client that ignores Retry-After
asks again at once: a few hundred of them would keep a process busy with nothing but refusals. So
only so many requests a second are refused. The others wait in line, before anything of their bodies
is looked at, until there is room for them or it is their turn to be refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable

__all__ = ["AdmissionGate"]

# A second; more only where the last in line would wait for longer than this.
_FEWEST_REFUSED_PER_S, _LONGEST_S = 10.0, 20.0
_REFUSED_AT_ONCE = 16.0
# How often those who wait are looked at, where nothing else has happened.
_LOOK_S = 0.005
# Who is let in takes a place in the engine's queue for so long, or twice as long, while its body is
# received. Then others get it: a body may be slow.
_ARRIVING_S = 0.5


class AdmissionGate:
    """The line in front of an engine that has ``room`` for so many more. For the loop's thread."""

    def __init__(self, room: Callable[[], int]) -> None:
        self._room = room
        # By the time at which they were let in, in units of `_ARRIVING_S`.
        self._arriving: dict[int, int] = {}
        self._waiting: deque[asyncio.Future[int | None]] = deque()
        self._refused: deque[asyncio.Future[int | None]] = deque()
        self._looking: asyncio.TimerHandle | None = None
        self._tokens = _REFUSED_AT_ONCE
        self._counted_s = time.monotonic()

    def enter(self) -> int | None:
        """Let a request in if nobody waits and there is room; see `turn`."""
        if self._waiting or self._free() <= 0:
            return None
        return self._let_in()

    async def turn(self) -> int | None:
        """Wait until there is room for a request, and let it in; or until it may be refused.

        Returns what `arrived` is to be called with, or None for a refusal.
        """
        return await self._wait(self._waiting)

    async def refusal(self) -> None:
        """Wait until a request may be refused that was let in."""
        await self._wait(self._refused)

    def arrived(self, arrival: int) -> None:
        """A request that was let in is queued in this turn of the loop, or will not be."""
        if arrival in self._arriving:
            self._arriving[arrival] -= 1
        if self._waiting or self._refused:
            asyncio.get_running_loop().call_soon(self._look)

    def _free(self) -> int:
        """Places in the queue that nobody has or is about to take."""
        room = self._room()
        if room <= 0 or not self._arriving:
            return room
        now = int(time.monotonic() / _ARRIVING_S)
        return room - self._arriving.get(now, 0) - self._arriving.get(now - 1, 0)

    def _let_in(self) -> int:
        now = int(time.monotonic() / _ARRIVING_S)
        if now not in self._arriving:
            self._arriving = {now: 0, now - 1: self._arriving.get(now - 1, 0)}
        self._arriving[now] += 1
        return now

    async def _wait(self, line: deque[asyncio.Future[int | None]]) -> int | None:
        turn: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        line.append(turn)
        self._look()
        try:
            return await turn
        finally:
            if turn.cancelled():
                with contextlib.suppress(ValueError):  # its turn has just come
                    line.remove(turn)

    def _look(self) -> None:
        free = self._free()
        while free > 0 and (self._waiting or self._refused):
            free -= 1
            if self._waiting:
                _end(self._waiting.popleft(), self._let_in())
            else:
                # Whoever is refused now comes again, and finds room.
                _end(self._refused.popleft(), None)
        while (line := self._refused or self._waiting) and self._take_token():
            _end(line.popleft(), None)
        if line and self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(_LOOK_S, self._look_again)

    def _look_again(self) -> None:
        self._looking = None
        self._look()

    def _take_token(self) -> bool:
        now_s = time.monotonic()
        wanted_per_s = (len(self._waiting) + len(self._refused)) / _LONGEST_S
        gained = (now_s - self._counted_s) * max(wanted_per_s, _FEWEST_REFUSED_PER_S)
        self._tokens, self._counted_s = min(self._tokens + gained, _REFUSED_AT_ONCE), now_s
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


def _end(turn: asyncio.Future[int | None], arrival: int | None) -> None:
    if not turn.done():  # cancelled, that is
        turn.set_result(arrival)
