"""What the server counts, for Prometheus. Base units (seconds, bytes) stand in the names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import (
    CollectorRegistry,
    Gauge,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from convgrad import _version
from convgrad_service.engine.telemetry.key_metrics import KeyMetrics
from convgrad_service.engine.telemetry.record import Record
from convgrad_service.engine.telemetry.request_metrics import RequestMetrics

__all__ = ["Labelled", "Metrics"]

Labelled = Callable[[], Mapping[tuple[str, ...], float]]
"""Reads values by their labels' values."""


class Metrics:
    """The metrics of one application, in a registry of its own (two can live in one process)."""

    def __init__(self, backend: str) -> None:
        self.registry = CollectorRegistry()
        self._tallies = RequestMetrics()
        self.registry.register(self._tallies)
        self._keys = KeyMetrics()
        self.registry.register(self._keys)
        info = Gauge("convgrad_info", "Always 1.", ("version", "backend"), registry=self.registry)
        info.labels(_version.__version__, backend).set(1)
        ProcessCollector(registry=self.registry)
        self.more: list[Callable[[], bytes]] = []
        """What is written in the format already."""

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Add a gauge whose value is read when Prometheus asks."""
        Gauge(name, text, registry=self.registry).set_function(read)

    def gauges(self, name: str, text: str, labels: tuple[str, ...], read: Labelled) -> None:
        """The same, with labels."""
        self.registry.register(_Read(lambda: GaugeMetricFamily(name, text, labels=labels), read))

    def total(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Add a counter that is kept elsewhere and read when Prometheus asks."""
        self.totals(name, text, (), lambda: {(): read()})

    def totals(self, name: str, text: str, labels: tuple[str, ...], read: Labelled) -> None:
        """The same, with labels."""
        self.registry.register(_Read(lambda: CounterMetricFamily(name, text, labels=labels), read))

    def count(self, record: Record) -> None:
        """Count one request."""
        self._tallies.count(record)
        if record.key:
            self._keys.count(record)

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format 0.0.4."""
        return generate_latest(self.registry) + b"".join(more() for more in self.more)


class _Read(Collector):
    """One metric, read where it is kept."""

    def __init__(
        self, family: Callable[[], CounterMetricFamily | GaugeMetricFamily], read: Labelled
    ) -> None:
        self._family, self._read = family, read

    def collect(self) -> Iterable[Metric]:
        """See `Collector.collect`."""
        family = self._family()
        for labels, value in self._read().items():
            family.add_metric(labels, value)
        yield family
