"""How much memory all requests in flight may hold together, and how much each one does.

A request's bytes are reserved as they come to be: body bytes while they arrive, decoded arrays and
outputs before they are allocated. What cannot be reserved is refused, so that many requests that
are each allowed cannot together take the machine down.
"""

from __future__ import annotations

import os
import threading
from types import TracebackType

from convgrad.errors import Overloaded, ProblemTooLarge

__all__ = ["MemoryBudget", "Reservation", "default_budget_bytes"]

# When the memory of others will be free again cannot be known; a second is what the SDK's first
# retries would wait anyway.
_RETRY_AFTER_S = 1.0


def default_budget_bytes() -> int:
    """Half of the machine's memory; the rest is for kernels, the system and its page cache."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, OSError, ValueError):  # a system that does not say
        return 4 * 2**30


class MemoryBudget:
    """A number of bytes shared by all requests in flight. Safe to use from any thread."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._used_bytes = 0
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes reserved now."""
        return self._used_bytes

    def reservation(self) -> Reservation:
        """An empty reservation, to be grown; used as a context manager it frees itself."""
        return Reservation(self)

    def _take(self, size_bytes: int, held_bytes: int) -> None:
        if held_bytes + size_bytes > self.limit_bytes:
            raise ProblemTooLarge(
                f"the request would hold {held_bytes + size_bytes:,} bytes of memory, more than "
                f"the {self.limit_bytes:,} that this server has for all requests together"
            )
        with self._lock:
            if self._used_bytes + size_bytes > self.limit_bytes:
                raise Overloaded(
                    f"requests in flight hold {self._used_bytes:,} of {self.limit_bytes:,} bytes "
                    f"of memory, and this one needs {size_bytes:,} more",
                    retry_after_s=_RETRY_AFTER_S,
                )
            self._used_bytes += size_bytes

    def _give_back(self, size_bytes: int) -> None:
        with self._lock:
            self._used_bytes -= size_bytes


class Reservation:
    """What one request holds of a budget.

    It goes back when every holder has released it: the request itself, and each thread that still
    reads the request's arrays after the caller has gone or the deadline has passed.
    """

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._held_bytes = 0
        self._holders = 1
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        """Bytes held now."""
        return self._held_bytes

    def grow(self, size_bytes: int) -> None:
        """Reserve ``size_bytes`` more.

        Raises
        ------
        Overloaded
            Others hold the memory now.
        ProblemTooLarge
            The request alone would need more than there is.
        """
        if size_bytes <= 0:
            return
        self._budget._take(size_bytes, self._held_bytes)
        with self._lock:
            self._held_bytes += size_bytes

    def retain(self) -> None:
        """Add a holder."""
        with self._lock:
            self._holders += 1

    def release(self) -> None:
        """Remove a holder; the last one gives the bytes back."""
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
            freed, self._held_bytes = self._held_bytes, 0
        self._budget._give_back(freed)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()
