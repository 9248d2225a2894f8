"""One request: its id, caller, stages and outcome, its deadline, and what it asks for.

`RequestContext` belongs to a transport's exchange, `ComputeRequest` to the pipeline.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad.contract import Operation, Request
from convgrad.dtypes import DType
from convgrad.errors import DeadlineExceeded, MalformedRequest
from convgrad_service.engine.hub import JobHandle
from convgrad_service.engine.scheduling.quotas import ANYBODY, Caller
from convgrad_service.engine.shm.registry import RegionPart
from convgrad_service.engine.telemetry.metrics import Record
from convgrad_service.problems import Problem

__all__ = [
    "SMALL_BYTES",
    "STAGES",
    "TRACE_HEADERS",
    "CancelScope",
    "ClientGone",
    "ComputeRequest",
    "Deadline",
    "Decoded",
    "ExchangeLine",
    "Fields",
    "RequestContext",
    "Timings",
    "access",
    "blank",
    "log_exchange",
]

STAGES = ("receive", "decode", "queue", "upload", "compute", "download", "encode")
TRACE_HEADERS = ("traceparent", "tracestate")
"""The W3C trace context headers; gRPC metadata uses the same names."""

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}.*")
# Printable ASCII: the id is echoed in a header and in log lines.
_ACCEPTABLE_ID = re.compile(r"[ -~]{1,128}")
# One seed from the system per process, no system call per id: ids are not secret.
_ids = random.Random()  # noqa: S311
Fields = Mapping[str, Any]
SMALL_BYTES = 64 * 1024
"""Up to this size, data is decoded, copied and encoded on the event loop: a thread takes longer."""

access = logging.getLogger("convgrad.access")


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

    def add(self, stage: str, seconds: float, began_s: float | None = None) -> None:
        """Add ``seconds`` to ``stage``; by default the interval ends now."""
        self.stages_s[stage] = self.stages_s.get(stage, 0.0) + seconds
        if self.intervals is not None:
            if began_s is None:
                began_s = time.monotonic() - seconds
            self.intervals.append((stage, began_s, seconds))

    def stage(self, stage: str) -> _Stage:
        """Return a context manager that adds the time of its block to ``stage``."""
        return _Stage(self, stage)

    @property
    def total_s(self) -> float:
        """Seconds since the request began."""
        return time.monotonic() - self.started_s


class _Stage:
    """A class because a generator would take as long as a small request's whole stage."""

    __slots__ = ("_began_s", "_name", "_timings")

    def __init__(self, timings: Timings, name: str) -> None:
        self._timings, self._name = timings, name

    def __enter__(self) -> None:
        self._began_s = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._timings.add(self._name, time.monotonic() - self._began_s, self._began_s)


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


@dataclass(frozen=True, slots=True)
class Deadline:
    """A deadline at ``at_s`` of time.monotonic(), ``allowed_s`` after the request began."""

    at_s: float
    allowed_s: float

    @classmethod
    def after(cls, allowed_s: float) -> Deadline:
        """Return a deadline ``allowed_s`` from now."""
        return cls(time.monotonic() + allowed_s, allowed_s)

    @property
    def remaining_s(self) -> float:
        """Seconds left; negative once it has passed."""
        return self.at_s - time.monotonic()

    def exceeded(self) -> DeadlineExceeded:
        """Return the error for a request that has missed it."""
        return DeadlineExceeded(
            f"no answer was ready within the {self.allowed_s:g} s that the request allowed"
        )


