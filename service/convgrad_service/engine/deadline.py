"""Deadlines of requests, and a scope that ends when one passes."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from convgrad.errors import DeadlineExceeded

__all__ = ["CancelScope", "Deadline"]


@dataclass(frozen=True, slots=True)
class Deadline:
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
