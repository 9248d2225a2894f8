"""Messages between the hub and front ends in other processes; see `remote_hub` and `frontend`."""

from __future__ import annotations

from typing import Any, NamedTuple

from convgrad_service.engine.ipc.channel import Kinds
from convgrad_service.engine.ipc.heartbeat import Ping, Pong
from convgrad_service.engine.ipc.interning import Named
from convgrad_service.engine.scheduling.quotas import Caller
from convgrad_service.engine.status import Status
from convgrad_service.engine.telemetry.record import Record

__all__ = [
    "KINDS",
    "Ask",
    "Cancel",
    "Done",
    "Drain",
    "Enter",
    "Hold",
    "Leave",
    "Listens",
    "Locate",
    "PartDone",
    "Release",
    "Reply",
    "Reserve",
    "SubmitJob",
    "Welcome",
]


class Welcome(NamedTuple):
    """The first message to a front end."""

    status: Status
    limit_bytes: int
    pocket: tuple[int, int]


class Listens(NamedTuple):
    """A front end listens, on this port; or does not, for this reason."""

    port: int
    failure: str | None = None


class Drain(NamedTuple):
    """A front end is to finish what it has, and end."""


class Reserve(NamedTuple):
    """For a place. Regions are `RegionPart`, and in the reply `InRegion`, but as plain tuples: a
    class's name takes longer to read than the rest of a message."""

    number: int
    size_bytes: int
    text: bool
    regions: tuple[tuple[Any, ...], ...]


class Release(NamedTuple):
    number: int


class SubmitJob(NamedTuple):
    """A job, whose arrangement the hub was told before unless its text is there; see `InternTable`.

    Its regions, as plain tuples, are held already, or they are ``parts`` to be found now.
    """

    number: int
    named: Named
    cost: float
    tasks: int
    sums: bool
    base: int
    regions: tuple[tuple[Any, ...], ...]
    parts: tuple[tuple[Any, ...], ...]
    deadline_s: float
    lane: int = 0


class Cancel(NamedTuple):
    number: int


class Locate(NamedTuple):
    """For the place in the line of a job."""

    number: int
    job: int


class Enter(NamedTuple):
    """For a ticket of this caller's, which goes by the same number."""

    number: int
    caller: Caller


class Hold(NamedTuple):
    """Count so many bytes and FLOPs to a ticket."""

    number: int
    ticket: int
    size_bytes: int
    flops: int


class Leave(NamedTuple):
    """Give a ticket back."""

    ticket: int


class Ask(NamedTuple):
    """For a method of the hub that is awaited."""

    number: int
    method: str
    arguments: tuple[Any, ...]


class Done(NamedTuple):
    """To `SubmitJob`: how it was computed, and how long it waited."""

    number: int
    finished: tuple[Any, ...]
    waited_s: float


class PartDone(NamedTuple):
    """Of `SubmitJob`, one part is: how it was computed."""

    number: int
    part: int
    finished: tuple[Any, ...]


class Reply(NamedTuple):
    """To the request of this number: its value, or why there is none."""

    number: int
    value: Any = None
    error: BaseException | None = None
    cancelled: bool = False


KINDS = Kinds(
    SubmitJob,
    Reply,
    Record,
    Reserve,
    Release,
    Cancel,
    Ask,
    Status,
    Welcome,
    Listens,
    Drain,
    Done,
    Enter,
    Hold,
    Leave,
    PartDone,
    Locate,
    Ping,
    Pong,
)
