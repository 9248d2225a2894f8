"""What there is once, however many processes serve: memory, the line of jobs, counts, health.

`Engine` is what a front end asks for, `Hub` answers. A front end in the hub's own process calls it
directly; one in another process through `remote_hub.RemoteHub`, which is an `Engine` too.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from convgrad.errors import InvalidProblem, ServiceError
from convgrad_service.backends.base import Vitals
from convgrad_service.engine.memory.arena import Arena
from convgrad_service.engine.memory.free_list import FreeList
from convgrad_service.engine.memory.lease import Lease, LeasePool
from convgrad_service.engine.options import EngineOptions
from convgrad_service.engine.protocols import Counts, Prober
from convgrad_service.engine.scheduling.partition import OnPartDone
from convgrad_service.engine.scheduling.quotas import Caller, Quotas, Ticket
from convgrad_service.engine.scheduling.scheduler import Scheduler
from convgrad_service.engine.shm.registry import RegionInfo, RegionPart, RegionRegistry
from convgrad_service.engine.shm.stored import TensorStore
from convgrad_service.engine.status import Status
from convgrad_service.engine.submissions import Earlier, Results, Submissions
from convgrad_service.engine.telemetry.record import Record
from convgrad_service.engine.telemetry.statistics import OperationStatistics, Statistics
from convgrad_service.engine.workers.child_process import Children
from convgrad_service.engine.workers.execute import Finished, Job
from convgrad_service.engine.workers.inline_executor import InlineBackend, InlineExecutor

__all__ = ["Engine", "Hub", "JobHandle"]


class JobHandle(Protocol):
    """A job on its way. ``done`` is set once nothing touches its memory any more."""

    done: asyncio.Future[Finished]

    @property
    def waited_s(self) -> float | None:
        """How long it waited to start; None while it does, or where that is not known."""
        ...


class Engine(Protocol):
    """What a front end needs of the hub. For its loop's thread."""

    arena: Arena
    inline_executor: InlineExecutor | None
    """What computes small problems in this process; None where all are for workers."""

    @property
    def limit_bytes(self) -> int:
        """What the tensors of all requests in flight may take."""
        ...

    @property
    def status(self) -> Status: ...

    @property
    def backend(self) -> str:
        """The name of what computes."""
        ...

    @property
    def room(self) -> int:
        """How many more requests can be queued, as far as is known."""
        ...

    def admit(self) -> None:
        """See `Status.admit`."""
        ...

    async def enter(self, caller: Caller) -> Ticket:
        """See `Quotas.enter`."""
        ...

    def reserve(
        self, size_bytes: int, *, text: bool = False, regions: Sequence[RegionPart] = ()
    ) -> asyncio.Future[Lease]:
        """A place in the arena; the caller releases it. ``text``: of the part for JSON bodies.

        ``regions`` are found and held as long; their places are the lease's ``regions``.

        Raises, now or through the future, ProblemTooLarge and Overloaded; for a region NotFound
        and InvalidProblem.
        """
        ...

    def take(self, size_bytes: int, regions: Sequence[RegionPart] = ()) -> Lease | None:
        """The same for tensors at once, or None where it would have to be waited for."""
        ...

    def compute(
        self, lease: Lease, job: Job, deadline_s: float, told: OnPartDone | None = None
    ) -> JobHandle:
        """Queue a job whose places lie in ``lease``, which is held until the job is done.

        ``told`` hears of each part of a job that makes several tasks.

        Raises, now or through ``done``, Overloaded, DeviceUnavailable, DeadlineExceeded, and
        whatever the backend raises.
        """
        ...

    def cancel(self, running: JobHandle) -> None:
        """Say that nobody waits for a job any more."""
        ...

    @property
    def timing(self) -> bool:
        """See `Status.timing`."""
        ...

    async def position(self, running: JobHandle) -> int | None:
        """How many jobs stand before one in the line; None once it runs."""
        ...

    async def submitted(
        self, owner: str, key: str, request_id: str, results: Results
    ) -> Mapping[str, Earlier]:
        """See `Submissions.add`."""
        ...

    def observe(self, record: Record) -> None:
        """Count one request that has been answered."""
        ...

    async def exposition(self) -> bytes:
        """All metrics of the server, in Prometheus' text format."""
        ...

    async def statistics(self) -> Mapping[str, OperationStatistics]:
        """What has been computed, by operation."""
        ...

    async def register_region(self, owner: str, info: RegionInfo) -> None:
        """See `RegionRegistry.register`."""
        ...

    async def unregister_region(self, owner: str, name: str, on_device: bool) -> None:
        """See `RegionRegistry.unregister`."""
        ...

    async def list_regions(self, owner: str, name: str, on_device: bool) -> list[RegionInfo]:
        """See `RegionRegistry.listed`."""
        ...

    async def stored(self, method: str, *arguments: Any) -> Any:
        """Call a method of `TensorStore`; see `TensorStoreClient`."""
        ...


