"""The messages between the hub and its workers; see `process_worker` and `worker`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from convgrad.errors import ServiceError
from convgrad_service.engine.ipc.channel import Interned

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
