"""Statistics of each operation, counted as Triton counts its models, over all transports.

Requests that were refused for what they ask are not inferences and do not count.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from convgrad.errors import CODES
from convgrad_service.engine.telemetry.record import Record

__all__ = ["Duration", "OperationStatistics", "Statistics"]

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

    def add(self, seconds: float) -> None:
        """Count one interval."""
        self.count += 1
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


class Statistics:
    """The statistics of all operations."""

    def __init__(self) -> None:
        self._operations: dict[str, OperationStatistics] = {}

    def all(self) -> Mapping[str, OperationStatistics]:
        """Return the statistics by operation; those never called are missing."""
        return self._operations

    def count(self, record: Record) -> None:
        """Count one finished request."""
        ok = record.code == "ok"
        if not ok:
            row = CODES.get(record.code)
            if row is not None and row.http_status < _SERVER_AT_FAULT:
                return
        counts = self._operations.get(record.operation)
        if counts is None:
            counts = self._operations[record.operation] = OperationStatistics()
        counts.last_inference_ms = time.time_ns() // 1_000_000
        if not ok:
            counts.fail.add(record.total_s)
            return
        stages_s = record.stages_s
        counts.success.add(record.total_s)
        counts.queue.add(stages_s.get("queue", 0.0))
        counts.input.add(stages_s.get("decode", 0.0) + stages_s.get("upload", 0.0))
        counts.infer.add(stages_s.get("compute", 0.0))
        counts.output.add(stages_s.get("download", 0.0) + stages_s.get("encode", 0.0))
