"""What is measured of one request, and counted of all: stages, outcome, access log, counters.

`RequestContext` belongs to a transport's exchange. Requests are counted in plain numbers, which
`metrics` turns into Prometheus' families on each scrape: a request updates some twenty series, and
a scrape comes every few seconds.
"""

from __future__ import annotations

import logging
import random
import re
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from convgrad.errors import CODES
from convgrad_service.engine.scheduling.quotas import ANYBODY, Caller

STAGES = ("receive", "decode", "queue", "upload", "compute", "download", "encode")
TRACE_HEADERS = ("traceparent", "tracestate")
"""The W3C trace context headers; gRPC metadata uses the same names."""

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}.*")
# Printable ASCII: the id is echoed in a header and in log lines.
_ACCEPTABLE_ID = re.compile(r"[ -~]{1,128}")
# One seed from the system per process, no system call per id: ids are not secret.
_ids = random.Random()  # noqa: S311
access = logging.getLogger("convgrad.access")
# Statuses from here on say that the server, not the request, was at fault.
_SERVER_AT_FAULT = 429
# From one stage of a tiny problem on a warm server to the longest request the defaults allow.
SECONDS = (
    0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
    1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip
Kind = tuple[str, ...]
# Requests without an answer: the client hung up, or the server ended.
_UNANSWERED = ("client-gone", "cancelled")


class Timings:
    """Seconds spent in each of `STAGES` so far.

    ``flops`` and ``compulsory_bytes`` are set once the problem has been computed. ``intervals``
    lists (stage, start, seconds) for tracing, and is None if the request is not traced.
    """

    def __init__(self) -> None:
        self.started_s = time.monotonic()
        self.stages_s: dict[str, float] = {}
        self.intervals: list[tuple[str, float, float]] | None = None
        self.flops = self.compulsory_bytes = 0
        self._stage: str | None = None
        self._since_s = self.started_s

    def add(self, stage: str, seconds: float, began_s: float) -> None:
        """Add ``seconds`` to ``stage``, which began at ``began_s`` of the monotonic clock."""
        self.stages_s[stage] = self.stages_s.get(stage, 0.0) + seconds
        if self.intervals is not None:
            self.intervals.append((stage, began_s, seconds))

    def enter(self, stage: str | None) -> None:
        """Begin a stage, or none, and end the one before."""
        now_s = time.monotonic()
        if self._stage is not None:
            self.add(self._stage, now_s - self._since_s, self._since_s)
        self._stage, self._since_s = stage, now_s

    @property
    def total_s(self) -> float:
        """Seconds since the request began."""
        return time.monotonic() - self.started_s


@dataclass(slots=True)
class RequestContext:
    """One exchange.

    Attributes
    ----------
    operation
        None for exchanges that do not compute, such as health checks, or before routing.
    caller
        The owner of the API key.
    trace
        The incoming trace context headers.
    span
        The OpenTelemetry span, if tracing is on.
    client
        The peer's address.
    code
        "ok", or the code of the error that was returned.
    """

    request_id: str
    timings: Timings = field(default_factory=Timings)
    operation: str | None = None
    caller: Caller = ANYBODY
    trace: Mapping[str, str] = field(default_factory=dict)
    span: Any = None
    client: str = ""
    code: str = "ok"
    status: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0

    @property
    def owner(self) -> str:
        """The name of the caller's API key, or "" without keys."""
        return self.caller.name

    @property
    def trace_id(self) -> str:
        """The trace id in hexadecimal digits, or "" outside any trace."""
        if self.span is not None:
            return f"{self.span.get_span_context().trace_id:032x}"
        if not self.trace:
            return ""
        named = _TRACEPARENT.fullmatch(self.trace.get("traceparent", ""))
        return "" if named is None else named[1]

    @property
    def traceresponse(self) -> str | None:
        """The value of W3C's draft header ``traceresponse``; None without a span."""
        if self.span is None:
            return None
        span = self.span.get_span_context()
        return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"

    @classmethod
    def begin(cls, given_ids: Iterable[str]) -> RequestContext:
        """Make a context with the first acceptable of the client's ids, or with a new id."""
        for given in given_ids:
            if _ACCEPTABLE_ID.fullmatch(given):
                return cls(given)
        return cls(f"{_ids.getrandbits(128):032x}")

    def record(self, transport: str) -> Record:
        """Return what is counted of the exchange once it has ended."""
        timings = self.timings
        return Record(
            self.operation or "",
            transport,
            self.code,
            timings.total_s,
            timings.stages_s,
            self.received_bytes,
            self.sent_bytes,
            timings.flops,
            timings.compulsory_bytes,
            self.owner,
        )

    def server_timing(self) -> str:
        """Return the value of the Server-Timing header, in milliseconds."""
        stages = [*self.timings.stages_s.items(), ("total", self.timings.total_s)]
        return ", ".join([f"{name};dur={seconds * 1e3:.3f}" for name, seconds in stages])


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


class Histogram:
    """Durations by bucket, and their sum."""

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.total_s = 0.0

    def add(self, other: Histogram) -> None:
        self.counts = [mine + its for mine, its in zip(self.counts, other.counts, strict=True)]
        self.total_s += other.total_s


class Counters:
    """Counters of one (operation, transport, code)."""

    __slots__ = (
        *("compulsory_bytes", "flops", "last_ms", "received_bytes", "requests", "sent_bytes"),
        "spent",
    )

    def __init__(self) -> None:
        self.requests = self.received_bytes = self.sent_bytes = 0
        self.last_ms = 0  # in Unix time
        self.flops = self.compulsory_bytes = 0
        self.spent: dict[str, Histogram] = {"request": Histogram()} | {
            stage: Histogram() for stage in STAGES
        }


class RequestMetrics:
    """Counters by operation, transport and code, and by API key."""

    def __init__(self) -> None:
        self.counters: dict[Kind, Counters] = {}
        # By API key. Other metrics lack this label: operations times keys is too many series.
        self.key_requests: Counter[Kind] = Counter()
        self.key_totals: defaultdict[str, Counter[Kind]] = defaultdict(Counter)
        # Every code from the start: rate() would miss a series that begins at one.
        self.by_code = dict.fromkeys(("ok", *_UNANSWERED, *CODES), 0)

    def count(self, record: Record) -> None:
        """Count one request."""
        self.by_code[record.code] = self.by_code.get(record.code, 0) + 1
        kind = record.operation, record.transport, record.code
        counters = self.counters.get(kind)
        if counters is None:
            counters = self.counters[kind] = Counters()
        counters.requests += 1
        counters.last_ms = time.time_ns() // 1_000_000
        counters.received_bytes += record.received_bytes
        counters.sent_bytes += record.sent_bytes
        counters.flops += record.flops
        counters.compulsory_bytes += record.compulsory_bytes
        for stage, seconds in (("request", record.total_s), *record.stages_s.items()):
            histogram = counters.spent[stage]
            histogram.counts[bisect_left(SECONDS, seconds)] += 1
            histogram.total_s += seconds
        if record.key:
            self._count_key(record)

    def _count_key(self, record: Record) -> None:
        self.key_requests[record.key, record.code] += 1
        for name, value in (
            ("received_bytes", record.received_bytes),
            ("sent_bytes", record.sent_bytes),
            ("computed_flops", record.flops),
            ("compute_seconds", record.stages_s.get("compute", 0.0)),
        ):
            self.key_totals[name][record.key,] += value  # type: ignore[assignment] # a float

    def statistics(self) -> Mapping[str, OperationStatistics]:
        """Return the statistics of all operations that were called."""
        found: dict[str, OperationStatistics] = {}
        for (operation, _, code), counters in self.counters.items():
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


class ExchangeLine:
    """The message of an access-log record; `str` gives the text, `fields` the JSON fields."""

    __slots__ = ("_context", "_total_s", "_transport_fields")

    def __init__(self, context: RequestContext, transport_fields: Mapping[str, str | int]) -> None:
        self._context, self._transport_fields = context, transport_fields
        self._total_s = context.timings.total_s

    def fields(self) -> dict[str, str | int | float]:
        """Return the fields in the order of the text."""
        context, stages_s = self._context, self._context.timings.stages_s
        key, trace_id = context.owner, context.trace_id
        return {
            "request_id": context.request_id,
            **({"key": key} if key else {}),
            **self._transport_fields,
            "code": context.code,
            "received_bytes": context.received_bytes,
            "sent_bytes": context.sent_bytes,
            "client": context.client,
            **({"trace_id": trace_id} if trace_id else {}),
            "total_s": round(self._total_s, 6),
            **{f"{stage}_s": round(seconds, 6) for stage, seconds in stages_s.items()},
        }

    def __str__(self) -> str:
        return " ".join([f"{name}={_shown(value)}" for name, value in self.fields().items()])


def _shown(value: str | int | float) -> str:
    if isinstance(value, float):
        return f"{value:.6f}"
    if isinstance(value, int):
        return str(value)
    # A path or an id with spaces or quotes must not be able to forge other fields of the line.
    return value if value.isprintable() and not set(' "=') & set(value) else repr(value)
