"""The hub for front ends in other processes: an `Engine` there, and what answers it here.

A front end is given a pocket: a part of the arena from which it leases small places itself, so
that a small request is one message there and one back.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from convgrad_service.engine.arena import Arena
from convgrad_service.engine.channel import Channel, Kinds
from convgrad_service.engine.hub import Hub, Running, Status
from convgrad_service.engine.jobs import Finished, Job, PackedJob
from convgrad_service.engine.memory import Lease
from convgrad_service.engine.places import Places
from convgrad_service.engine.records import Record
from convgrad_service.engine.regions import InRegion, RegionInfo, RegionPart
from convgrad_service.engine.schedule import Task
from convgrad_service.engine.statistics import OperationStatistics

__all__ = ["Drain", "FrontEnd", "Listens", "RemoteHub"]

# What was observed may be told as late as this.
_OBSERVE_S = 0.05
POCKET_BYTES = 4 * 2**20
# Of a pocket, what one request may take, so that some sixty fit.
_SMALL_BYTES = 64 * 1024


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
    number: int
    size_bytes: int
    text: bool
    regions: Sequence[RegionPart]


class Release(NamedTuple):
    number: int


class Compute(NamedTuple):
    number: int
    job: PackedJob
    deadline_s: float


class Cancel(NamedTuple):
    number: int


class Ask(NamedTuple):
    """For a method of the hub that is awaited."""

    number: int
    method: str
    arguments: tuple[Any, ...]


class Done(NamedTuple):
    """To `Compute`: how it was computed, and how long it waited."""

    number: int
    finished: tuple[Any, ...]
    waited_s: float


class Reply(NamedTuple):
    """To the request of this number: its value, or why there is none."""

    number: int
    value: Any = None
    error: BaseException | None = None
    cancelled: bool = False


_KINDS = Kinds(
    Compute, Reply, Record, Reserve, Release, Cancel, Ask, Status, Welcome, Listens, Drain, Done
)


class FrontEnd:
    """One front end, as the hub sees it. What it holds goes back when its process ends."""

    def __init__(self, hub: Hub, *, listens: Callable[[Listens], None]) -> None:
        self._hub, self._listens = hub, listens
        self._channel: Channel | None = None
        self._leases: dict[int, asyncio.Future[Lease]] = {}
        self._tasks: dict[int, Task] = {}

    async def serve(self, channel_end: Any) -> None:
        """Welcome it, and return once its end of the channel has closed and it holds nothing."""
        gone = asyncio.Event()
        pocket = await self._hub.reserve(min(POCKET_BYTES, self._hub.limit_bytes // 16))
        try:
            self._channel = await Channel.open(channel_end, self._received, gone.set, _KINDS)
            self._hub.watchers.append(self._channel.tell)
            place = pocket.offset, pocket.size_bytes
            self._channel.tell(Welcome(self._hub.status, self._hub.limit_bytes, place))
            await gone.wait()
            self._hub.watchers.remove(self._channel.tell)
            for task in self._tasks.values():
                self._hub.cancel(task)
            # A worker may still write to what it held.
            await asyncio.gather(
                *(task.done for task in self._tasks.values()), return_exceptions=True
            )
        finally:
            for lease in self._leases.values():
                _leave(lease)
            pocket.release()

    def drain(self) -> None:
        """Tell it to finish."""
        if self._channel is not None:
            self._channel.tell(Drain())

    def _received(self, message: Any) -> None:
        self._HANDLERS[type(message)](self, message)

    def _reserve(self, message: Reserve) -> None:
        try:
            lease = self._hub.reserve(
                message.size_bytes, text=message.text, regions=message.regions
            )
        except Exception as error:  # noqa: BLE001 - the front end raises it
            self._tell(Reply(message.number, error=error))
            return
        self._leases[message.number] = lease
        self._reply_when_done(message.number, lease, lambda lease: (lease.offset, lease.regions))

    def _release(self, message: Release) -> None:
        if (lease := self._leases.pop(message.number, None)) is not None:
            _leave(lease)

    def _compute(self, message: Compute) -> None:
        try:
            task = self._hub.schedule.submit(message.job, message.deadline_s)
        except Exception as error:  # noqa: BLE001 - the front end raises it
            self._tell(Reply(message.number, error=error))
            return
        self._tasks[message.number] = task
        self._reply_when_done(message.number, task.done, lambda finished: (finished, task.waited_s))
        task.done.add_done_callback(lambda _: self._tasks.pop(message.number, None))

    def _computed(self, number: int, task: Task, done: asyncio.Future[Finished]) -> None:
        del self._tasks[number]
        if done.cancelled():
            self._tell(Reply(number, cancelled=True))
        elif (error := done.exception()) is not None:
            self._tell(Reply(number, error=error))
        else:
            self._tell(Done(number, tuple(done.result()), task.waited_s or 0.0))

    def _cancel(self, message: Cancel) -> None:
        if (task := self._tasks.get(message.number)) is not None:
            self._hub.cancel(task)

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

    def _tell(self, message: Reply | Done) -> None:
        assert self._channel is not None  # noqa: S101
        self._channel.tell(message)

    _HANDLERS: Mapping[type, Callable[..., None]] = {
        Reserve: _reserve,
        Release: _release,
        Compute: _compute,
        Cancel: _cancel,
        Ask: _ask,
        Record: lambda self, record: self._hub.observe(record),
        Listens: lambda self, message: self._listens(message),
    }


def _leave(lease: asyncio.Future[Lease]) -> None:
    """Give a lease back, or leave the line for it."""
    if lease.done():
        if not lease.cancelled() and lease.exception() is None:
            lease.result().release()
    else:
        lease.cancel()


class _RemoteRunning:
    """See `Running`. The hub says with the answer how long the job waited."""

    def __init__(self, number: int, done: asyncio.Future[Finished]) -> None:
        self.number, self.done = number, done
        self.waited_s: float | None = None


class RemoteHub:
    """See `Engine`: the hub, asked through a channel.

    ``drained`` is called when the hub wants this process to finish, ``lost`` when it has ended.
    """

    def __init__(
        self, arena: Arena, *, drained: Callable[[], None], lost: Callable[[], None]
    ) -> None:
        self.arena = arena
        self.status = Status("", ready=False)
        self.limit_bytes = 0
        self._drained, self._lost = drained, lost
        self._numbers = itertools.count()
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._pocket = Places(0, 0)
        self._observing: asyncio.TimerHandle | None = None
        self._channel: Channel
        self._welcomed: asyncio.Future[None]

    async def open(self, channel_end: Any) -> None:
        """Return once the hub has said welcome."""
        self._welcomed = asyncio.get_running_loop().create_future()
        self._channel = await Channel.open(channel_end, self._received, self._lost, _KINDS)
        await self._welcomed

    def tell(self, message: Any) -> None:
        """Send the hub a message that it does not answer."""
        self._channel.tell(message)

    def reserve(
        self, size_bytes: int, *, text: bool = False, regions: Sequence[RegionPart] = ()
    ) -> asyncio.Future[Lease]:
        """See `Engine.reserve`."""
        loop = asyncio.get_running_loop()
        leased: asyncio.Future[Lease] = loop.create_future()
        small = not text and not regions and size_bytes <= _SMALL_BYTES
        if small and (offset := self._pocket.take(size_bytes)) is not None:
            give = lambda lease: self._pocket.give(lease.offset, lease.size_bytes)  # noqa: E731
            leased.set_result(Lease(offset, size_bytes, give))
            return leased
        number, replied = self._next()
        self.tell(Reserve(number, size_bytes, text, regions))

        def granted(reply: asyncio.Future[tuple[int, Sequence[InRegion]]]) -> None:
            release: Callable[[Lease], None] = lambda _: self.tell(Release(number))  # noqa: E731
            if leased.cancelled():
                return
            if (error := reply.exception()) is not None:
                leased.set_exception(error)
            else:
                offset, places = reply.result()
                lease = Lease(offset, size_bytes, release)
                lease.regions = places
                leased.set_result(lease)

        def left(_: asyncio.Future[Lease]) -> None:
            if leased.cancelled():
                self.tell(Release(number))

        replied.add_done_callback(granted)
        leased.add_done_callback(left)
        return leased

    def compute(self, lease: Lease, job: Job, deadline_s: float) -> Running:
        """See `Engine.compute`."""
        number, replied = self._next()
        running = _RemoteRunning(number, asyncio.get_running_loop().create_future())

        def finished(reply: asyncio.Future[tuple[Finished, float]]) -> None:
            lease.release()
            if reply.cancelled():
                running.done.cancel()
            elif (error := reply.exception()) is not None:
                running.done.set_exception(error)
                running.done.exception()  # whoever asked may have left
            else:
                result, running.waited_s = reply.result()
                running.done.set_result(result)

        lease.retain()
        replied.add_done_callback(finished)
        self.tell(Compute(number, job.packed(), deadline_s))
        return running

    def cancel(self, running: Running) -> None:
        """See `Engine.cancel`."""
        assert isinstance(running, _RemoteRunning)  # noqa: S101
        self.tell(Cancel(running.number))

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

    async def unregister_region(self, owner: str, name: str) -> None:
        """See `Engine.unregister_region`."""
        await self._ask("unregister_region", owner, name)

    async def list_regions(self, owner: str, name: str) -> list[RegionInfo]:
        """See `Engine.list_regions`."""
        listed: list[RegionInfo] = await self._ask("list_regions", owner, name)
        return listed

    async def stored(self, method: str, *arguments: Any) -> Any:
        """See `Engine.stored`."""
        return await self._ask("stored", method, *arguments)

    async def _ask(self, method: str, *arguments: Any) -> Any:
        number, replied = self._next()
        self.tell(Ask(number, method, arguments))
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
            replied = self._pending.get(message.number)
            if replied is not None and not replied.done():
                replied.set_result((Finished(*message.finished), message.waited_s))
        elif isinstance(message, Reply):
            self._replied(message)
        elif isinstance(message, Status):
            self.status = message
        elif isinstance(message, Drain):
            self._drained()
        else:
            assert isinstance(message, Welcome)  # noqa: S101
            self.status, self.limit_bytes = message.status, message.limit_bytes
            self._pocket = Places(*message.pocket)
            self._welcomed.set_result(None)

    def _replied(self, message: Reply) -> None:
        replied = self._pending.get(message.number)
        if replied is None or replied.done():
            return  # who asked has left
        if message.error is not None:
            replied.set_exception(message.error)
        elif message.cancelled:
            replied.cancel()
        else:
            replied.set_result(message.value)
