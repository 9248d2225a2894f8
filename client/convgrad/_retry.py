"""How long to wait before a request is retried."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

__all__ = ["Backoff", "parse_retry_after"]


@dataclass(frozen=True)
class Backoff:
    """Exponential backoff with jitter, so that clients rejected together do not retry together."""

    first_s: float = 0.25
    factor: float = 2.0
    longest_s: float = 8.0
    uniform: Callable[[float, float], float] = random.uniform

    def delay_s(self, attempts: int, retry_after_s: float | None) -> float:
        """Return the seconds to wait after ``attempts`` attempts.

        With a Retry-After, the wait is at least that long and at most a quarter longer.
        """
        if retry_after_s is not None:
            return self.uniform(retry_after_s, 1.25 * retry_after_s)
        # The exponent is bounded because a float overflows at 2**1024.
        full = min(self.longest_s, self.first_s * self.factor ** min(attempts - 1, 30))
        return self.uniform(full / 2, full)


def parse_retry_after(value: str | None, now_s: Callable[[], float] = time.time) -> float | None:
    """Parse Retry-After (seconds or an HTTP date) into seconds; None if missing or invalid."""
    if value is None:
        return None
    text = value.strip()
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        moment = parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return max(0.0, (moment - datetime.fromtimestamp(now_s(), UTC)).total_seconds())