class CancelScope:
    """A block that can be ended from outside, by `cancel` or by a deadline.

    The block then raises the error passed to `cancel`, or DeadlineExceeded. Like asyncio.timeout(),
    but not a coroutine, which saves a noticeable part of a small request's time.
    """

    __slots__ = ("_before", "_deadline", "_error", "_task", "_timer")

    def __init__(self, deadline: Deadline | None = None) -> None:
        self._deadline = deadline
        self._error: Exception | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> CancelScope:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - only a task can wait
        self._task, self._before = task, task.cancelling()
        self.set_deadline(self._deadline)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.set_deadline(None)
        if self._error is None:
            return
        # A cancellation from elsewhere takes precedence.
        if self._task.uncancel() <= self._before and kind is asyncio.CancelledError:
            raise self._error from None

    def set_deadline(self, deadline: Deadline | None) -> None:
        """Set or, with None, remove the deadline."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._deadline = deadline
        if deadline is not None:
            remaining_s = max(deadline.remaining_s, 0.0)
            self._timer = asyncio.get_running_loop().call_later(remaining_s, self._late)

    def cancel(self, error: Exception) -> None:
        """End the block with ``error``, unless it is already ending."""
        if self._error is None:
            self._error = error
            self._task.cancel()

    def _late(self) -> None:
        assert self._deadline is not None  # noqa: S101 - the timer goes with it
        self.cancel(self._deadline.exceeded())


class ClientGone(Exception):
    """The client disconnected before its response was ready."""


@dataclass(slots=True)
class ComputeRequest:
    """One request for a computation.

    Attributes
    ----------
    operation
        None until the transport has read the request's head, if that names it.
    counts_receiving
        Whether ``deadline`` includes receiving the body, as it does if the client set it.
        Otherwise it starts again once the body has been received.
    submitted
        Called with the job's handle once it is queued.
    body_bytes
        The size of the body if that is known before it is received.
    """

    operation: Operation | None
    deadline: Deadline
    timings: Timings
    caller: Caller = ANYBODY
    counts_receiving: bool = True
    submitted: Callable[[JobHandle], None] | None = None
    body_bytes: int | None = None

    @property
    def owner(self) -> str:
        """The owner of stored tensors and regions that it names: its API key's name, or ""."""
        return self.caller.name


@dataclass(frozen=True, slots=True)
class Decoded:
    """A request's content except for its tensors' data.

    Attributes
    ----------
    fields
        The request's fields; tensors whose data is still to come are `blank`.
    regions
        The tensors, inputs and outputs, that are in shared memory.
    refuse
        Called before anything is computed; raises if the response could not be encoded.
    timeout_s
        The request's own time limit.
    notes
        Private to the transport.
    repeatable
        Whether requests with the same key differ in their tensors' data alone.
    """

    fields: Fields
    regions: Mapping[str, RegionPart] = field(default_factory=dict)
    refuse: Callable[[Request, Problem], None] | None = None
    timeout_s: float | None = None
    notes: Any = None
    repeatable: bool = True


def blank(shape: tuple[int, ...], dtype: DType, *, name: str) -> NDArray[Any]:
    """Return a stand-in for a tensor: it has the shape and dtype, but takes no memory."""
    try:
        return np.broadcast_to(np.empty((), dtype.numpy), shape)
    except ValueError:
        # More elements than NumPy can count.
        raise MalformedRequest(f"{name}: shape {shape} is too large") from None


def log_exchange(
    level: int, context: RequestContext, transport_fields: Mapping[str, str | int]
) -> None:
    """Log a finished exchange; ``transport_fields`` are the transport's own, such as the path."""
    access.log(level, ExchangeLine(context, transport_fields))


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
        # Not built from `fields`: this runs for every request and would slow small ones down.
        context = self._context
        key = f" key={context.owner}" if context.owner else ""
        fields = " ".join(
            [f"{name}={_quoted(value)}" for name, value in self._transport_fields.items()]
        )
        trace = f" trace_id={trace_id}" if (trace_id := context.trace_id) else ""
        stages = "".join(
            [f" {stage}_s={seconds:.6f}" for stage, seconds in context.timings.stages_s.items()]
        )
        return (
            f"request_id={_quoted(context.request_id)}{key} {fields} code={context.code} "
            f"received_bytes={context.received_bytes} sent_bytes={context.sent_bytes} "
            f"client={context.client}{trace} total_s={self._total_s:.6f}{stages}"
        )


def _quoted(value: str | int) -> str:
    if isinstance(value, int):
        return str(value)
    # A path or an id with spaces or quotes must not be able to forge other fields of the line.
    return value if value.isprintable() and not set(' "=') & set(value) else repr(value)
