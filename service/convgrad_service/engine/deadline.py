"""The moment after which an answer is of no use, and how waiting for anything ends there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from convgrad.errors import DeadlineExceeded

__all__ = ["CancelScope", "Deadline"]


@dataclass(frozen=True, slots=True)
class Deadline:
    """``at_s`` on time.monotonic()'s clock, ``allowed_s`` after the request began."""

    at_s: float
    allowed_s: float

    @classmethod
    def after(cls, allowed_s: float) -> Deadline:
        """The deadline ``allowed_s`` from now."""
        return cls(time.monotonic() + allowed_s, allowed_s)

    @property
    def remaining_s(self) -> float:
        """Seconds left; negative once it has passed."""
        return self.at_s - time.monotonic()

    def missed(self) -> DeadlineExceeded:
        """What a request is refused with once it has passed."""
        return DeadlineExceeded(
            f"no answer was ready within the {self.allowed_s:g} s that the request allowed"
        )

    @asynccontextmanager
    async def enforced(self) -> AsyncIterator[None]:
        """Cancel what runs inside when the deadline passes, and raise DeadlineExceeded."""
        with CancelScope(self):
            yield


class CancelScope:
    """A block that `cancel` ends from outside, and so does the deadline, if there is one.

    The block then raises the error it was cancelled with, DeadlineExceeded at the deadline. Only
    one task may run in it. Unlike asyncio.timeout() it needs no coroutine of its own, which a small
    request would notice.
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
        self.move(self._deadline)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.move(None)
        if self._error is None:
            return
        # Cancelled by somebody else too, it stays so.
        if self._task.uncancel() <= self._before and kind is asyncio.CancelledError:
            raise self._error from None

    def move(self, deadline: Deadline | None) -> None:
        """Replace the deadline; with None there is none any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._deadline = deadline
        if deadline is not None:
            remaining_s = max(deadline.remaining_s, 0.0)
            self._timer = asyncio.get_running_loop().call_later(remaining_s, self._late)

    def cancel(self, error: Exception) -> None:
        """End the block with this error, unless it has been ended already."""
        if self._error is None:
            self._error = error
            self._task.cancel()

    def _late(self) -> None:
        assert self._deadline is not None  # noqa: S101 - the timer goes with it
        self.cancel(self._deadline.missed())
