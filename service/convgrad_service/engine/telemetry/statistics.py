"""What has been computed, counted by operation as Triton counts its models.

Every transport's requests count alike. What was refused for what it asked was no inference and
does not count.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from convgrad.errors import CODES
from convgrad_service.engine.telemetry.record import Record

__all__ = ["Duration", "OperationStatistics", "Statistics"]

# From 429 on, a status says that the request was a good one.
_NOT_THE_REQUESTS_FAULT = 429


@dataclass(slots=True)
class Duration:
    """How often something was timed, and seconds in all."""

    count: int = 0
    total_s: float = 0.0

    @property
    def ns(self) -> int:
        """Nanoseconds in all."""
        return round(self.total_s * 1e9)

    def add(self, seconds: float) -> None:
        """Count one more."""
        self.count += 1
        self.total_s += seconds


@dataclass(slots=True)
class OperationStatistics:
    """One operation's counts since the server began.

    ``input`` is making arrays of what was received and taking them to the device, ``output``
    the way back; these, ``queue`` and ``infer`` count requests that succeeded.
    ``last_inference_ms`` is since the epoch, 0 before the first.
    """

    last_inference_ms: int = 0
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    queue: Duration = field(default_factory=Duration)
    input: Duration = field(default_factory=Duration)
    infer: Duration = field(default_factory=Duration)
    output: Duration = field(default_factory=Duration)


class Statistics:
    """All operations' counts."""

    def __init__(self) -> None:
        self._operations: dict[str, OperationStatistics] = {}

    def all(self) -> Mapping[str, OperationStatistics]:
        """The counts by operation, without those that were never asked for."""
        return self._operations

    def count(self, record: Record) -> None:
        """Count one request that has been answered, or will not be."""
        ok = record.code == "ok"
        if not ok:
            row = CODES.get(record.code)
            if row is not None and row.http_status < _NOT_THE_REQUESTS_FAULT:
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
