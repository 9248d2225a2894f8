"""The counts of `engine.statistics` under Triton's metric names, for dashboards that know those.

Names, labels and units (microseconds) are those of Triton's metrics documentation; an operation
is a model, always version 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from convgrad_service.engine.telemetry.statistics import OperationStatistics

__all__ = ["TritonMetrics"]

_LABELS = ("model", "version")

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


class _Plain(CounterMetricFamily):
    """A counter without the suffix ``_total``, which Triton's counters do not have."""

    def __init__(self, name: str, documentation: str) -> None:
        super().__init__(name, documentation, labels=_LABELS)

    def add_metric(self, labels: Iterable[str], value: float, *_: object) -> None:
        self.add_sample(self.name, dict(zip(_LABELS, labels, strict=True)), value)


class TritonMetrics(Collector):
    """Reads ``statistics`` and ``waiting`` when Prometheus asks."""

    def __init__(
        self,
        statistics: Callable[[], Mapping[str, OperationStatistics]],
        waiting: Callable[[], float],
    ) -> None:
        self._statistics, self._waiting = statistics, waiting

    def collect(self) -> Iterable[Metric]:
        """See `Collector.collect`."""
        statistics = self._statistics()
        for name, (text, read) in _COUNTERS.items():
            counter = _Plain(name, text)
            for operation, counts in statistics.items():
                counter.add_metric((operation, "1"), read(counts))
            yield counter
        # Triton counts what waits by model; one queue serves all operations here.
        yield GaugeMetricFamily(
            "nv_inference_pending_request_count",
            "Instantaneous number of pending requests awaiting execution",
            value=self._waiting(),
        )
