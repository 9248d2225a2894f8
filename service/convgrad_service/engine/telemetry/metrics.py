"""What the server counts, for Prometheus. Base units (seconds, bytes) stand in the names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from convgrad import _version
from convgrad_service.engine.telemetry.record import Record
from convgrad_service.engine.telemetry.request_metrics import RequestMetrics

__all__ = ["Labelled", "Metrics"]

Labelled = Callable[[], Mapping[tuple[str, ...], float]]
"""Reads values by their labels' values."""

_OF_KEYS = {
    "received_bytes": ("received_bytes", "Bytes of request bodies received from an API key."),
    "sent_bytes": ("sent_bytes", "Bytes of answers sent to an API key."),
    "flops": ("computed_flops", "Floating-point operations computed for an API key."),
    "compute_s": ("compute_seconds", "Time that problems of an API key computed."),
}


class Metrics:
    """The metrics of one application, in a registry of its own (two can live in one process)."""

    def __init__(self, backend: str) -> None:
        self.registry = CollectorRegistry()
        self._tallies = RequestMetrics()
        self.registry.register(self._tallies)
        # Apart from the above: a label more there would multiply every operation by every key.
        by_key = ("key",)
        self._key_requests = self._counter(
            "convgrad_key_requests", "Requests of an API key by how they ended.", (*by_key, "code")
        )
        self._key_counters = {
            field: self._counter(f"convgrad_key_{name}", text, by_key)
            for field, (name, text) in _OF_KEYS.items()
        }
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
            self._count_key(record)

    def _count_key(self, record: Record) -> None:
        self._key_requests.labels(record.key, record.code).inc()
        counted = self._key_counters
        counted["received_bytes"].labels(record.key).inc(record.received_bytes)
        counted["sent_bytes"].labels(record.key).inc(record.sent_bytes)
        counted["flops"].labels(record.key).inc(record.flops)
        counted["compute_s"].labels(record.key).inc(record.stages_s.get("compute", 0.0))

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format 0.0.4."""
        return generate_latest(self.registry) + b"".join(more() for more in self.more)

    def _counter(self, name: str, text: str, labels: tuple[str, ...]) -> Counter:
        return Counter(name, text, labels, registry=self.registry)


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
