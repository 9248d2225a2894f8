"""The statistics of each operation under Triton's metric names, for existing dashboards.

Names, labels and units (microseconds) are those of Triton's documentation; an operation is a
model, always version 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter

from convgrad_service.engine.telemetry.statistics import OperationStatistics

__all__ = ["TritonMetrics"]

_WAITING = (
    "nv_inference_pending_request_count",
    "Instantaneous number of pending requests awaiting execution",
)
_DURATIONS = (
    ("request", "inference request", "success"),
    ("queue", "inference queuing", "queue"),
    ("compute_input", "compute input", "input"),
    ("compute_infer", "compute inference", "infer"),
    ("compute_output", "inference compute output", "output"),
)
# The end of a counter's name, its help, and the attribute of `OperationStatistics`.
_COUNTERS = (
    ("request_success", "Number of successful inference requests", "success.count"),
    ("request_failure", "Number of failed inference requests", "fail.count"),
    # Requests are never batched, so an execution is a request.
    ("count", "Number of inferences performed", "success.count"),
    ("exec_count", "Number of model executions performed", "success.count"),
    *(
        (f"{name}_duration_us", f"Cumulative {text} duration in microseconds", f"{field}.us")
        for name, text, field in _DURATIONS
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
        for suffix, text, attribute in _COUNTERS:
            read = attrgetter(attribute)
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
