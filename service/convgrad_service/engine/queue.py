"""Which waiting problem computes next, how many compute at once, and how many may wait.

Two slots by default: with one, a request of a millisecond would wait for a stranger's of a minute.
With more than two, problems that each use every core would only take turns evicting each other's
caches. The last free slot is kept for small problems, else two large ones would shut the small
ones out just as one does; a large problem loses little by that, for it already has every core.
Within those rules the order is that of arrival.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from convgrad.errors import DeadlineExceeded, Overloaded
from convgrad_service.engine.pace import Pace
from convgrad_service.priority import give_way

__all__ = ["ComputeQueue", "Ticket"]

T = TypeVar("T")

_RETRY_AFTER_MIN_S, _RETRY_AFTER_MAX_S = 1.0, 60.0


class Ticket(Generic[T]):
    """One piece of work: waiting, running or done.

    ``future`` becomes its result; ``cancelled`` is set once nobody wants it any more, and the
    backend looks at it between pieces; ``waited_s`` is None until it starts.
    """

    def __init__(
        self, work: Callable[[threading.Event], T], cost: float, deadline_s: float | None
    ) -> None:
        self.future: Future[T] = Future()
        self.cancelled = threading.Event()
        self.cost = cost
        self.large = False
        self.waited_s: float | None = None
        self._work: Callable[[threading.Event], T] | None = work
        self._deadline_s = deadline_s
        self._submitted_s = time.monotonic()

    def run(self) -> float | None:
        """Do the work in the calling thread; the seconds it took, or None if it did not run."""
        started_s = time.monotonic()
        self.waited_s = waited_s = started_s - self._submitted_s
        work, self._work = self._work, None
        if work is None or not self.future.set_running_or_notify_cancel():
            return None
        if self._deadline_s is not None and started_s >= self._deadline_s:
            self.future.set_exception(
                DeadlineExceeded(
                    f"the deadline passed while the problem waited {waited_s:.3f} s to start"
                )
            )
            return None
        try:
            result = work(self.cancelled)
        # Whatever it was, the request that waits for this future must hear of it.
        except BaseException as error:  # noqa: BLE001
            self.future.set_exception(error)
            return None
        finally:
            # Nothing of the request may stay alive in this thread while it waits for the next.
            del work
        self.future.set_result(result)
        return time.monotonic() - started_s

    def forget(self) -> None:
        """Drop the work, and with it the request's arrays."""
        self._work = None


class ComputeQueue:
    """A bounded queue in front of ``slots`` threads. Safe to use from any thread."""

    def __init__(
        self, slots: int, max_waiting: int, *, large_s: float = 1.0, pace: Pace | None = None
    ) -> None:
        self.slots = slots
        self.max_waiting = max_waiting
        self.pace = pace or Pace()
        self._large_s = large_s
        self._waiting: deque[Ticket[Any]] = deque()
        self._running: set[Ticket[Any]] = set()
        self._closed = False
        self._changed = threading.Condition()
        # Daemons: a kernel that ignores its cancellation must not keep the process from ending.
        self._threads = [
            threading.Thread(target=self._serve, name=f"compute-{index}", daemon=True)
            for index in range(slots)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """Problems that wait for a slot."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Problems that compute."""
        return len(self._running)

    def require_room(self) -> None:
        """Raise Overloaded if one more problem could not wait: before its body is even read."""
        if len(self._waiting) >= self.max_waiting:
            raise self._overloaded()

    def submit(
        self,
        work: Callable[[threading.Event], T],
        *,
        cost: float = 0.0,
        deadline_s: float | None = None,
    ) -> Ticket[T]:
        """Queue ``work``, called with the event that tells it to give up.

        ``cost`` is in units of `Pace`; ``deadline_s`` is a time.monotonic() after which the work
        is no longer worth starting.

        Raises
        ------
        Overloaded
            As many problems wait as may.
        """
        ticket = Ticket(work, cost, deadline_s)
        ticket.large = self.pace.estimate_s(cost) > self._large_s
        with self._changed:
            if self._closed or len(self._waiting) >= self.max_waiting:
                raise self._overloaded()
            self._waiting.append(ticket)
            self._changed.notify_all()
        return ticket

    def cancel(self, ticket: Ticket[Any]) -> None:
        """Take back waiting work; ask running work to stop. Harmless when it is done."""
        ticket.cancelled.set()
        with self._changed:
            with contextlib.suppress(ValueError):
                self._waiting.remove(ticket)
                ticket.forget()
            self._changed.notify_all()
        ticket.future.cancel()

    def close(self) -> None:
        """Cancel everything; the threads end once what runs has ended."""
        with self._changed:
            self._closed = True
            tickets = [*self._waiting, *self._running]
            self._changed.notify_all()
        for ticket in tickets:
            self.cancel(ticket)

    def _overloaded(self) -> Overloaded:
        cost = sum(ticket.cost for ticket in [*self._waiting, *self._running])
        seconds = self.pace.estimate_s(cost) / self.slots
        return Overloaded(
            f"{len(self._waiting)} problems wait to be computed, and no more than "
            f"{self.max_waiting} may",
            retry_after_s=min(max(seconds, _RETRY_AFTER_MIN_S), _RETRY_AFTER_MAX_S),
        )

    def _serve(self) -> None:
        give_way()
        while (ticket := self._next()) is not None:
            seconds = ticket.run()
            with self._changed:
                self._running.discard(ticket)
                # A large problem may have waited for this one to leave.
                self._changed.notify_all()
            if seconds is not None:
                self.pace.learn(ticket.cost, seconds)
            del ticket

    def _next(self) -> Ticket[Any] | None:
        with self._changed:
            while not self._closed:
                for ticket in self._waiting:
                    if not ticket.large or self._large_may_start():
                        self._waiting.remove(ticket)
                        self._running.add(ticket)
                        return ticket
                self._changed.wait()
            return None

    def _large_may_start(self) -> bool:
        return sum(ticket.large for ticket in self._running) < max(1, self.slots - 1)
