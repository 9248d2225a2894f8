"""The messages between the processes of a server: hub and front ends, hub and workers.

`remote_hub` and `frontend`, `process_worker` and `worker` are the two ends. Nested named tuples are
sent as plain tuples: pickling their class names would take longer than the rest of the message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from convgrad.errors import ServiceError
from convgrad_service.engine.admission import Status
from convgrad_service.engine.ipc.channel import Interned, MessageTypes, Ping, Pong
from convgrad_service.engine.telemetry.record import Record

__all__ = [
    "Cancel",
    "Compiled",
    "Compiling",
    "Forget",
    "Hello",
    "NewRegion",
    "Probe",
    "ProbeResult",
    "RunTask",
]


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


class Hello(NamedTuple):
    """The worker is ready to compute ``slots`` jobs at a time.

    ``devices`` is the number of devices of this backend. With ``pins`` the arena's pages are
    registered with the device and must not be returned to the system.
    """

    backend: str
    slots: int
    devices: int
    pins: bool


NewRegion = tuple[int, bytes | None, int]
"""A region to be opened: its number, and what `RegionRegistry.extent` returns."""


class RunTask(NamedTuple):
    """One task: a `Job` with its layout interned, or one ``part`` of it.

    The files of ``new_regions`` have been sent before. A ``brief`` task is so short that the thread
    that receives it runs it before any other thread receives the next.
    """

    number: int
    interned: Interned
    base: int
    regions: tuple[tuple[Any, ...], ...]
    part: int | None
    new_regions: Sequence[NewRegion]
    brief: bool


class Cancel(NamedTuple):
    """Stop a task."""

    number: int


class Forget(NamedTuple):
    """Close a region: no job uses it any longer."""

    region: int


class Probe(NamedTuple):
    """Check that a device memory handle can be opened."""

    number: int
    handle: bytes
    size_bytes: int


class ProbeResult(NamedTuple):
    """The reply to `Probe`."""

    number: int
    error: ServiceError | None


class Compiling(NamedTuple):
    """Sent instead of a task's result: its kernels are being compiled; `Compiled` follows."""


class Compiled(NamedTuple):
    """The kernels are compiled and the task can be sent again, or they cannot be compiled."""

    error: BaseException | None
