"""The Prometheus registry of a server, and Triton's metrics for existing dashboards.

Names of our own metrics carry base units (seconds, bytes). Triton's have the names, labels and
units (microseconds) of its documentation; an operation is a model, always version 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import accumulate
from operator import attrgetter
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from convgrad import _version
from convgrad_service.engine.telemetry.record import (
    SECONDS,
    Counters,
    Histogram,
    Kind,
    OperationStatistics,
    RequestMetrics,
)

_BOUNDS = [*map(floatToGoString, SECONDS), "+Inf"]
_STAGES = {
    "receive": "Time to receive the body.",
    "decode": "Time to decode and check a request.",
    "queue": "Time a problem waited for a compute slot.",
    "upload": "Time to copy a problem's inputs to its device.",
    "compute": "Time to compute a problem.",
    "download": "Time to copy a problem's outputs from its device.",
    "encode": "Time to encode an answer.",
}
_LABELS = ("operation", "transport", "code")
_KEY_TOTALS = {
    "received_bytes": "Bytes of request bodies received from an API key.",
    "sent_bytes": "Bytes of answers sent to an API key.",
    "computed_flops": "Floating-point operations computed for an API key.",
    "compute_seconds": "Time spent computing an API key's problems.",
}
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


class RequestCollector(Collector):
    """What `RequestMetrics` has counted, as Prometheus' metrics."""

    def __init__(self, requests: RequestMetrics) -> None:
        self._requests = requests

    def collect(self) -> Iterable[Metric]:
        yield self._counter("requests", "requests", "Requests by outcome.", 3)
        yield _counter_family(
            "requests_by_code",
            "Requests by outcome, with every code present from the start, for alerts.",
            ("code",),
            {(code,): count for code, count in self._requests.by_code.items()},
        )
        yield self._counter("received_bytes", "received_bytes", "Bytes of request bodies received.")
        yield self._counter("sent_bytes", "sent_bytes", "Bytes of answers sent.")
        # Divided by the rate of convgrad_compute_seconds_sum: achieved FLOP/s and bytes/s.
        yield self._counter(
            "computed_flops", "flops", "Floating-point operations of problems computed.", 1
        )
        yield self._counter(
            "compulsory_bytes",
            "compulsory_bytes",
            "Bytes of inputs and outputs of problems computed: the least that a device must move.",
            1,
        )
        yield self._histogram("request", "Time from a request's headers to its answer's end.", 3)
        for stage, text in _STAGES.items():
            yield self._histogram(stage, text, 1)
        yield _counter_family(
            "key_requests",
            "Requests of an API key by outcome.",
            ("key", "code"),
            self._requests.key_requests,
        )
        for name, text in _KEY_TOTALS.items():
            yield _counter_family(f"key_{name}", text, ("key",), self._requests.key_totals[name])

    def _counter(self, name: str, field: str, text: str, labels: int = 2) -> Metric:
        grouped = self._grouped(labels).items()
        totals = {kind: sum(getattr(each, field) for each in group) for kind, group in grouped}
        return _counter_family(name, text, _LABELS[:labels], totals)

    def _histogram(self, name: str, text: str, labels: int) -> HistogramMetricFamily:
        family = HistogramMetricFamily(f"convgrad_{name}_seconds", text, labels=_LABELS[:labels])
        for kind, group in self._grouped(labels).items():
            whole = Histogram()
            for counters in group:
                whole.add(counters.spent[name])
            buckets = list(zip(_BOUNDS, map(float, accumulate(whole.counts)), strict=True))
            family.add_metric(kind, buckets, whole.total_s)
        return family

    def _grouped(self, labels: int) -> Mapping[Kind, list[Counters]]:
        """Group the counters by their first ``labels`` labels."""
        grouped: dict[Kind, list[Counters]] = {}
        for kind, counters in self._requests.counters.items():
            grouped.setdefault(kind[:labels], []).append(counters)
        return grouped


def _counter_family(
    name: str, text: str, labels: tuple[str, ...], totals: Mapping[Kind, float]
) -> Metric:
    family = CounterMetricFamily(f"convgrad_{name}", text, labels=labels)
    for kind, total in totals.items():
        family.add_metric(kind, total)
    return family


class Metrics:
    """The metrics of one application, in its own registry: a process may hold several."""

    def __init__(self, backend: str, requests: RequestMetrics) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(RequestCollector(requests))
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
