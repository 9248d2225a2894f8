"""What the server counts, for Prometheus. Base units (seconds, bytes) stand in the names."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from convgrad import _version
from convgrad_service.engine.records import Record

__all__ = ["Metrics"]

# From a tiny problem on a warm server to the longest that the default settings allow.
_SECONDS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
    1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip

# The stages worth a histogram of their own; the others show in Server-Timing.
_STAGES = {
    "receive": "Time to receive the body.",
    "decode": "Time to decode and check a request.",
    "queue": "Time a problem waited for a compute slot.",
    "compute": "Time a problem computed.",
    "encode": "Time to encode an answer.",
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
        self._seconds = self._histogram(
            "convgrad_request_seconds", "Time from a request's headers to its answer's end.", labels
        )
        self._stages = {
            stage: self._histogram(f"convgrad_{stage}_seconds", text, ("operation",))
            for stage, text in _STAGES.items()
        }
        info = Gauge("convgrad_info", "Always 1.", ("version", "backend"), registry=self.registry)
        info.labels(_version.__version__, backend).set(1)
        ProcessCollector(registry=self.registry)

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Add a gauge whose value is read when Prometheus asks."""
        Gauge(name, text, registry=self.registry).set_function(read)

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
        for stage, seconds in record.stages_s.items():
            if (histogram := counted.stages.get(stage)) is not None:
                histogram.observe(seconds)

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format 0.0.4."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, labels: tuple[str, ...]) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, labels: tuple[str, ...]) -> Histogram:
        return Histogram(name, text, labels, buckets=_SECONDS, registry=self.registry)


class _Children:
    """What counts requests of one kind; looking them up by their labels takes longer than counting.

    There are no more kinds than operations, transports and codes.
    """

    def __init__(self, metrics: Metrics, operation: str, transport: str, code: str) -> None:
        self.requests = metrics._requests.labels(operation, transport, code)
        self.received = metrics._received.labels(operation, transport)
        self.sent = metrics._sent.labels(operation, transport)
        self.seconds = metrics._seconds.labels(operation, transport)
        self.stages = {
            stage: histogram.labels(operation) for stage, histogram in metrics._stages.items()
        }
