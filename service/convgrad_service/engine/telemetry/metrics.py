"""The Prometheus registry of a server, and Triton's metrics for existing dashboards.

Names of our own metrics carry base units (seconds, bytes). Triton's have the names, labels and
units (microseconds) of its documentation; an operation is a model, always version 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import attrgetter
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from convgrad import _version
from convgrad_service.engine.telemetry.record import OperationStatistics, RequestMetrics

__all__ = ["Metrics", "triton_exposition"]

Read = Callable[[], float | Mapping[Any, float]]
"""Reads a metric's value or, if it has labels, its values by the label, or by a tuple of labels."""
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


class Metrics:
    """The metrics of one application, in its own registry: a process may hold several."""

    def __init__(self, backend: str, requests: RequestMetrics) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(requests)
        info = Gauge("convgrad_info", "Always 1.", ("version", "backend"), registry=self.registry)
        info.labels(_version.__version__, backend).set(1)
        ProcessCollector(registry=self.registry)
        self.more: list[Callable[[], bytes]] = []
        """Sources of further metrics, already in the exposition format."""

    def gauge(self, name: str, text: str, read: Read, *labels: str) -> None:
        """Add the gauge ``convgrad_<name>``, which is read on every scrape."""
        self.registry.register(_Read(GaugeMetricFamily, name, text, read, labels))

    def total(self, name: str, text: str, read: Read, *labels: str) -> None:
        """Add the counter ``convgrad_<name>``, which is read on every scrape."""
        self.registry.register(_Read(CounterMetricFamily, name, text, read, labels))

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format 0.0.4."""
        return generate_latest(self.registry) + b"".join(more() for more in self.more)


class _Read(Collector):
    """One metric whose values live elsewhere."""

    def __init__(
        self,
        family: type[CounterMetricFamily] | type[GaugeMetricFamily],
        name: str,
        text: str,
        read: Read,
        labels: tuple[str, ...],
    ) -> None:
        self._family, self._read = partial(family, f"convgrad_{name}", text, labels=labels), read

    def collect(self) -> Iterable[Metric]:
        family, values = self._family(), self._read()
        for labels, value in (values if isinstance(values, Mapping) else {(): values}).items():
            family.add_metric((labels,) if isinstance(labels, str) else labels, value)
        yield family


def triton_exposition(
    statistics: Mapping[str, OperationStatistics], waiting_problems: float
) -> bytes:
    """Return Triton's metrics in Prometheus' text format 0.0.4.

    Prometheus' client would add the suffix ``_total``, which Triton's counters do not have.
    """
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
    lines += [f"# HELP {name} {text}", f"# TYPE {name} gauge", f"{name} {waiting_problems!r}"]
    return "".join(f"{line}\n" for line in lines).encode()
