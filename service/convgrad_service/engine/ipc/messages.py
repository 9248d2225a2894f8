"""Messages between the hub and front ends in other processes; see `remote_hub` and `frontend`.

Nested named tuples are sent as plain tuples: pickling their class names would take longer than the
rest of the message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from convgrad_service.engine.ipc.channel import Interned, MessageTypes, Ping, Pong
from convgrad_service.engine.scheduling.quotas import Caller
from convgrad_service.engine.status import Status
from convgrad_service.engine.telemetry.record import Record

__all__ = [
    "TYPES",
    "AcquireTicket",
    "Cancel",
    "ChargeTicket",
    "Drain",
    "GetPosition",
    "Invoke",
    "JobDone",
    "Listening",
    "PartDone",
    "Release",
    "ReleaseTicket",
    "Reply",
    "Reserve",
    "SubmitJob",
    "Welcome",
]


class Welcome(NamedTuple):
    """The hub's first message; ``pocket`` is the offset and size of the front end's own memory."""

    status: Status
    limit_bytes: int
    pocket: tuple[int, int]


class Listening(NamedTuple):
    """The front end listens on ``port``, or cannot because of ``failure``."""

    port: int
    failure: str | None = None


class Drain(NamedTuple):
    """The front end is to finish its requests and exit."""


class Reserve(NamedTuple):
    """Reserve memory. ``regions`` are `RegionPart`; the reply holds `RegionSlice`."""

    number: int
    size_bytes: int
    text: bool
    regions: tuple[tuple[Any, ...], ...]


class Release(NamedTuple):
    """Release the lease that `Reserve` with this number has returned, or stop waiting for it."""

    number: int


class SubmitJob(NamedTuple):
    """Submit a `Job`, with its layout interned; ``parts`` are regions to be acquired for it."""

    number: int
    interned: Interned
    cost: float
    tasks: int
    sums: bool
    base: int
    regions: tuple[tuple[Any, ...], ...]
    parts: tuple[tuple[Any, ...], ...]
    deadline_s: float
    lane: int = 0


class Cancel(NamedTuple):
    """Cancel the job with this number."""

    number: int


class GetPosition(NamedTuple):
    """Get a job's position in the queue."""

    number: int
    job: int


class AcquireTicket(NamedTuple):
    """Acquire a quota ticket, which gets the number of this message."""

    number: int
    caller: Caller


class ChargeTicket(NamedTuple):
    """Charge bytes and FLOPs to a ticket."""

    number: int
    ticket: int
    size_bytes: int
    flops: int


class ReleaseTicket(NamedTuple):
    """Release a ticket."""

    ticket: int


class Invoke(NamedTuple):
    """Call a method of one of the hub's services; see `Engine.invoke`."""

    number: int
    service: str
    method: str
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]


class JobDone(NamedTuple):
    """The reply to `SubmitJob`: the `JobResult`, and how long the job waited."""

    number: int
    result: tuple[Any, ...]
    waited_s: float


class PartDone(NamedTuple):
    """The `JobResult` of one part of a job."""

    number: int
    part: int
    result: tuple[Any, ...]


class Reply(NamedTuple):
    """The reply to the message with this number."""

    number: int
    value: Any = None
    error: BaseException | None = None
    cancelled: bool = False


TYPES = MessageTypes(
    SubmitJob,
    Reply,
    Record,
    Reserve,
    Release,
    Cancel,
    Invoke,
    Status,
    Welcome,
    Listening,
    Drain,
    JobDone,
    AcquireTicket,
    ChargeTicket,
    ReleaseTicket,
    PartDone,
    GetPosition,
    Ping,
    Pong,
)
