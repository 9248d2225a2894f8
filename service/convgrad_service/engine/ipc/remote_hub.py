"""The hub as front ends in other processes have it: an `Engine`, asked through a channel."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from convgrad_service.engine.hub import JobHandle
from convgrad_service.engine.ipc.channel import Channel
from convgrad_service.engine.ipc.heartbeat import Ping, Pong
from convgrad_service.engine.ipc.interning import InternTable
from convgrad_service.engine.ipc.messages import (
    KINDS,
    Ask,
    Cancel,
    Done,
    Drain,
    Enter,
    Hold,
    Leave,
    Locate,
    PartDone,
    Release,
    Reply,
    Reserve,
    SubmitJob,
    Welcome,
)
from convgrad_service.engine.memory.arena import Arena
from convgrad_service.engine.memory.free_list import FreeList
from convgrad_service.engine.memory.lease import Lease
from convgrad_service.engine.scheduling.partition import OnPartDone
from convgrad_service.engine.scheduling.quotas import Caller, Ticket
from convgrad_service.engine.shm.registry import InRegion, RegionInfo, RegionPart
from convgrad_service.engine.status import Status
from convgrad_service.engine.telemetry.record import Record
from convgrad_service.engine.telemetry.statistics import OperationStatistics
from convgrad_service.engine.workers.execute import Finished, Job
from convgrad_service.engine.workers.inline_executor import InlineBackend, InlineExecutor

__all__ = ["RemoteHub"]

# What was observed may be told as late as this.
_OBSERVE_S = 0.05
# What is known of the hub's line is whether it is full.
_SOME_ROOM = 16
# Of a pocket, what one request may take, so that some sixty fit.
_SMALL_BYTES = 64 * 1024


class _RemoteRunning:
    """See `JobHandle`. The hub says with the answer how long the job waited."""

    def __init__(self, number: int, done: asyncio.Future[Finished]) -> None:
        self.number, self.done = number, done
        self.waited_s: float | None = None


class _RemoteTicket:
    """See `Ticket`; the hub counts."""

    def __init__(self, hub: RemoteHub, number: int) -> None:
        self._hub, self._number = hub, number

    async def hold(self, size_bytes: int, flops: int = 0) -> None:
        await self._hub.ask_with(lambda number: Hold(number, self._number, size_bytes, flops))

    def leave(self) -> None:
        self._hub.tell(Leave(self._number))


class RemoteHub:
    """See `Engine`: the hub, asked through a channel.

    ``drained`` is called when the hub wants this process to finish, ``lost`` when it has ended.
    """

    def __init__(
        self,
        arena: Arena,
        *,
        drained: Callable[[], None],
        lost: Callable[[], None],
        beside: InlineBackend | None = None,
        heartbeat_timeout_s: float = math.inf,
    ) -> None:
        self.arena = arena
        self.inline_executor = None if beside is None else InlineExecutor(self, beside)
        self._status = Status("", ready=False)
        self._heartbeat_timeout_s, self._heard_s = heartbeat_timeout_s, time.monotonic()
        self.limit_bytes = 0
        self._drained, self._lost = drained, lost
        self._numbers = itertools.count()
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._computing: dict[int, tuple[_RemoteRunning, Lease]] = {}
        self._told: dict[int, OnPartDone] = {}
        self._pocket = FreeList(0, 0)
        self._named = InternTable()
        self._observing: asyncio.TimerHandle | None = None
        self._channel: Channel
        self._welcomed: asyncio.Future[None]

    async def open(self, channel_end: Any) -> None:
        """Return once the hub has said welcome and knows its backend."""
        self._welcomed = asyncio.get_running_loop().create_future()
        self._channel = await Channel.open(channel_end, self._received, self._lost, KINDS)
        await self._welcomed

    @property
    def status(self) -> Status:
        """See `Engine.status`; a hub that is silent cannot be relied on."""
        if time.monotonic() - self._heard_s > self._heartbeat_timeout_s:
            silent = f"the engine has been silent for {self._heartbeat_timeout_s:g} s"
            return self._status._replace(dead=silent)
        return self._status

    @property
    def backend(self) -> str:
        """See `Engine.backend`."""
        return self._status.backend

    @property
    def room(self) -> int:
        """See `Engine.room`."""
        return _SOME_ROOM if self._status.overload is None else 0

    def admit(self) -> None:
        """See `Engine.admit`."""
        self._status.admit()

    def tell(self, message: Any) -> None:
        """Send the hub a message that it does not answer."""
        self._channel.tell(message)

    async def enter(self, caller: Caller) -> Ticket:
        """See `Engine.enter`."""
        number, replied = self._next()
        ticket = _RemoteTicket(self, number)
        self.tell(Enter(number, caller))
        try:
            await replied
        except asyncio.CancelledError:
            ticket.leave()
            raise
        return ticket

    def reserve(
        self, size_bytes: int, *, text: bool = False, regions: Sequence[RegionPart] = ()
    ) -> asyncio.Future[Lease]:
        """See `Engine.reserve`."""
        loop = asyncio.get_running_loop()
        leased: asyncio.Future[Lease] = loop.create_future()
        if not (text or regions) and (lease := self.take(size_bytes)) is not None:
            leased.set_result(lease)
            return leased
        number, replied = self._next()
        self.tell(Reserve(number, size_bytes, text, tuple(map(tuple, regions))))

        def granted(reply: asyncio.Future[tuple[int, Sequence[tuple[int, int]]]]) -> None:
            release: Callable[[Lease], None] = lambda _: self.tell(Release(number))  # noqa: E731
            if leased.cancelled():
                return
            if (error := reply.exception()) is not None:
                leased.set_exception(error)
            else:
                offset, places = reply.result()
                lease = Lease(offset, size_bytes, release)
                lease.regions = tuple(InRegion(*place) for place in places)
                leased.set_result(lease)

        def left(_: asyncio.Future[Lease]) -> None:
            if leased.cancelled():
                self.tell(Release(number))

        replied.add_done_callback(granted)
        leased.add_done_callback(left)
        return leased

    def take(self, size_bytes: int, regions: Sequence[RegionPart] = ()) -> Lease | None:
        """See `Engine.take`: out of the pocket. Regions are found with the job."""
        if size_bytes > _SMALL_BYTES or (offset := self._pocket.take(size_bytes)) is None:
            return None
        lease = Lease(offset, size_bytes, self._back_to_pocket)
        lease.parts = tuple(regions)
        return lease

    def _back_to_pocket(self, lease: Lease) -> None:
        self._pocket.give(lease.offset, lease.size_bytes)

    def compute(
        self, lease: Lease, job: Job, deadline_s: float, told: OnPartDone | None = None
    ) -> JobHandle:
        """See `Engine.compute`."""
        number = next(self._numbers)
        running = _RemoteRunning(number, asyncio.get_running_loop().create_future())
        lease.retain()
        self._computing[number] = running, lease
        if told is not None:
            self._told[number] = told
        named = self._named.name(job.layout.text)
        regions = tuple(map(tuple, job.regions))
        parts = tuple(map(tuple, lease.parts))
        size = job.cost, job.tasks, job.sums
        self._channel.tell_now(
            SubmitJob(number, named, *size, job.base, regions, parts, deadline_s, int(job.lane))
        )
        return running

    def cancel(self, running: JobHandle) -> None:
        """See `Engine.cancel`."""
        assert isinstance(running, _RemoteRunning)  # noqa: S101
        self.tell(Cancel(running.number))

    @property
    def timing(self) -> bool:
        """See `Status.timing`."""
        return self.status.timing

    async def position(self, running: JobHandle) -> int | None:
        """See `Engine.position`."""
        assert isinstance(running, _RemoteRunning)  # noqa: S101
        job = running.number
        found: int | None = await self.ask_with(lambda number: Locate(number, job))
        return found

    async def submitted(self, *arguments: Any) -> Any:
        """See `Engine.submitted`."""
        return await self._ask("submitted", *arguments)

    def observe(self, record: Record) -> None:
        """See `Engine.observe`: told with what is told next, or within a moment."""
        self._channel.tell(record, soon=False)
        if self._observing is None:
            self._observing = asyncio.get_running_loop().call_later(
                _OBSERVE_S, self._told_what_was_observed
            )

    def _told_what_was_observed(self) -> None:
        self._observing = None
        self._channel.flush()

    async def exposition(self) -> bytes:
        """See `Engine.exposition`."""
        text: bytes = await self._ask("exposition")
        return text

    async def statistics(self) -> Mapping[str, OperationStatistics]:
        """See `Engine.statistics`."""
        counts: Mapping[str, OperationStatistics] = await self._ask("statistics")
        return counts

    async def register_region(self, owner: str, info: RegionInfo) -> None:
        """See `Engine.register_region`."""
        await self._ask("register_region", owner, info)

    async def unregister_region(self, owner: str, name: str, on_device: bool) -> None:
        """See `Engine.unregister_region`."""
        await self._ask("unregister_region", owner, name, on_device)

    async def list_regions(self, owner: str, name: str, on_device: bool) -> list[RegionInfo]:
        """See `Engine.list_regions`."""
        listed: list[RegionInfo] = await self._ask("list_regions", owner, name, on_device)
        return listed

    async def stored(self, method: str, *arguments: Any) -> Any:
        """See `Engine.stored`."""
        return await self._ask("stored", method, *arguments)

    async def _ask(self, method: str, *arguments: Any) -> Any:
        return await self.ask_with(lambda number: Ask(number, method, arguments))

    async def ask_with(self, message: Callable[[int], Any]) -> Any:
        """Send what is made with a new number; the value that the hub replies to it."""
        number, replied = self._next()
        self.tell(message(number))
        return await replied

    def _next(self) -> tuple[int, asyncio.Future[Any]]:
        number = next(self._numbers)
        replied = self._pending[number] = asyncio.get_running_loop().create_future()
        replied.add_done_callback(partial(self._forget, number))
        return number, replied

    def _forget(self, number: int, _: object) -> None:
        self._pending.pop(number, None)

    def _received(self, message: Any) -> None:
        if isinstance(message, Done):
            running = self._computed(message.number)
            running.waited_s = message.waited_s
            running.done.set_result(Finished(*message.finished))
        elif isinstance(message, Reply):
            self._replied(message)
        elif isinstance(message, PartDone):
            if (told := self._told.get(message.number)) is not None:
                told(message.part, Finished(*message.finished))
        elif isinstance(message, Ping):
            self._heard_s = time.monotonic()
            self._channel.tell(Pong())
        elif isinstance(message, Status):
            self._know(message)
        elif isinstance(message, Drain):
            self._drained()
        else:
            assert isinstance(message, Welcome)  # noqa: S101
            self.limit_bytes = message.limit_bytes
            self._pocket = FreeList(*message.pocket)
            self._know(message.status)

    def _know(self, status: Status) -> None:
        self._status, self._heard_s = status, time.monotonic()
        if status.backend and not self._welcomed.done():
            self._welcomed.set_result(None)

    def _computed(self, number: int) -> _RemoteRunning:
        """A job of which the hub has said how it ended."""
        running, lease = self._computing.pop(number)
        self._told.pop(number, None)
        lease.release()
        return running

    def _replied(self, message: Reply) -> None:
        if message.number in self._computing:
            running = self._computed(message.number)
            if message.cancelled:
                running.done.cancel()
            else:
                assert message.error is not None  # noqa: S101 - `Done` has all others
                running.done.set_exception(message.error)
                running.done.exception()  # whoever asked may have left
            return
        replied = self._pending.get(message.number)
        if replied is None or replied.done():
            return  # who asked has left
        if message.error is not None:
            replied.set_exception(message.error)
        elif message.cancelled:
            replied.cancel()
        else:
            replied.set_result(message.value)
