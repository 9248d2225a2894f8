"""Messages between the hub and front ends in other processes; see `remote_hub` and `frontend`.

Nested named tuples are sent as plain tuples: pickling their class names would take longer than the
rest of the message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from convgrad_service.engine.admission import Status
from convgrad_service.engine.ipc.channel import Interned, MessageTypes, Ping, Pong
from convgrad_service.engine.telemetry.record import Record


class Welcome(NamedTuple):
    """The hub's first message; ``pocket`` is the offset and size of the front end's own memory."""

    status: Status
    limit_bytes: int
    pocket: tuple[int, int]


class Drain(NamedTuple):
    """The front end is to finish its requests and exit."""


class SubmitJob(NamedTuple):
    """Submit a `Job`, whose layout is interned and whose other fields are the plain ``job``.

    ``parts`` are regions to be acquired for it.
    """

    number: int
    interned: Interned
    job: tuple[Any, ...]
    parts: tuple[tuple[Any, ...], ...]
    deadline_s: float


class Call(NamedTuple):
    """Call a method of the `FrontEnd` (service "") or of a hub's service, see `Engine.invoke`.

    With ``number`` -1 there is no `Reply`.
    """

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
    JobDone,
    PartDone,
    Call,
    Reply,
    Record,
    Status,
    Welcome,
    Drain,
    Ping,
    Pong,
)
