"""What the server counts, for Prometheus. Base units (seconds, bytes) stand in the names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from convgrad import _version
from convgrad_service.engine.records import Record

__all__ = ["Labelled", "Metrics"]

Labelled = Callable[[], Mapping[tuple[str, ...], float]]
"""Reads values by their labels' values."""

# From a tiny problem on a warm server to the longest that the default settings allow.
_SECONDS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
    1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip

_BY = ("operation",)

# The stages worth a histogram of their own; the others show in Server-Timing.
_STAGES = {
    "receive": "Time to receive the body.",
    "decode": "Time to decode and check a request.",
    "queue": "Time a problem waited for a compute slot.",
    "upload": "Time a problem's inputs took to its device.",
    "compute": "Time a problem computed.",
    "download": "Time a problem's outputs took from its device.",
    "encode": "Time to encode an answer.",
}

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
        self._children: dict[tuple[str, str, str], _Children] = {}
        labels = ("operation", "transport")
        self._requests = self._counter(
            "convgrad_requests", "Requests by how they ended.", (*labels, "code")
        )
        self._received = self._counter(
            "convgrad_received_bytes", "Bytes of request bodies received.", labels
        )
        self._sent = self._counter("convgrad_sent_bytes", "Bytes of answers sent.", labels)
        # Over the rate of convgrad_compute_seconds_sum, these are achieved FLOP/s and bytes/s.
        self._flops = self._counter(
            "convgrad_computed_flops", "Floating-point operations of problems computed.", _BY
        )
        self._moved = self._counter(
            "convgrad_compulsory_bytes",
            "Bytes of inputs and outputs of problems computed: what a device must move at least.",
            _BY,
        )
        self._seconds = self._histogram(
            "convgrad_request_seconds", "Time from a request's headers to its answer's end.", labels
        )
        self._stages = {
            stage: self._histogram(f"convgrad_{stage}_seconds", text, _BY)
            for stage, text in _STAGES.items()
        }
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
        key = record.operation, record.transport, record.code
        counted = self._children.get(key)
        if counted is None:
            counted = self._children[key] = _Children(self, *key)
        counted.requests.inc()
        counted.received.inc(record.received_bytes)
        counted.sent.inc(record.sent_bytes)
        counted.seconds.observe(record.total_s)
        counted.flops.inc(record.flops)
        counted.moved.inc(record.compulsory_bytes)
        for stage, seconds in record.stages_s.items():
            if (histogram := counted.stages.get(stage)) is not None:
                histogram.observe(seconds)
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
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, labels: tuple[str, ...]) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, labels: tuple[str, ...]) -> Histogram:
        return Histogram(name, text, labels, buckets=_SECONDS, registry=self.registry)


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


class _Children:
    """What counts requests of one kind; looking them up by their labels takes longer than counting.

    There are no more kinds than operations, transports and codes.
    """

    def __init__(self, metrics: Metrics, operation: str, transport: str, code: str) -> None:
        self.requests = metrics._requests.labels(operation, transport, code)
        self.received = metrics._received.labels(operation, transport)
        self.sent = metrics._sent.labels(operation, transport)
        self.seconds = metrics._seconds.labels(operation, transport)
        self.flops = metrics._flops.labels(operation)
        self.moved = metrics._moved.labels(operation)
        self.stages = {
            stage: histogram.labels(operation) for stage, histogram in metrics._stages.items()
        }
