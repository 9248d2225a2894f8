"""The Prometheus registry of a server. Metric names carry base units (seconds, bytes)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from convgrad import _version
from convgrad_service.engine.telemetry.request_metrics import RequestMetrics

__all__ = ["Labelled", "Metrics"]

Labelled = Callable[[], Mapping[Any, float]]
"""Reads a metric's values, by the value of its label, or by a tuple of those of its labels."""


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

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Add a gauge that is read on every scrape."""
        self.gauges(name, text, (), lambda: {(): read()})

    def gauges(self, name: str, text: str, labels: tuple[str, ...], read: Labelled) -> None:
        """Add a gauge with labels."""
        self.registry.register(_Read(lambda: GaugeMetricFamily(name, text, labels=labels), read))

    def total(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Add a counter that is read on every scrape."""
        self.totals(name, text, (), lambda: {(): read()})

    def totals(self, name: str, text: str, labels: tuple[str, ...], read: Labelled) -> None:
        """Add a counter with labels."""
        self.registry.register(_Read(lambda: CounterMetricFamily(name, text, labels=labels), read))

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format 0.0.4."""
        return generate_latest(self.registry) + b"".join(more() for more in self.more)


class _Read(Collector):
    """One metric whose values live elsewhere."""

    def __init__(
        self, family: Callable[[], CounterMetricFamily | GaugeMetricFamily], read: Labelled
    ) -> None:
        self._family, self._read = family, read

    def collect(self) -> Iterable[Metric]:
        family = self._family()
        for labels, value in self._read().items():
            family.add_metric((labels,) if isinstance(labels, str) else labels, value)
        yield family
