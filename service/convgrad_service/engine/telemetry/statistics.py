"""Statistics of each operation, as Triton keeps them of its models; see `RequestMetrics`."""

from __future__ import annotations

from dataclasses import dataclass, field

from convgrad.errors import CODES

__all__ = ["Duration", "OperationStatistics", "is_inference"]

# Statuses from here on say that the server, not the request, was at fault.
_SERVER_AT_FAULT = 429


@dataclass(slots=True)
class Duration:
    """A count of intervals, and their total length."""

    count: int = 0
    total_s: float = 0.0

    @property
    def ns(self) -> int:
        """The total in nanoseconds."""
        return round(self.total_s * 1e9)

    @property
    def us(self) -> float:
        """The total in microseconds."""
        return self.ns / 1e3

    def add(self, count: int, seconds: float) -> None:
        """Add so many intervals, of so many seconds in total."""
        self.count += count
        self.total_s += seconds


@dataclass(slots=True)
class OperationStatistics:
    """One operation's statistics since the server started.

    ``queue``, ``input`` (decode and upload), ``infer`` and ``output`` (download and encode) count
    successful requests only. ``last_inference_ms`` is in Unix time, 0 before the first request.
    """

    last_inference_ms: int = 0
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    queue: Duration = field(default_factory=Duration)
    input: Duration = field(default_factory=Duration)
    infer: Duration = field(default_factory=Duration)
    output: Duration = field(default_factory=Duration)


def is_inference(code: str) -> bool:
    """Return whether a request that ended with ``code`` counts: not if its content was refused."""
    row = CODES.get(code)
    return row is None or row.http_status >= _SERVER_AT_FAULT
