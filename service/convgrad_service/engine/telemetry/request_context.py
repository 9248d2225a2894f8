"""The state of one exchange over any transport: id, caller, timings and outcome."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from convgrad_service.engine.scheduling.quotas import ANYBODY, Caller
from convgrad_service.engine.telemetry.record import Record, Timings

__all__ = ["TRACE_HEADERS", "RequestContext"]

TRACE_HEADERS = ("traceparent", "tracestate")
"""The W3C trace context headers; gRPC metadata uses the same names."""

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}.*")

# Printable ASCII: the id is echoed in a header and in log lines.
_ACCEPTABLE_ID = re.compile(r"[ -~]{1,128}")
# One seed from the system per process, no system call per id: ids are not secret.
_ids = random.Random()  # noqa: S311


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
