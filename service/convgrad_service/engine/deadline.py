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
        """What a request is refused with that it has passed."""
        return DeadlineExceeded(
            f"no answer was ready within the {self.allowed_s:g} s that the request allowed"
        )

    @asynccontextmanager
    async def enforced(self) -> AsyncIterator[None]:
        """Cancel what runs inside when the deadline passes, and raise DeadlineExceeded."""
        # Not `except TimeoutError` alone: what runs inside may have raised one of its own.
        scope = asyncio.timeout(max(self.remaining_s, 0.0))
        try:
            async with scope:
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            raise self.missed() from None


class CancelScope:
    """While it lasts, `cut` ends what the calling task waits for, and so does the deadline.

    The block then raises what was cut with: DeadlineExceeded at the deadline. It is
    `Deadline.enforced` for those who cannot afford a generator and two coroutines.
    """

    __slots__ = ("_before", "_deadline", "_error", "_task", "_timer")

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._error: Exception | None = None

    def __enter__(self) -> CancelScope:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - only a task can wait
        self._task, self._before = task, task.cancelling()
        remaining_s = max(self._deadline.remaining_s, 0.0)
        self._timer = asyncio.get_running_loop().call_later(remaining_s, self._late)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._timer.cancel()
        if self._error is None:
            return
        # Cancelled by somebody else too, it stays so.
        if self._task.uncancel() <= self._before and kind is asyncio.CancelledError:
            raise self._error from None

    def cut(self, error: Exception) -> None:
        """End it with this error, if nothing else has."""
        if self._error is None:
            self._error = error
            self._task.cancel()

    def _late(self) -> None:
        self.cut(self._deadline.missed())
