"""Who may go on while the engine is overloaded: refusals must not cost what answers are made of.

A refusal takes a third of a millisecond, and a client that ignores Retry-After asks again at once:
a few hundred of them would keep a process busy with nothing but refusals. So only so many requests
a second are refused. The others wait in line, before anything of their bodies is looked at, until
there is room for them or it is their turn to be refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from typing import Protocol

__all__ = ["AdmissionGate"]

# A second; more only where the last in line would wait for longer than this.
_FEWEST_REFUSED_PER_S, _LONGEST_S = 20.0, 10.0
_REFUSED_AT_ONCE = 16.0
# How often those who wait are looked at, where nothing else has happened.
_LOOK_S = 0.005
# Requests that may be received at the same time for the room that there is. Should they be slow,
# others are let in all the same, one at a time.
_MOST_ARRIVING = 8
_SLOW_S = 0.05


class _Queue(Protocol):
    @property
    def room(self) -> int: ...


class AdmissionGate:
    """The line in front of an engine. For the loop's thread."""

    def __init__(self, engine: _Queue) -> None:
        self.arriving = 0
        """Requests that are admitted, and not queued yet."""
        self._engine = engine
        self._waiting: deque[asyncio.Future[bool]] = deque()
        self._refused: deque[asyncio.Future[bool]] = deque()
        self._looking: asyncio.TimerHandle | None = None
        self._tokens = _REFUSED_AT_ONCE
        self._counted_s = self._let_in_s = time.monotonic()

    @property
    def is_open(self) -> bool:
        """Whether a request may go on without `turn`."""
        return not self._waiting and self._engine.room > 0

    async def turn(self) -> bool:
        """Wait until there is room for a request, or until it may be refused, which is True."""
        return await self._wait(self._waiting)

    async def refusal(self) -> None:
        """Wait until a request may be refused that `turn` has let in, or did not see."""
        await self._wait(self._refused)

    def arrived(self) -> None:
        """An admitted request has been queued, or will not be."""
        self.arriving -= 1
        if self._waiting:
            self._let_in()

    async def _wait(self, line: deque[asyncio.Future[bool]]) -> bool:
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        line.append(turn)
        self._look()
        try:
            return await turn
        finally:
            if turn.cancelled():
                with contextlib.suppress(ValueError):  # its turn has just come
                    line.remove(turn)

    def _look(self) -> None:
        self._let_in()
        while (line := self._refused or self._waiting) and self._take_token():
            _end(line.popleft(), refused=True)
        if line and self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(_LOOK_S, self._look_again)

    def _look_again(self) -> None:
        self._looking = None
        self._look()

    def _let_in(self) -> None:
        now_s = time.monotonic()
        room = self._engine.room
        free = min(room, _MOST_ARRIVING) - self.arriving
        if free <= 0 < room and now_s - self._let_in_s > _SLOW_S:
            free = 1
        for _ in range(min(free, len(self._waiting))):
            self._let_in_s = now_s
            _end(self._waiting.popleft(), refused=False)

    def _take_token(self) -> bool:
        now_s = time.monotonic()
        wanted_per_s = (len(self._waiting) + len(self._refused)) / _LONGEST_S
        gained = (now_s - self._counted_s) * max(wanted_per_s, _FEWEST_REFUSED_PER_S)
        self._tokens, self._counted_s = min(self._tokens + gained, _REFUSED_AT_ONCE), now_s
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


def _end(turn: asyncio.Future[bool], *, refused: bool) -> None:
    if not turn.done():  # cancelled, that is
        turn.set_result(refused)
