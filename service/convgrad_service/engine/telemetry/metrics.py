"""What is counted of requests, and the Prometheus registry of a server.

Requests are counted in plain numbers, turned into Prometheus families on each scrape: a request
updates some twenty series, and a scrape comes every few seconds. Names of our own metrics carry
base units (seconds, bytes). Triton's, for existing dashboards, have the names, labels and units
(microseconds) of its documentation; an operation is a model, always version 1.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from operator import attrgetter
from typing import Any, NamedTuple

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
from convgrad.errors import CODES

__all__ = [
    "Duration",
    "Metrics",
    "OperationStatistics",
    "Record",
    "RequestMetrics",
    "is_inference",
    "triton_exposition",
]

# Statuses from here on say that the server, not the request, was at fault.
_SERVER_AT_FAULT = 429
# From one stage of a tiny problem on a warm server to the longest request the defaults allow.
_SECONDS = (
    0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
    1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip
_BOUNDS = [*map(floatToGoString, _SECONDS), "+Inf"]
_STAGES = {
    "receive": "Time to receive the body.",
    "decode": "Time to decode and check a request.",
    "queue": "Time a problem waited for a compute slot.",
    "upload": "Time a problem's inputs took to its device.",
    "compute": "Time a problem computed.",
    "download": "Time a problem's outputs took from its device.",
    "encode": "Time to encode an answer.",
}
_LABELS = ("operation", "transport", "code")
# Requests without an answer: the client hung up, or the server ended.
_UNANSWERED = ("client-gone", "cancelled")
Kind = tuple[str, ...]
_KEY_TOTALS = {
    "received_bytes": "Bytes of request bodies received from an API key.",
    "sent_bytes": "Bytes of answers sent to an API key.",
    "computed_flops": "Floating-point operations computed for an API key.",
    "compute_seconds": "Time that problems of an API key computed.",
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


class Record(NamedTuple):
    """One finished request; ``code`` is "ok" or the code of its error.

    ``flops`` and ``compulsory_bytes`` are 0 if nothing was computed. ``key`` is the name of the
    request's API key, "" without one.
    """

    operation: str
    transport: str
    code: str
    total_s: float
    stages_s: Mapping[str, float]
    received_bytes: int
    sent_bytes: int
    flops: int = 0
    compulsory_bytes: int = 0
    key: str = ""


@dataclass(slots=True)
class Duration:
    """A count of intervals, and their total length."""

    count: int = 0
    total_s: float = 0.0

    @property
    def ns(self) -> int:
        """The total in nanoseconds."""
        return round(self.total_s * 1e9)

    @property
    def us(self) -> float:
        """The total in microseconds."""
        return self.ns / 1e3

    def add(self, count: int, seconds: float) -> None:
        """Add ``count`` intervals of ``seconds`` in total."""
        self.count += count
        self.total_s += seconds


@dataclass(slots=True)
class OperationStatistics:
    """One operation's statistics since the server started.

    ``queue``, ``input`` (decode and upload), ``infer`` and ``output`` (download and encode) count
    successful requests only. ``last_inference_ms`` is in Unix time, 0 before the first request.
    """

    last_inference_ms: int = 0
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    queue: Duration = field(default_factory=Duration)
    input: Duration = field(default_factory=Duration)
    infer: Duration = field(default_factory=Duration)
    output: Duration = field(default_factory=Duration)


def is_inference(code: str) -> bool:
    """Return whether a request that ended with ``code`` counts: not if its content was refused."""
    row = CODES.get(code)
    return row is None or row.http_status >= _SERVER_AT_FAULT


class _Histogram:
    """Durations by bucket, and their sum."""

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * len(_BOUNDS)
        self.total_s = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(_SECONDS, seconds)] += 1
        self.total_s += seconds

    def add(self, other: _Histogram) -> None:
        self.counts = [mine + its for mine, its in zip(self.counts, other.counts, strict=True)]
        self.total_s += other.total_s


class _Counters:
    """Counters of one (operation, transport, code)."""

    __slots__ = (
        *("compulsory_bytes", "flops", "last_ms", "received_bytes", "requests", "sent_bytes"),
        "spent",
    )

    def __init__(self) -> None:
        self.requests = self.received_bytes = self.sent_bytes = 0
        self.last_ms = 0  # in Unix time
        self.flops = self.compulsory_bytes = 0
        self.spent: dict[str, _Histogram] = {"request": _Histogram()} | {
            stage: _Histogram() for stage in _STAGES
        }


class RequestMetrics(Collector):
    """Counters by operation, transport and code, and by API key."""

    def __init__(self) -> None:
        self._counters: dict[Kind, _Counters] = {}
        # By API key. Other metrics lack this label: operations times keys is too many series.
        self._key_requests: Counter[Kind] = Counter()
        self._key_totals: dict[str, dict[Kind, float]] = {name: {} for name in _KEY_TOTALS}
        # Every code from the start: rate() would miss a series that begins at one.
        self._by_code = dict.fromkeys(("ok", *_UNANSWERED, *CODES), 0)

    def count(self, record: Record) -> None:
        """Count one request."""
        self._by_code[record.code] = self._by_code.get(record.code, 0) + 1
        kind = record.operation, record.transport, record.code
        counters = self._counters.get(kind)
        if counters is None:
            counters = self._counters[kind] = _Counters()
        counters.requests += 1
        counters.last_ms = time.time_ns() // 1_000_000
        counters.received_bytes += record.received_bytes
        counters.sent_bytes += record.sent_bytes
        counters.flops += record.flops
        counters.compulsory_bytes += record.compulsory_bytes
        spent = counters.spent
        spent["request"].observe(record.total_s)
        for stage, seconds in record.stages_s.items():
            if (histogram := spent.get(stage)) is not None:
                histogram.observe(seconds)
        if record.key:
            self._count_key(record)

    def _count_key(self, record: Record) -> None:
        self._key_requests[record.key, record.code] += 1
        for name, value in (
            ("received_bytes", record.received_bytes),
            ("sent_bytes", record.sent_bytes),
            ("computed_flops", record.flops),
            ("compute_seconds", record.stages_s.get("compute", 0.0)),
        ):
            totals = self._key_totals[name]
            totals[record.key,] = totals.get((record.key,), 0) + value

    def statistics(self) -> Mapping[str, OperationStatistics]:
        """Return the statistics of all operations that were called."""
        found: dict[str, OperationStatistics] = {}
        for (operation, _, code), counters in self._counters.items():
            if not operation or not is_inference(code):
                continue
            statistics = found.setdefault(operation, OperationStatistics())
            statistics.last_inference_ms = max(statistics.last_inference_ms, counters.last_ms)
            count, spent = counters.requests, counters.spent
            if code != "ok":
                statistics.fail.add(count, spent["request"].total_s)
                continue
            for duration, names in (
                (statistics.success, ("request",)),
                (statistics.queue, ("queue",)),
                (statistics.input, ("decode", "upload")),
                (statistics.infer, ("compute",)),
                (statistics.output, ("download", "encode")),
            ):
                duration.add(count, sum(spent[name].total_s for name in names))
        return found

    def collect(self) -> Iterable[Metric]:
        yield self._counter("requests", "requests", "Requests by how they ended.", 3)
        yield _counter_family(
            "requests_by_code",
            "Requests by how they ended, of every code from the start: for alerts.",
            ("code",),
            {(code,): count for code, count in self._by_code.items()},
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
            "Bytes of inputs and outputs of problems computed: what a device must move at least.",
            1,
        )
        yield self._histogram("request", "Time from a request's headers to its answer's end.", 3)
        for stage, text in _STAGES.items():
            yield self._histogram(stage, text, 1)
        yield _counter_family(
            "key_requests",
            "Requests of an API key by how they ended.",
            ("key", "code"),
            self._key_requests,
        )
        for name, text in _KEY_TOTALS.items():
            yield _counter_family(f"key_{name}", text, ("key",), self._key_totals[name])

    def _counter(self, name: str, field: str, text: str, labels: int = 2) -> Metric:
        grouped = self._grouped(labels).items()
        totals = {kind: sum(getattr(each, field) for each in group) for kind, group in grouped}
        return _counter_family(name, text, _LABELS[:labels], totals)

    def _histogram(self, name: str, text: str, labels: int) -> HistogramMetricFamily:
        family = HistogramMetricFamily(f"convgrad_{name}_seconds", text, labels=_LABELS[:labels])
        for kind, group in self._grouped(labels).items():
            whole = _Histogram()
            for counters in group:
                whole.add(counters.spent[name])
            buckets = list(zip(_BOUNDS, map(float, accumulate(whole.counts)), strict=True))
            family.add_metric(kind, buckets, whole.total_s)
        return family

    def _grouped(self, labels: int) -> Mapping[Kind, list[_Counters]]:
        """Group the counters by their first ``labels`` labels."""
        grouped: dict[Kind, list[_Counters]] = {}
        for kind, counters in self._counters.items():
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
