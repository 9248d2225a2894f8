"""Requests counted as plain numbers, of which Prometheus' families are made when it asks.

A server counts every request in some twenty series and is asked every few seconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from convgrad.errors import CODES
from convgrad_service.engine.telemetry.record import Record

__all__ = ["RequestMetrics"]

# From the stages of a tiny problem on a warm server to the longest that the default settings allow.
_SECONDS = (
    0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
    1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip
_BOUNDS = [*map(floatToGoString, _SECONDS), "+Inf"]

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

_LABELS = ("operation", "transport", "code")
Kind = tuple[str, ...]


class _Seconds:
    """A histogram of durations."""

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * len(_BOUNDS)
        self.total_s = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(_SECONDS, seconds)] += 1
        self.total_s += seconds

    def add(self, other: _Seconds) -> None:
        self.counts = [mine + its for mine, its in zip(self.counts, other.counts, strict=True)]
        self.total_s += other.total_s


class _Tally:
    """Requests of one kind."""

    __slots__ = ("flops", "moved_bytes", "received_bytes", "requests", "sent_bytes", "spent")

    def __init__(self) -> None:
        self.requests = self.received_bytes = self.sent_bytes = 0
        self.flops = self.moved_bytes = 0
        self.spent: dict[str, _Seconds] = {"request": _Seconds()} | {
            stage: _Seconds() for stage in _STAGES
        }


class RequestMetrics(Collector):
    """The counts by operation, transport and code; there are no more kinds than those make."""

    def __init__(self) -> None:
        self._tallies: dict[Kind, _Tally] = {}
        # From the start: what an alert counts the increase of must not begin at one.
        self._by_code = dict.fromkeys(("ok", *CODES), 0)

    def count(self, record: Record) -> None:
        """Count one request."""
        self._by_code[record.code] = self._by_code.get(record.code, 0) + 1
        kind = record.operation, record.transport, record.code
        tally = self._tallies.get(kind)
        if tally is None:
            tally = self._tallies[kind] = _Tally()
        tally.requests += 1
        tally.received_bytes += record.received_bytes
        tally.sent_bytes += record.sent_bytes
        tally.flops += record.flops
        tally.moved_bytes += record.compulsory_bytes
        spent = tally.spent
        spent["request"].observe(record.total_s)
        for stage, seconds in record.stages_s.items():
            if (histogram := spent.get(stage)) is not None:
                histogram.observe(seconds)

    def collect(self) -> Iterable[Metric]:
        """See `Collector.collect`."""
        yield self._counter("requests", "Requests by how they ended.", 3, lambda t: t.requests)
        by_code = CounterMetricFamily(
            "convgrad_requests_by_code",
            "Requests by how they ended, of every code from the start: for alerts.",
            labels=("code",),
        )
        for code, count in self._by_code.items():
            by_code.add_metric((code,), count)
        yield by_code
        yield self._counter(
            "received_bytes", "Bytes of request bodies received.", 2, lambda t: t.received_bytes
        )
        yield self._counter("sent_bytes", "Bytes of answers sent.", 2, lambda t: t.sent_bytes)
        # Over the rate of convgrad_compute_seconds_sum, these are achieved FLOP/s and bytes/s.
        yield self._counter(
            "computed_flops",
            "Floating-point operations of problems computed.",
            1,
            lambda t: t.flops,
        )
        yield self._counter(
            "compulsory_bytes",
            "Bytes of inputs and outputs of problems computed: what a device must move at least.",
            1,
            lambda t: t.moved_bytes,
        )
        text = "Time from a request's headers to its answer's end."
        yield self._histogram("request", text, 3)
        for stage, text in _STAGES.items():
            yield self._histogram(stage, text, 1)

    def _counter(
        self, name: str, text: str, labels: int, read: Callable[[_Tally], int]
    ) -> CounterMetricFamily:
        family = CounterMetricFamily(f"convgrad_{name}", text, labels=_LABELS[:labels])
        for kind, tallies in self._grouped(labels).items():
            family.add_metric(kind, sum(map(read, tallies)))
        return family

    def _histogram(self, name: str, text: str, labels: int) -> HistogramMetricFamily:
        family = HistogramMetricFamily(f"convgrad_{name}_seconds", text, labels=_LABELS[:labels])
        for kind, tallies in self._grouped(labels).items():
            whole = _Seconds()
            for tally in tallies:
                whole.add(tally.spent[name])
            buckets = list(zip(_BOUNDS, map(float, accumulate(whole.counts)), strict=True))
            family.add_metric(kind, buckets, whole.total_s)
        return family

    def _grouped(self, labels: int) -> Mapping[Kind, list[_Tally]]:
        """The tallies by their first labels."""
        grouped: dict[Kind, list[_Tally]] = {}
        for kind, tally in self._tallies.items():
            grouped.setdefault(kind[:labels], []).append(tally)
        return grouped
