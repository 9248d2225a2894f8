"""What is known of one exchange while it lasts, over any transport: id, timings, how it ended."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from convgrad_service.engine.scheduling.quotas import ANYBODY, Caller
from convgrad_service.engine.telemetry.timing import Timings

__all__ = ["TRACE_HEADERS", "RequestContext"]

TRACE_HEADERS = ("traceparent", "tracestate")
"""W3C's headers, whose names are the same in gRPC's metadata."""

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}.*")

# Printable ASCII, spaces included: it goes back in a header and into log lines as it came.
_ACCEPTABLE_ID = re.compile(r"[ -~]{1,128}")
# Seeded by the system for each process, which is asked for nothing more: an id is no secret.
_ids = random.Random()  # noqa: S311


@dataclass(slots=True)
class RequestContext:
    """One exchange. ``operation`` is set once it is known that one is asked for; ``code`` is "ok"
    or the code of the error it was answered with; ``caller`` is whose API key it came with.
    ``trace`` are the headers that name the caller's trace, ``span`` is OpenTelemetry's of this
    exchange, where traces are kept, and ``client`` the address that it came from."""

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
        """The name of the caller's API key, "" where none is needed."""
        return self.caller.name

    @property
    def trace_id(self) -> str:
        """The trace that it belongs to, in hexadecimal digits; "" where it is in none."""
        if self.span is not None:
            return f"{self.span.get_span_context().trace_id:032x}"
        if not self.trace:
            return ""
        named = _TRACEPARENT.fullmatch(self.trace.get("traceparent", ""))
        return "" if named is None else named[1]

    @property
    def traceresponse(self) -> str | None:
        """What an answer says of its span, as W3C's draft has it; None without one."""
        if self.span is None:
            return None
        span = self.span.get_span_context()
        return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"

    @classmethod
    def begin(cls, given_ids: Iterable[str]) -> RequestContext:
        """A context under the first acceptable of the ids that came, or under a new one."""
        for given in given_ids:
            if _ACCEPTABLE_ID.fullmatch(given):
                return cls(given)
        return cls(f"{_ids.getrandbits(128):032x}")

    def server_timing(self) -> str:
        """The value of Server-Timing: milliseconds, as that header has them."""
        stages = [*self.timings.stages_s.items(), ("total", self.timings.total_s)]
        return ", ".join([f"{name};dur={seconds * 1e3:.3f}" for name, seconds in stages])