class Hub:
    """The engine itself. For the loop's thread.

    JSON bodies have a part of the arena to themselves until they are decoded, so that a request
    which holds text and waits for tensors can never wait for one that holds tensors and waits for
    text.
    """

    def __init__(
        self, arena: Arena, schedule: Scheduler, options: EngineOptions, *, backend: str
    ) -> None:
        self.arena = arena
        self.schedule = schedule
        self.backend = backend
        self.inline_executor: InlineExecutor | None = None
        self.leaving = False
        """Soon no more requests will be taken, and whoever distributes them should send none."""
        self.draining = False
        """No more requests are taken; those that were are finished."""
        self.counts: Counts | None = None
        self.inferences = Statistics()
        self.quotas = Quotas()
        self.submissions = Submissions()
        self.vitals: Callable[[], Mapping[int, Vitals]] = dict
        self.workers: Callable[[], Mapping[int, Prober]] = dict
        self.fault: Callable[[], str | None] = lambda: None
        self.dead: str | None = None
        self.regions = RegionRegistry(options.max_regions)
        self.tensors = TensorStore(
            self.regions,
            arena,
            budget_bytes=options.stored_bytes,
            longest_s=options.stored_longest_s,
        )
        self.on_close: list[Callable[[], None]] = [self.regions.close]
        self.watchers: list[Callable[[Status], None]] = []
        self._published: tuple[object, ...] = ()
        self.children = Children()
        schedule.changed = self.children.changed = self.publish
        self._wait_s = options.wait_s

        def part(start: int, size_bytes: int) -> LeasePool:
            return LeasePool(
                FreeList(start, FreeList.rounded(size_bytes)),
                max_waiting=options.max_queue,
                keep_bytes=options.keep_bytes,
                forget=arena.forget,
            )

        self.texts = part(0, options.text_bytes)
        self.memory = part(self.texts.limit_bytes, options.tensor_bytes)

    @property
    def limit_bytes(self) -> int:
        """What the tensors of all requests in flight may take."""
        return self.memory.limit_bytes

    @property
    def status(self) -> Status:
        """See `Status`."""
        overload, fault = self.schedule.overload, self.fault()
        return Status(
            self.backend,
            ready=self.schedule.workers > 0 and fault is None,
            leaving=self.leaving,
            draining=self.draining,
            fault=fault,
            overload=None if overload is None else (overload.detail, overload.retry_after_s),
            missing=tuple(sorted(self.children.missing)),
            dead=self.dead,
            timing=self.schedule.timing,
        )

    @property
    def room(self) -> int:
        """See `Engine.room`."""
        return self.schedule.room

    def compute_inline(self, beside: InlineBackend) -> None:
        """From now on, have small problems computed in this process."""
        self.inline_executor = InlineExecutor(self, beside, self.regions.descriptor)

    def admit(self) -> None:
        """See `Engine.admit`."""
        if self.draining or self.schedule.full or self.fault() is not None:
            self.status.admit()

    def publish(self) -> None:
        """Tell the front ends in other processes what has changed, if it concerns them."""
        # How long a full line takes does not matter to them, only whether it is full.
        concern = (
            self.schedule.workers > 0,
            self.schedule.full,
            self.leaving,
            self.draining,
            self.fault(),
            tuple(self.children.missing),
            self.dead,
            self.schedule.timing,
        )
        if concern != self._published:
            self._published = concern
            status = self.status
            for watch in self.watchers:
                watch(status)

    async def enter(self, caller: Caller) -> Ticket:
        """See `Engine.enter`."""
        return self.quotas.enter(caller)

    def reserve(
        self, size_bytes: int, *, text: bool = False, regions: Sequence[RegionPart] = ()
    ) -> asyncio.Future[Lease]:
        """See `Engine.reserve`."""
        memory = self.texts if text else self.memory
        places = self.regions.use(regions)
        try:
            future = memory.reserve(size_bytes, time.monotonic() + self._wait_s)
        except ServiceError:
            self.regions.release(places)
            raise

        def keep(future: asyncio.Future[Lease]) -> None:
            if future.cancelled() or future.exception() is not None:
                self.regions.release(places)
            else:
                future.result().keep(places, self.regions.release)

        if future.done():
            keep(future)
        elif places:
            # Called before whoever waits for the lease goes on: the first callback it has.
            future.add_done_callback(keep)
        return future

    def take(self, size_bytes: int, regions: Sequence[RegionPart] = ()) -> Lease | None:
        """See `Engine.take`."""
        lease = self.memory.take(size_bytes)
        if lease is not None and regions:
            try:
                lease.keep(self.regions.use(regions), self.regions.release)
            except ServiceError:
                lease.release()
                raise
        return lease

    async def register_region(self, owner: str, info: RegionInfo) -> None:
        """See `RegionRegistry.register`; what a device's worker cannot open is refused here."""
        if info.device is not None:
            workers = self.workers()
            if info.device not in workers:
                raise InvalidProblem(
                    f"device_id is {info.device}; the devices that work here are "
                    f"{', '.join(map(str, sorted(workers))) or 'none'}"
                )
            await workers[info.device].probe(info.handle, info.size_bytes)
        self.regions.register(owner, info)

    async def unregister_region(self, owner: str, name: str, on_device: bool) -> None:
        """See `RegionRegistry.unregister`."""
        await self.regions.unregister(owner, name, on_device=on_device)

    async def list_regions(self, owner: str, name: str, on_device: bool) -> list[RegionInfo]:
        """See `RegionRegistry.listed`."""
        return self.regions.listed(owner, name, on_device=on_device)

    async def stored(self, method: str, *arguments: Any) -> Any:
        """See `Engine.stored`."""
        result = getattr(self.tensors, method)(*arguments)
        return await result if inspect.isawaitable(result) else result

    def compute(
        self, lease: Lease, job: Job, deadline_s: float, told: OnPartDone | None = None
    ) -> JobHandle:
        """See `Engine.compute`."""
        task = self.schedule.submit(job, deadline_s, told)
        lease.retain()
        task.done.add_done_callback(lease.release)
        return task

    def cancel(self, running: JobHandle) -> None:
        """See `Engine.cancel`."""
        self.schedule.cancel(running)  # type: ignore[arg-type]

    @property
    def timing(self) -> bool:
        """See `Status.timing`."""
        return self.schedule.timing

    async def position(self, running: JobHandle) -> int | None:
        """See `Engine.position`."""
        return self.schedule.position(running)  # type: ignore[arg-type]

    async def submitted(
        self, owner: str, key: str, request_id: str, results: Results
    ) -> Mapping[str, Earlier]:
        """See `Engine.submitted`."""
        return self.submissions.add(owner, key, request_id, results)

    def observe(self, record: Record) -> None:
        """See `Engine.observe`."""
        if record.operation:
            self.inferences.count(record)
        if self.counts is not None:
            self.counts.count(record)

    async def exposition(self) -> bytes:
        """See `Engine.exposition`."""
        return b"" if self.counts is None else self.counts.exposition()

    async def statistics(self) -> Mapping[str, OperationStatistics]:
        """See `Engine.statistics`."""
        return self.inferences.all()

    def close(self, error: ServiceError | None = None) -> None:
        """Drop what waits, ask what runs to stop, take no more."""
        self.draining = True
        if error is not None:
            self.schedule.refuse_all(error)
        self.schedule.close()
        for close in self.on_close:
            close()
        self.on_close.clear()
