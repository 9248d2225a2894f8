"""A front end in another process, as the hub sees it; `remote_hub` is the other end.

The front end gets a local pool: a part of the arena from which it leases small blocks itself, so
that a small request takes one message to the hub and one back.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from convgrad.errors import Overloaded
from convgrad_service.engine.hub import Hub, Status
from convgrad_service.engine.ipc.channel import (
    MAX_MISSED,
    Channel,
    Heartbeat,
    Interned,
    Ping,
    Pong,
)
from convgrad_service.engine.memory.arena import Lease
from convgrad_service.engine.memory.tensor_layout import TensorLayout, unpack_layout
from convgrad_service.engine.scheduling.job import Job, JobResult, TaskGroup
from convgrad_service.engine.scheduling.quotas import Caller, CountedTicket
from convgrad_service.engine.scheduling.scheduler import Task
from convgrad_service.engine.shm.registry import RegionPart, RegionSlice
from convgrad_service.engine.telemetry.record import Record
from convgrad_service.engine.workers.child_process import START_S

LOCAL_POOL_BYTES = 4 * 2**20
_LOCAL_POOL = -1  # its number, as a lease


class Welcome(NamedTuple):
    """The hub's first message; ``local_pool`` is the offset and size of the front end's pool."""

    status: Status
    limit_bytes: int
    local_pool: tuple[int, int]


class Drain(NamedTuple):
    """The front end is to finish its requests and exit."""


class SubmitJob(NamedTuple):
    """Submit a `Job`, whose layout is interned."""

    number: int
    interned: Interned
    base: int
    regions: tuple[RegionSlice, ...]
    tasks: int
    deadline_s: float


class Call(NamedTuple):
    """Call a method of the `FrontEnd` (service "") or of a hub's service, see `Hub.invoke`.

    With ``number`` -1 there is no `Reply`.
    """

    number: int
    service: str
    method: str
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]


class Reply(NamedTuple):
    """The reply to the message with this number; to `SubmitJob` a `JobResult` and the wait."""

    number: int
    value: Any = None
    error: BaseException | None = None
    cancelled: bool = False
    waited_s: float | None = None


class FrontEnd:
    """One front end. What it holds is released when its process ends.

    ``on_listening`` is called with its port or, if it cannot listen, with the reason.
    """

    def __init__(self, hub: Hub, *, on_listening: Callable[[int, str | None], None]) -> None:
        self._hub, self._on_listening = hub, on_listening
        self._channel: Channel | None = None
        self._is_listening, self._starting_s = False, 0.0
        self._heartbeat = Heartbeat()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._held: dict[int, Lease | CountedTicket] = {}
        self._tasks: dict[int, Task | TaskGroup[Task]] = {}
        self._layouts: dict[int, TensorLayout] = {}

    async def serve(self, channel_end: Any) -> None:
        """Serve the front end until its end of the channel is closed."""
        gone = asyncio.Event()
        local_pool: tuple[int, int] = 0, 0
        # If the arena is full, this front end reserves every block through the hub.
        with contextlib.suppress(Overloaded):
            size_bytes = min(LOCAL_POOL_BYTES, self._hub.limit_bytes // 16)
            local_pool = (await self.reserve(_LOCAL_POOL, size_bytes))[0], size_bytes
        try:
            self._channel = await Channel.open(channel_end, self._received, gone.set)
            self._hub.watchers.append(self._send)
            self._send(Welcome(self._hub.status, self._hub.limit_bytes, local_pool))
            await gone.wait()
        finally:
            if self._channel is not None:
                self._hub.watchers.remove(self._send)
                self._channel.close()
            self._hub.scheduler.lines.pop(self, None)
            tasks = list(self._tasks.values())
            for task in tasks:
                self._hub.cancel(task)
            # Until then, workers may still write to its memory.
            done = asyncio.gather(*(task.done for task in tasks), return_exceptions=True)
            done.add_done_callback(lambda _: self._release_all())

    def _release_all(self) -> None:
        for number in [*self._calls, *self._held]:
            self.release(number)

    def drain(self) -> None:
        """Ask it to finish its requests and exit."""
        if self._channel is not None:
            self._channel.send(Drain())

    def check(self, beat_s: float) -> str | None:
        """Ping it, every ``beat_s``; return why it must be killed if it is silent or hangs."""
        if not self._is_listening:
            # It answers nothing while it imports what it needs.
            self._starting_s += beat_s
            return f"not ready within {START_S} s" if self._starting_s > START_S else None
        self._send(Ping())
        return (
            f"no heartbeat for {MAX_MISSED * beat_s:g} s" if self._heartbeat.count_ping() else None
        )

    def _received(self, message: Any) -> None:
        if isinstance(message, Record):
            self._hub.observe(message)
        elif isinstance(message, Pong):
            self._heartbeat.answered()
        else:
            try:
                if isinstance(message, SubmitJob):
                    self._submit(message)
                else:
                    self._call(message)
            except Exception as error:  # the front end raises it
                if message.number < 0:
                    raise
                self._send(Reply(message.number, error=error))

    def _call(self, call: Call) -> None:
        service = self._hub.service(call.service) if call.service else self
        result = getattr(service, call.method)(*call.arguments, **call.options)
        if call.number < 0:
            return
        if not inspect.isawaitable(result):
            self._send(Reply(call.number, result))
            return
        future = self._calls[call.number] = asyncio.ensure_future(result)
        future.add_done_callback(lambda _: self._calls.pop(call.number))
        future.add_done_callback(partial(self._reply, call.number))

    def listening(self, port: int, failure: str | None) -> None:
        """Note that it listens on ``port``, or cannot because of ``failure``."""
        self._is_listening = True
        self._on_listening(port, failure)

    async def reserve(
        self, number: int, size_bytes: int, text: bool = False, regions: Sequence[RegionPart] = ()
    ) -> tuple[int, tuple[RegionSlice, ...]]:
        """Return the offset and regions of a new lease, known by ``number``; see `Hub.reserve`."""
        lease = await self._hub.reserve(size_bytes, text=text, regions=regions)
        self._held[number] = lease
        return lease.offset, lease.regions

    def release(self, number: int) -> None:
        """Release a lease or ticket, or leave the queue for it; it is absent if it was refused."""
        call = self._calls.get(number)
        if (call is None or not call.cancel()) and number in self._held:
            self._held.pop(number).release()

    def report_waiting(self, length: int) -> None:
        """See `Hub.report_waiting`."""
        self._hub.scheduler.lines[self] = length

    def acquire_ticket(self, number: int, caller: Caller) -> None:
        """Acquire a quota ticket, known by ``number``."""
        self._held[number] = self._hub.quotas.acquire(caller)

    async def charge_ticket(self, number: int, size_bytes: int, flops: int) -> None:
        """See `Ticket.charge`."""
        ticket = self._held[number]
        assert isinstance(ticket, CountedTicket)  # noqa: S101
        await ticket.charge(size_bytes, flops)

    def cancel_job(self, number: int) -> None:
        """Cancel a job unless it is done."""
        if (task := self._tasks.get(number)) is not None:
            self._hub.cancel(task)

    def queue_position(self, number: int) -> int | None:
        """See `Hub.queue_position`."""
        task = self._tasks.get(number)
        return None if task is None else self._hub.scheduler.position(task)

    def _submit(self, message: SubmitJob) -> None:
        number = message.number
        slot, packed = message.interned
        if packed is not None:
            self._layouts[slot] = unpack_layout(packed)
        job = Job(self._layouts[slot], message.base, message.regions, message.tasks)
        task = self._hub.scheduler.submit(job, message.deadline_s)
        self._tasks[number] = task
        task.done.add_done_callback(partial(self._job_done, number, task))

    def _job_done(
        self, number: int, task: Task | TaskGroup[Task], done: asyncio.Future[JobResult]
    ) -> None:
        del self._tasks[number]
        self._reply(number, done, task.waited_s or 0.0)

    def _reply(self, number: int, done: asyncio.Future[Any], waited_s: float | None = None) -> None:
        if done.cancelled():
            reply = Reply(number, cancelled=True)
        elif (error := done.exception()) is not None:
            reply = Reply(number, error=error)
        else:
            reply = Reply(number, done.result(), waited_s=waited_s)
        assert self._channel is not None  # noqa: S101
        self._channel.send_now(reply)

    def _send(self, message: Any) -> None:
        assert self._channel is not None  # noqa: S101
        self._channel.send(message)
