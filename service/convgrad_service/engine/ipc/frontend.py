"""A front end in another process, as the hub sees it.

It is given a pocket: a part of the arena from which it leases small places itself, so that a small
request is one message there and one back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from convgrad.errors import Overloaded
from convgrad_service.engine.hub import Hub
from convgrad_service.engine.ipc.channel import Channel
from convgrad_service.engine.ipc.heartbeat import Heartbeat, Ping, Pong
from convgrad_service.engine.ipc.messages import (
    KINDS,
    Ask,
    Cancel,
    Done,
    Drain,
    Enter,
    Hold,
    Leave,
    Listens,
    Locate,
    PartDone,
    Release,
    Reply,
    Reserve,
    SubmitJob,
    Welcome,
)
from convgrad_service.engine.memory.lease import Lease
from convgrad_service.engine.memory.tensor_layout import PackedTensorLayout, TensorLayout
from convgrad_service.engine.scheduling.partition import TaskGroup
from convgrad_service.engine.scheduling.quotas import Entered
from convgrad_service.engine.scheduling.scheduler import Task
from convgrad_service.engine.shm.registry import InRegion, RegionPart
from convgrad_service.engine.telemetry.record import Record
from convgrad_service.engine.workers.execute import Finished, Job
from convgrad_service.problems.base import Lane

__all__ = ["FrontEnd"]

POCKET_BYTES = 4 * 2**20


class FrontEnd:
    """One front end, as the hub sees it. What it holds goes back when its process ends."""

    def __init__(self, hub: Hub, *, listens: Callable[[Listens], None]) -> None:
        self._hub, self._listens = hub, listens
        self._channel: Channel | None = None
        self._leases: dict[int, asyncio.Future[Lease]] = {}
        self._tasks: dict[int, Task | TaskGroup[Task]] = {}
        self._arrangements: dict[int, TensorLayout | PackedTensorLayout] = {}
        self._tickets: dict[int, Entered] = {}
        self._heartbeat = Heartbeat()
        self._is_listening = False

    async def serve(self, channel_end: Any) -> None:
        """Welcome it, and return once its end of the channel has closed and it holds nothing."""
        gone = asyncio.Event()
        pocket = await self._pocket()
        try:
            self._channel = await Channel.open(channel_end, self._received, gone.set, KINDS)
            self._hub.watchers.append(self._channel.tell)
            place = (0, 0) if pocket is None else (pocket.offset, pocket.size_bytes)
            self._channel.tell(Welcome(self._hub.status, self._hub.limit_bytes, place))
            await gone.wait()
            self._hub.watchers.remove(self._channel.tell)
            for task in list(self._tasks.values()):
                self._hub.cancel(task)
            # A worker may still write to what it held.
            await asyncio.gather(
                *(task.done for task in self._tasks.values()), return_exceptions=True
            )
        finally:
            for lease in self._leases.values():
                _leave(lease)
            for ticket in self._tickets.values():
                ticket.leave()
            if pocket is not None:
                pocket.release()

    async def _pocket(self) -> Lease | None:
        try:
            return await self._hub.reserve(min(POCKET_BYTES, self._hub.limit_bytes // 16))
        except Overloaded:
            return None  # requests hold all there is; then it asks for each place

    def drain(self) -> None:
        """Tell it to finish."""
        if self._channel is not None:
            self._channel.tell(Drain())

    def is_silent(self) -> bool:
        """Ask whether it is alive; whether it has missed too many such questions."""
        if self._channel is None or not self._is_listening:
            return False
        self._channel.tell(Ping())
        return self._heartbeat.missed()

    def _received(self, message: Any) -> None:
        self._HANDLERS[type(message)](self, message)

    def _announced(self, message: Listens) -> None:
        self._is_listening = True
        self._listens(message)

    def _reserve(self, message: Reserve) -> None:
        try:
            lease = self._hub.reserve(
                message.size_bytes,
                text=message.text,
                regions=[RegionPart(*part) for part in message.regions],
            )
        except Exception as error:  # noqa: BLE001 - the front end raises it
            self._tell(Reply(message.number, error=error))
            return
        self._leases[message.number] = lease
        self._reply_when_done(message.number, lease, _granted)

    def _release(self, message: Release) -> None:
        if (lease := self._leases.pop(message.number, None)) is not None:
            _leave(lease)

    def _compute(self, message: SubmitJob) -> None:
        slot, text = message.named
        if text is not None:
            self._arrangements[slot] = PackedTensorLayout(text, message.cost)

        def told(part: int, finished: Finished) -> None:
            self._tell(PartDone(message.number, part, tuple(finished)))

        regions = tuple(InRegion(*place) for place in message.regions)
        found: tuple[InRegion, ...] = ()
        try:
            if message.parts:
                found = self._hub.regions.use([RegionPart(*part) for part in message.parts])
                if (finished := self._run_inline(message, found)) is not None:
                    self._done(message.number, finished, 0.0)
                    self._hub.regions.release(found)
                    return
            layout, tasks = self._arrangements[slot], (message.tasks, message.sums)
            lane = Lane(message.lane)
            job = Job(layout, message.base, regions or found, *tasks, lane)
            task = self._hub.schedule.submit(job, message.deadline_s, told)
        except Exception as error:  # noqa: BLE001 - the front end raises it
            self._hub.regions.release(found)
            self._tell(Reply(message.number, error=error))
            return
        self._tasks[message.number] = task
        task.done.add_done_callback(partial(self._computed, message.number, task))
        if found:
            task.done.add_done_callback(lambda _: self._hub.regions.release(found))
            task.done.add_done_callback(partial(self._learn, slot))

    def _run_inline(self, message: SubmitJob, found: tuple[InRegion, ...]) -> Finished | None:
        """How a small job was computed here: the front end would have, but has no regions."""
        here, slot = self._hub.inline_executor, message.named[0]
        if here is None or time.monotonic() >= message.deadline_s:
            return None  # of a deadline that has passed the schedule says so
        layout = self._arrangements[slot] = self._arrangements[slot].unpacked()
        return here.computed(layout, message.base, found)

    def _learn(self, slot: int, done: asyncio.Future[Finished]) -> None:
        here, layout = self._hub.inline_executor, self._arrangements[slot]
        if here is None or isinstance(layout, PackedTensorLayout):
            return
        if not done.cancelled() and done.exception() is None:
            here.learn(layout, done.result().compute_s)

    def _computed(
        self, number: int, task: Task | TaskGroup[Task], done: asyncio.Future[Finished]
    ) -> None:
        del self._tasks[number]
        if done.cancelled():
            self._tell(Reply(number, cancelled=True))
        elif (error := done.exception()) is not None:
            self._tell(Reply(number, error=error))
        else:
            self._done(number, done.result(), task.waited_s or 0.0)

    def _done(self, number: int, finished: Finished, waited_s: float) -> None:
        assert self._channel is not None  # noqa: S101
        self._channel.tell_now(Done(number, tuple(finished), waited_s))

    def _cancel(self, message: Cancel) -> None:
        if (task := self._tasks.get(message.number)) is not None:
            self._hub.cancel(task)

    def _enter(self, message: Enter) -> None:
        try:
            self._tickets[message.number] = self._hub.quotas.enter(message.caller)
        except Exception as error:  # noqa: BLE001 - the front end raises it
            self._tell(Reply(message.number, error=error))
        else:
            self._tell(Reply(message.number))

    def _hold(self, message: Hold) -> None:
        try:
            self._tickets[message.ticket].count(message.size_bytes, message.flops)
        except Exception as error:  # noqa: BLE001 - the front end raises it
            self._tell(Reply(message.number, error=error))
        else:
            self._tell(Reply(message.number))

    def _left(self, message: Leave) -> None:
        # One that was refused as its caller left is not there.
        if (ticket := self._tickets.pop(message.ticket, None)) is not None:
            ticket.leave()

    def _locate(self, message: Locate) -> None:
        task = self._tasks.get(message.job)
        position = None if task is None else self._hub.schedule.position(task)
        self._tell(Reply(message.number, position))

    def _ask(self, message: Ask) -> None:
        asked = asyncio.ensure_future(getattr(self._hub, message.method)(*message.arguments))
        self._reply_when_done(message.number, asked, lambda value: value)

    def _reply_when_done(
        self, number: int, future: asyncio.Future[Any], value_of: Callable[[Any], Any]
    ) -> None:
        def reply(done: asyncio.Future[Any]) -> None:
            if done.cancelled():
                self._tell(Reply(number, cancelled=True))
            elif (error := done.exception()) is not None:
                self._tell(Reply(number, error=error))
            else:
                self._tell(Reply(number, value_of(done.result())))

        if future.done():
            reply(future)
        else:
            future.add_done_callback(reply)

    def _tell(self, message: Reply | PartDone) -> None:
        assert self._channel is not None  # noqa: S101
        self._channel.tell(message)

    _HANDLERS: Mapping[type, Callable[..., None]] = {
        Reserve: _reserve,
        Release: _release,
        SubmitJob: _compute,
        Cancel: _cancel,
        Enter: _enter,
        Hold: _hold,
        Leave: _left,
        Ask: _ask,
        Locate: _locate,
        Record: lambda self, record: self._hub.observe(record),
        Listens: _announced,
        Pong: lambda self, _: self._heartbeat.heard(),
    }


def _granted(lease: Lease) -> tuple[int, list[Any]]:
    return lease.offset, [tuple(place) for place in lease.regions]


def _leave(lease: asyncio.Future[Lease]) -> None:
    """Give a lease back, or leave the line for it."""
    if lease.done():
        if not lease.cancelled() and lease.exception() is None:
            lease.result().release()
    else:
        lease.cancel()
