"""The hub as front ends in other processes see it; `frontend` is the other end."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from convgrad_service.engine.hub import Status
from convgrad_service.engine.ipc.channel import Channel, InternTable, Ping, Pong
from convgrad_service.engine.ipc.frontend import (
    Call,
    Drain,
    Reply,
    SubmitJob,
    Welcome,
)
from convgrad_service.engine.memory.arena import Arena, FreeList, Lease, LeasePool
from convgrad_service.engine.options import InlineBackend
from convgrad_service.engine.scheduling.job import Job, JobHandle, JobResult
from convgrad_service.engine.scheduling.quotas import NO_LIMITS, Caller, Ticket
from convgrad_service.engine.shm.registry import RegionPart
from convgrad_service.engine.telemetry.record import Record
from convgrad_service.engine.workers.inline_executor import InlineExecutor

# Records of finished requests are sent with the next message, or after this time.
_RECORD_DELAY_S = 0.05
# A front end only knows whether the hub's queue is full, not how much room there is.
_ASSUMED_ROOM = 16
# The largest block taken from the local pool, so that some sixty fit.
_LOCAL_BLOCK_BYTES = 64 * 1024


@dataclass(slots=True)
class _RemoteJob:
    """A `JobHandle`. The hub reports only at the end how long the job waited."""

    number: int
    lease: Lease
    done: asyncio.Future[JobResult]
    waited_s: float | None = None


class _RemoteTicket:
    """A `Ticket` that is counted in the hub."""

    def __init__(self, hub: RemoteHub, number: int) -> None:
        self._hub, self._number = hub, number

    async def charge(self, size_bytes: int, flops: int = 0) -> None:
        await self._hub.invoke("", "charge_ticket", (self._number, size_bytes, flops), {})

    def release(self) -> None:
        self._hub.notify("release", self._number)


class RemoteHub:
    """What `Hub` offers to front ends, forwarded to the hub through a channel.

    ``drained`` is called when the hub asks this process to finish, ``lost`` when the hub is gone.
    """

    def __init__(
        self,
        arena: Arena,
        *,
        drained: Callable[[], None],
        lost: Callable[[], None],
        inline_backend: InlineBackend | None = None,
        heartbeat_timeout_s: float = math.inf,
    ) -> None:
        self.arena = arena
        self.inline_executor = (
            None if inline_backend is None else InlineExecutor(self, inline_backend)
        )
        self._status = Status("", ready=False)
        self._heartbeat_timeout_s, self._heard_s = heartbeat_timeout_s, time.monotonic()
        self.limit_bytes = 0
        self._drained, self._lost = drained, lost
        self._numbers = itertools.count()
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._jobs: dict[int, _RemoteJob] = {}
        self._local_pool = LeasePool(FreeList(0, 0))
        self._layouts = InternTable()
        self._recording: asyncio.TimerHandle | None = None
        self._line, self._reported_line = 0, 0
        self._channel: Channel
        self._welcomed: asyncio.Future[None]

    async def open(self, channel_end: Any) -> None:
        """Connect, and return once the hub has a backend."""
        self._welcomed = asyncio.get_running_loop().create_future()
        self._channel = await Channel.open(channel_end, self._received, self._lost)
        await self._welcomed

    @property
    def status(self) -> Status:
        if time.monotonic() - self._heard_s > self._heartbeat_timeout_s:
            silent = f"the engine has been silent for {self._heartbeat_timeout_s:g} s"
            return self._status._replace(dead=silent)
        return self._status

    @property
    def backend(self) -> str:
        return self._status.backend

    @property
    def room(self) -> int:
        return _ASSUMED_ROOM if self._status.overload is None else 0

    @property
    def slots(self) -> int:
        return self._status.slots

    @property
    def leaving(self) -> bool:
        return self._status.leaving

    @property
    def timing(self) -> bool:
        return self.status.timing

    def admit(self) -> None:
        self._status.admit()

    def notify(self, method: str, *arguments: Any) -> None:
        """Call a method of the `FrontEnd` in the hub that has no reply."""
        self._channel.send(Call(-1, "", method, arguments, {}))

    async def invoke(
        self, service: str, method: str, arguments: tuple[Any, ...], options: Mapping[str, Any]
    ) -> Any:
        return await self._invoke(next(self._numbers), service, method, arguments, options)

    def _invoke(
        self,
        number: int,
        service: str,
        method: str,
        arguments: tuple[Any, ...],
        options: Mapping[str, Any],
    ) -> asyncio.Future[Any]:
        replied = self._pending[number] = asyncio.get_running_loop().create_future()
        replied.add_done_callback(lambda _: self._pending.pop(number, None))
        self._channel.send(Call(number, service, method, arguments, options))
        return replied

    async def acquire_ticket(self, caller: Caller) -> Ticket | None:
        if caller.limits == NO_LIMITS:
            return None
        number = next(self._numbers)
        ticket = _RemoteTicket(self, number)
        try:
            await self._invoke(number, "", "acquire_ticket", (number, caller), {})
        except asyncio.CancelledError:
            ticket.release()
            raise
        return ticket

    async def reserve(
        self, size_bytes: int, *, text: bool = False, regions: Sequence[RegionPart] = ()
    ) -> Lease:
        # Only the hub can acquire regions.
        if size_bytes <= _LOCAL_BLOCK_BYTES and not text and not regions:
            lease = self._local_pool.try_reserve(size_bytes)
            if lease is not None:
                return lease
        number = next(self._numbers)
        arguments = number, size_bytes, text, regions

        def release(_: object) -> None:
            self.notify("release", number)

        try:
            offset, slices = await self._invoke(number, "", "reserve", arguments, {})
        except asyncio.CancelledError:
            release(None)
            raise
        lease = Lease(offset, size_bytes, release)
        lease.regions = slices
        return lease

    def submit(self, lease: Lease, job: Job, deadline_s: float) -> JobHandle:
        number, done = next(self._numbers), asyncio.get_running_loop().create_future()
        handle = self._jobs[number] = _RemoteJob(number, lease, done)
        lease.retain()
        layout, base, regions, tasks = job
        interned = self._layouts.intern(layout.packed)
        self._channel.send_now(SubmitJob(number, interned, base, regions, tasks, deadline_s))
        return handle

    def cancel(self, handle: JobHandle) -> None:
        assert isinstance(handle, _RemoteJob)  # noqa: S101
        self.notify("cancel_job", handle.number)

    async def queue_position(self, handle: JobHandle) -> int | None:
        assert isinstance(handle, _RemoteJob)  # noqa: S101
        position: int | None = await self.invoke("", "queue_position", (handle.number,), {})
        return position

    def report_waiting(self, length: int) -> None:
        self._line = length
        self._send_records_soon()

    def observe(self, record: Record) -> None:
        self._channel.send_lazily(record)
        self._send_records_soon()

    def _send_records_soon(self) -> None:
        if self._recording is None:
            loop = asyncio.get_running_loop()
            self._recording = loop.call_later(_RECORD_DELAY_S, self._send_records)

    def _send_records(self) -> None:
        self._recording = None
        if self._line != self._reported_line:
            self._reported_line = self._line
            self.notify("report_waiting", self._line)
        self._channel.flush()

    def _received(self, message: Any) -> None:
        if isinstance(message, Reply):
            self._replied(message)
        elif isinstance(message, Ping):
            self._heard_s = time.monotonic()
            self._channel.send(Pong())
        elif isinstance(message, Status):
            self._update_status(message)
        elif isinstance(message, Drain):
            self._drained()
        else:
            assert isinstance(message, Welcome)  # noqa: S101
            self.limit_bytes = message.limit_bytes
            self._local_pool = LeasePool(FreeList(*message.local_pool))
            self._update_status(message.status)

    def _update_status(self, status: Status) -> None:
        self._status, self._heard_s = status, time.monotonic()
        if status.backend and not self._welcomed.done():
            self._welcomed.set_result(None)

    def _replied(self, reply: Reply) -> None:
        waiting: asyncio.Future[Any] | None
        if (job := self._jobs.pop(reply.number, None)) is not None:
            job.lease.release()
            job.waited_s = reply.waited_s
            waiting = job.done
        else:
            waiting = self._pending.get(reply.number)
        if waiting is None or waiting.done():
            return  # the caller was cancelled
        if reply.error is not None:
            waiting.set_exception(reply.error)
            waiting.exception()  # mark it as retrieved: the caller may be gone
        elif reply.cancelled:
            waiting.cancel()
        else:
            waiting.set_result(reply.value)
