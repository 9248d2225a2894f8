"""The moment after which an answer is of no use, and how waiting for anything ends there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from convgrad.errors import DeadlineExceeded

__all__ = ["Deadline"]


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
            raise DeadlineExceeded(
                f"no answer was ready within the {self.allowed_s:g} s that the request allowed"
            ) from None
