"""The statistics of each operation under Triton's metric names, for existing dashboards.

Names, labels and units (microseconds) are those of Triton's documentation; an operation is a
model, always version 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from convgrad_service.engine.telemetry.statistics import OperationStatistics

__all__ = ["TritonMetrics"]

_WAITING = (
    "nv_inference_pending_request_count",
    "Instantaneous number of pending requests awaiting execution",
)
_Read = Callable[[OperationStatistics], float]
_COUNTERS: Sequence[tuple[str, str, _Read]] = (
    ("request_success", "Number of successful inference requests", lambda s: s.success.count),
    ("request_failure", "Number of failed inference requests", lambda s: s.fail.count),
    # Requests are never batched, so an execution is a request.
    ("count", "Number of inferences performed", lambda s: s.success.count),
    ("exec_count", "Number of model executions performed", lambda s: s.success.count),
    (
        "request_duration_us",
        "Cumulative inference request duration in microseconds",
        lambda s: s.success.ns / 1e3,
    ),
    (
        "queue_duration_us",
        "Cumulative inference queuing duration in microseconds",
        lambda s: s.queue.ns / 1e3,
    ),
    (
        "compute_input_duration_us",
        "Cumulative compute input duration in microseconds",
        lambda s: s.input.ns / 1e3,
    ),
    (
        "compute_infer_duration_us",
        "Cumulative compute inference duration in microseconds",
        lambda s: s.infer.ns / 1e3,
    ),
    (
        "compute_output_duration_us",
        "Cumulative inference compute output duration in microseconds",
        lambda s: s.output.ns / 1e3,
    ),
)


class TritonMetrics:
    """Reads ``statistics`` and the number of ``waiting`` problems on each scrape.

    Formats the text itself: Prometheus' client would add the suffix ``_total``, which Triton's
    counters do not have.
    """

    def __init__(
        self,
        statistics: Callable[[], Mapping[str, OperationStatistics]],
        waiting: Callable[[], float],
    ) -> None:
        self._statistics, self._waiting = statistics, waiting

    def exposition(self) -> bytes:
        """Return the metrics in Prometheus' text format 0.0.4."""
        statistics = self._statistics()
        lines: list[str] = []
        for suffix, text, read in _COUNTERS:
            name = f"nv_inference_{suffix}"
            lines += [f"# HELP {name} {text}", f"# TYPE {name} counter"]
            lines += [
                f'{name}{{model="{operation}",version="1"}} {float(read(counts))!r}'
                for operation, counts in statistics.items()
            ]
        # Without a model label: one queue serves all operations.
        name, text = _WAITING
        lines += [f"# HELP {name} {text}", f"# TYPE {name} gauge"]
        lines.append(f"{name} {self._waiting()!r}")
        return "".join(f"{line}\n" for line in lines).encode()
