"""Admission of requests while the engine is overloaded, with a rate limit on refusals.

A refusal takes up to two milliseconds, with a body to drain, and a client that ignores Retry-After
retries immediately: a few hundred of those would keep a process busy with refusals alone. So only a
limited number of requests per second is refused. The others wait, with their bodies unread, until
there is room or it is their turn to be refused.

Large bodies are received only a few problems ahead of the workers. If all that may be queued were
received at once, each would have left the processor's caches when its turn came.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["Admission", "AdmissionGate"]

# A token bucket for refusals; more are allowed if the last in line would otherwise wait too long.
_REFUSALS_PER_S, _REFUSAL_BURST = 10.0, 16.0
_MAX_WAIT_S = 20.0
# How often the queues are checked without any other event.
_POLL_S = 0.005
# An admitted request reserves a slot of the engine's queue for one to two of these periods while
# its body is received; after that, a slow body must not block others.
_ARRIVING_S = 0.5
# Likewise a large body counts towards those received ahead: for a shorter time while it arrives,
# and then until it has been computed, unless problems take so long that a cache matters little.
_LANDING_S, _LANDED_S = 0.01, 0.5


class _Recent:
    """Counts events that began within the last one to two periods and have not ended."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._begun: dict[int, int] = {}

    def begin(self) -> int:
        """Count one; return the argument for `end`."""
        now = self._now()
        if now not in self._begun:
            self._begun = {now: 0, now - 1: self._begun.get(now - 1, 0)}
        self._begun[now] += 1
        return now

    def end(self, begun: int) -> None:
        """Count one less."""
        if begun in self._begun:
            self._begun[begun] -= 1

    def count(self) -> int:
        """Return how many there are."""
        if not self._begun:
            return 0
        now = self._now()
        return self._begun.get(now, 0) + self._begun.get(now - 1, 0)

    def _now(self) -> int:
        return int(time.monotonic() / self._period_s)


class Admission:
    """An admitted request, whose body is to be received and computed."""

    __slots__ = ("_ahead", "_arriving", "_gate")

    def __init__(self, gate: AdmissionGate, *, large: bool) -> None:
        self._gate = gate
        self._arriving: int | None = gate.arriving.begin()
        self._ahead = (gate.landing, gate.landing.begin()) if large else None

    def arrived(self) -> None:
        """Note that its body has been received: the request is queued now."""
        if self._arriving is None:
            return
        self._gate.arriving.end(self._arriving)
        self._arriving = None
        if self._ahead is not None:
            self._not_ahead()
            self._ahead = self._gate.landed, self._gate.landed.begin()
        self._gate.update_soon()

    def end(self) -> None:
        """Note that it has been computed, or never will be."""
        if self._arriving is not None:
            self._gate.arriving.end(self._arriving)
            self._arriving = None
        self._not_ahead()
        self._gate.update_soon()

    def _not_ahead(self) -> None:
        if self._ahead is not None:
            recent, begun = self._ahead
            recent.end(begun)
            self._ahead = None


class _Turn(NamedTuple):
    """A request in line; it gets an admission, or None for a refusal."""

    given: asyncio.Future[Admission | None]
    large: bool = False


class AdmissionGate:
    """The line in front of an engine. For the event loop's thread.

    Parameters
    ----------
    room
        Returns the engine's free queue slots.
    most_ahead
        Returns how many large bodies may be received whose problems have not been computed.
    report
        Called with the number of requests in line whenever it has changed.
    """

    def __init__(
        self,
        room: Callable[[], int],
        most_ahead: Callable[[], int],
        report: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._room, self._most_ahead, self._report = room, most_ahead, report
        self.arriving = _Recent(_ARRIVING_S)
        self.landing, self.landed = _Recent(_LANDING_S), _Recent(_LANDED_S)
        self._waiting: deque[_Turn] = deque()
        self._to_refuse: deque[_Turn] = deque()
        self._reported = 0
        self._polling: asyncio.TimerHandle | None = None
        self._tokens = _REFUSAL_BURST
        # Requests that should have left the line by now, admitted or refused.
        self._late = 0.0
        self._refilled_s = time.monotonic()

    def try_admit(self, *, large: bool = False) -> Admission | None:
        """Admit a request at once, if there is room for it and for all that wait; see `admit`."""
        if large and (self._waiting or self._free_ahead() <= 0):
            return None
        return Admission(self, large=large) if self._places() > len(self._waiting) else None

    async def admit(self, *, large: bool = False) -> Admission | None:
        """Wait until a request is admitted, or may be refused, for which None is returned.

        ``large`` says that its body is large.
        """
        return await self._wait(self._waiting, _Turn(self._future(), large))

    async def wait_to_refuse(self) -> None:
        """Wait until an admitted request may be refused."""
        await self._wait(self._to_refuse, _Turn(self._future()))

    def update_soon(self) -> None:
        """Admit and refuse as many as possible, once the running callback has ended."""
        if self._waiting or self._to_refuse:
            asyncio.get_running_loop().call_soon(self._update)

    @staticmethod
    def _future() -> asyncio.Future[Admission | None]:
        return asyncio.get_running_loop().create_future()

    def _places(self) -> int:
        """Return the queue slots that are neither taken nor reserved."""
        room = self._room()
        return room - self.arriving.count() if room > 0 else room

    def _free_ahead(self) -> int:
        return self._most_ahead() - self.landing.count() - self.landed.count()

    async def _wait(self, line: deque[_Turn], turn: _Turn) -> Admission | None:
        line.append(turn)
        self._update()
        try:
            return await turn.given
        finally:
            if turn.given.cancelled():
                with contextlib.suppress(ValueError):  # its turn came just before
                    line.remove(turn)

    def _update(self) -> None:
        """Admit and refuse as many of those who wait as possible."""
        places = self._places()
        while places > 0 and self._waiting:
            turn = self._waiting[0]
            if turn.large and self._free_ahead() <= 0:
                break
            self._waiting.popleft()
            self._late = max(self._late - 1, 0.0)
            if not turn.given.done():  # else it was cancelled
                turn.given.set_result(Admission(self, large=turn.large))
                places -= 1
        # Once there is room again, refusals do not wait: retries will find it.
        while places > len(self._waiting) and self._to_refuse:
            places -= 1
            _refuse(self._to_refuse)
        # Bodies on their way have not taken their slots yet, and may not come.
        while self._to_refuse or len(self._waiting) > max(self._room(), 0):
            if not self._take_token():
                break
            _refuse(self._to_refuse or self._waiting)
        if len(self._waiting) != self._reported:
            self._reported = len(self._waiting)
            self._report(self._reported)
        if (self._to_refuse or self._waiting) and self._polling is None:
            self._polling = asyncio.get_running_loop().call_later(_POLL_S, self._poll)

    def _poll(self) -> None:
        self._polling = None
        self._update()

    def _take_token(self) -> bool:
        now_s = time.monotonic()
        passed_s, self._refilled_s = now_s - self._refilled_s, now_s
        self._tokens = min(self._tokens + passed_s * _REFUSALS_PER_S, _REFUSAL_BURST)
        in_line = len(self._waiting) + len(self._to_refuse)
        self._late = min(self._late + passed_s * in_line / _MAX_WAIT_S, in_line)
        if max(self._tokens, self._late) < 1:
            return False
        self._tokens = max(self._tokens - 1, 0.0)
        self._late = max(self._late - 1, 0.0)
        return True


def _refuse(line: deque[_Turn]) -> None:
    turn = line.popleft()
    if not turn.given.done():  # else it was cancelled
        turn.given.set_result(None)
