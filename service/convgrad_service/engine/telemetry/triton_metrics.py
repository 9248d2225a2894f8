"""The counts of `engine.statistics` under Triton's metric names, for dashboards that know those.

Names, labels and units (microseconds) are those of Triton's metrics documentation; an operation
is a model, always version 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from convgrad_service.engine.telemetry.statistics import OperationStatistics

__all__ = ["TritonMetrics"]

_WAITING = (
    "nv_inference_pending_request_count",
    "Instantaneous number of pending requests awaiting execution",
)
_COUNTERS: Mapping[str, tuple[str, Callable[[OperationStatistics], float]]] = {
    "nv_inference_request_success": (
        "Number of successful inference requests",
        lambda one: one.success.count,
    ),
    "nv_inference_request_failure": (
        "Number of failed inference requests",
        lambda one: one.fail.count,
    ),
    # Requests are never put together here, so one of each is one request.
    "nv_inference_count": ("Number of inferences performed", lambda one: one.success.count),
    "nv_inference_exec_count": (
        "Number of model executions performed",
        lambda one: one.success.count,
    ),
    "nv_inference_request_duration_us": (
        "Cumulative inference request duration in microseconds",
        lambda one: one.success.ns / 1e3,
    ),
    "nv_inference_queue_duration_us": (
        "Cumulative inference queuing duration in microseconds",
        lambda one: one.queue.ns / 1e3,
    ),
    "nv_inference_compute_input_duration_us": (
        "Cumulative compute input duration in microseconds",
        lambda one: one.input.ns / 1e3,
    ),
    "nv_inference_compute_infer_duration_us": (
        "Cumulative compute inference duration in microseconds",
        lambda one: one.infer.ns / 1e3,
    ),
    "nv_inference_compute_output_duration_us": (
        "Cumulative inference compute output duration in microseconds",
        lambda one: one.output.ns / 1e3,
    ),
}


class TritonMetrics:
    """Reads ``statistics`` and ``waiting`` when Prometheus asks.

    Triton's counters have no suffix ``_total``, which Prometheus' own client would put into the
    line of their type: they are written here.
    """

    def __init__(
        self,
        statistics: Callable[[], Mapping[str, OperationStatistics]],
        waiting: Callable[[], float],
    ) -> None:
        self._statistics, self._waiting = statistics, waiting

    def exposition(self) -> bytes:
        """All of them in Prometheus' text format 0.0.4."""
        statistics = self._statistics()
        lines: list[str] = []
        for name, (text, read) in _COUNTERS.items():
            lines += [f"# HELP {name} {text}", f"# TYPE {name} counter"]
            lines += [
                f'{name}{{model="{operation}",version="1"}} {float(read(counts))!r}'
                for operation, counts in statistics.items()
            ]
        # Triton counts what waits by model; one queue serves all operations here.
        name, text = _WAITING
        lines += [f"# HELP {name} {text}", f"# TYPE {name} gauge"]
        lines.append(f"{name} {self._waiting()!r}")
        return "".join(f"{line}\n" for line in lines).encode()
