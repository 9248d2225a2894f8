"""When a request may be computed, and when it is ended early.

`AdmissionGate` says whether there is room for one more, and `Limits` whether its problem is too
large. A `Deadline`, or a client that disconnects, ends a `CancelScope`.

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
from dataclasses import dataclass
from typing import NamedTuple

from convgrad.errors import DeadlineExceeded, ProblemTooLarge
from convgrad_service.problems import Problem

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
_RECEIVING_LARGE_S, _RECEIVED_LARGE_S = 0.01, 0.5
ALWAYS_ALLOWED_BYTES = 64 * 2**20
"""Outputs up to this size are allowed for any inputs."""


class Deadline(NamedTuple):
    """A deadline at ``at_s`` of time.monotonic(), ``allowed_s`` after the request began."""

    at_s: float
    allowed_s: float

    @classmethod
    def after(cls, allowed_s: float) -> Deadline:
        """Return a deadline ``allowed_s`` from now."""
        return cls(time.monotonic() + allowed_s, allowed_s)

    @property
    def remaining_s(self) -> float:
        """Seconds left; negative once it has passed."""
        return self.at_s - time.monotonic()

    def exceeded(self) -> DeadlineExceeded:
        """Return the error for a request that has missed it."""
        return DeadlineExceeded(
            f"no answer was ready within the {self.allowed_s:g} s that the request allowed"
        )


class CancelScope:
    """A block that can be ended from outside, by `cancel` or by a deadline.

    The block then raises the error passed to `cancel`, or DeadlineExceeded. Like asyncio.timeout(),
    but not a coroutine, which saves a noticeable part of a small request's time.
    """

    __slots__ = ("_before", "_deadline", "_error", "_task", "_timer")

    def __init__(self, deadline: Deadline | None = None) -> None:
        self._deadline = deadline
        self._error: Exception | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> CancelScope:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - only a task can wait
        self._task, self._before = task, task.cancelling()
        self.set_deadline(self._deadline)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.set_deadline(None)
        if self._error is None:
            return
        # A cancellation from elsewhere takes precedence.
        if self._task.uncancel() <= self._before and kind is asyncio.CancelledError:
            raise self._error from None

    def set_deadline(self, deadline: Deadline | None) -> None:
        """Set or, with None, remove the deadline."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._deadline = deadline
        if deadline is not None:
            remaining_s = max(deadline.remaining_s, 0.0)
            self._timer = asyncio.get_running_loop().call_later(remaining_s, self._late)

    def cancel(self, error: Exception) -> None:
        """End the block with ``error``, unless it is already ending."""
        if self._error is None:
            self._error = error
            self._task.cancel()

    def _late(self) -> None:
        assert self._deadline is not None  # noqa: S101 - the timer goes with it
        self.cancel(self._deadline.exceeded())


class ClientDisconnected(Exception):
    """The client disconnected before its response was ready."""


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

    __slots__ = ("_counted", "_gate", "_large")

    def __init__(self, gate: AdmissionGate, *, large: bool) -> None:
        self._gate, self._large = gate, large
        self._counted = [(gate.arriving, gate.arriving.begin())]
        if large:
            self._counted.append((gate.receiving_large, gate.receiving_large.begin()))

    def arrived(self) -> None:
        """Note that its body has been received: the request is queued now."""
        self.end()
        if self._large:
            received = self._gate.received_large
            self._counted = [(received, received.begin())]

    def end(self) -> None:
        """Note that it has been computed, or never will be."""
        for recent, begun in self._counted:
            recent.end(begun)
        self._counted = []
        self._gate.update_soon()


class _Waiter(NamedTuple):
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
        self.receiving_large = _Recent(_RECEIVING_LARGE_S)
        self.received_large = _Recent(_RECEIVED_LARGE_S)
        self._waiting: deque[_Waiter] = deque()
        self._to_refuse: deque[_Waiter] = deque()
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
        return await self._wait(self._waiting, _Waiter(self._future(), large))

    async def wait_to_refuse(self) -> None:
        """Wait until an admitted request may be refused."""
        await self._wait(self._to_refuse, _Waiter(self._future()))

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
        return self._most_ahead() - self.receiving_large.count() - self.received_large.count()

    async def _wait(self, line: deque[_Waiter], waiter: _Waiter) -> Admission | None:
        line.append(waiter)
        self._update()
        try:
            return await waiter.given
        finally:
            if waiter.given.cancelled():
                with contextlib.suppress(ValueError):  # its turn came just before
                    line.remove(waiter)

    def _update(self) -> None:
        """Admit and refuse as many of those who wait as possible."""
        places = self._places()
        while places > 0 and self._waiting:
            waiter = self._waiting[0]
            if waiter.large and self._free_ahead() <= 0:
                break
            self._waiting.popleft()
            self._late = max(self._late - 1, 0.0)
            if not waiter.given.done():  # else it was cancelled
                waiter.given.set_result(Admission(self, large=waiter.large))
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


def _refuse(line: deque[_Waiter]) -> None:
    waiter = line.popleft()
    if not waiter.given.done():  # else it was cancelled
        waiter.given.set_result(None)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on problems, checked before anything is allocated; None means unlimited.

    A body of a hundred bytes can describe a petabyte of tensors. ``output_ratio`` is the bytes of
    all outputs per byte of all inputs.
    """

    problem_bytes: int | None = None
    problem_flops: float | None = None
    output_ratio: float | None = None

    def check(self, problem: Problem) -> None:
        """Raise ProblemTooLarge if ``problem`` exceeds a limit."""
        needed = problem.memory_bytes
        if self.problem_bytes is not None and needed > self.problem_bytes:
            raise ProblemTooLarge(
                f"the inputs and outputs of this {problem.operation} take {_shown(needed)} bytes; "
                f"this server takes at most {self.problem_bytes:,}"
            )
        if self.problem_flops is not None and problem.flops > self.problem_flops:
            raise ProblemTooLarge(
                f"this {problem.operation} needs {_shown(problem.flops)} floating-point "
                f"operations; this server takes at most {self.problem_flops:.3g}"
            )
        self._check_outputs(problem)

    def _check_outputs(self, problem: Problem) -> None:
        if self.output_ratio is None:
            return
        inputs = sum(spec.size_bytes for spec in problem.inputs.values())
        outputs = sum(spec.size_bytes for spec in problem.outputs.values())
        if outputs > max(ALWAYS_ALLOWED_BYTES, self.output_ratio * inputs):
            raise ProblemTooLarge(
                f"the outputs of this {problem.operation} take {_shown(outputs)} bytes, and its "
                f"inputs {_shown(inputs)}; this server returns at most {self.output_ratio:g} "
                f"bytes for each byte that it receives, or {ALWAYS_ALLOWED_BYTES:,}. "
                "Check padding, stride and output sizes; if they are right, raise "
                "CONVGRAD_MAX_OUTPUT_RATIO"
            )


def _shown(number: int) -> str:
    # Sizes have arbitrary precision, which may exceed a float's range.
    if number < 10**15:
        return f"{number:,}"
    digits = number.bit_length() * 30103 // 100000
    return f"about 1e{digits}"
