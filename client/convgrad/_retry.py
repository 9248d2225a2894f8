"""When to send a request again, and how long to wait before."""

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
    """Exponential back-off with jitter: clients turned away together do not come back together."""

    first_s: float = 0.25
    factor: float = 2.0
    longest_s: float = 8.0
    uniform: Callable[[float, float], float] = random.uniform

    def delay_s(self, attempts: int, retry_after_s: float | None) -> float:
        """Seconds to wait after ``attempts`` attempts; never less than what the server asked, and
        up to a quarter more."""
        if retry_after_s is not None:
            return self.uniform(retry_after_s, 1.25 * retry_after_s)
        # The exponent is bounded because a float overflows at 2**1024.
        full = min(self.longest_s, self.first_s * self.factor ** min(attempts - 1, 30))
        return self.uniform(full / 2, full)


def parse_retry_after(value: str | None, now_s: Callable[[], float] = time.time) -> float | None:
    """Seconds to wait, from a Retry-After of seconds or an HTTP date; None where there is none."""
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
