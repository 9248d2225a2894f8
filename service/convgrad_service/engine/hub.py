"""The hub: what a server has exactly once, however many processes serve its clients.

Front ends in other processes use it through `ipc.remote_hub.RemoteHub`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from convgrad.errors import DeviceUnavailable, InvalidProblem, Overloaded, ServiceError
from convgrad_service.engine.memory.arena import Arena, FreeList, Lease, LeasePool
from convgrad_service.engine.options import SMALL_REQUEST_BYTES, EngineOptions, InlineBackend
from convgrad_service.engine.scheduling.job import Job, JobHandle
from convgrad_service.engine.scheduling.quotas import NO_LIMITS, Caller, Quotas, Ticket
from convgrad_service.engine.scheduling.scheduler import Scheduler
from convgrad_service.engine.shm.registry import RegionInfo, RegionPart, RegionRegistry
from convgrad_service.engine.shm.stored import TensorStore
from convgrad_service.engine.telemetry.record import Record, RequestMetrics
from convgrad_service.engine.workers.child_process import Children
from convgrad_service.engine.workers.inline_executor import InlineExecutor

# Memory is short once a request has waited for it this long; shorter waits are normal.
_SHORT_AFTER_S = 1.0


class Status(NamedTuple):
    """The state of the engine, of which every front end has a copy.

    Attributes
    ----------
    fault
        Why no device works; None while one does.
    overload
        The error text and Retry-After for new requests while the queue is full.
    missing
        The names of front ends that are not serving.
    dead
        Why the server must be restarted to work again.
    timing
        Whether a timing is running, during which nothing is computed inline.
    slots
        Problems that all workers compute at a time.
    short_of_memory
        Whether requests have waited for memory for a while.
    """

    backend: str
    ready: bool = True
    leaving: bool = False
    draining: bool = False
    fault: str | None = None
    overload: tuple[str, float | None] | None = None
    missing: tuple[str, ...] = ()
    dead: str | None = None
    timing: bool = False
    slots: int = 0
    short_of_memory: bool = False

    def require_live(self) -> None:
        """Raise DeviceUnavailable if the server must be restarted."""
        if self.dead is not None:
            raise DeviceUnavailable(self.dead)

    def require_ready(self) -> None:
        """Raise DeviceUnavailable unless a device works and every front end serves."""
        self.require_live()
        self._require_usable()
        if self.leaving:
            raise DeviceUnavailable("the server is about to shut down", retry_after_s=5.0)
        if not self.ready:
            raise DeviceUnavailable("no device works at the moment", retry_after_s=1.0)
        if self.missing:
            names = ", ".join(self.missing)
            raise DeviceUnavailable(f"{names}: not serving at the moment", retry_after_s=1.0)

    def admit(self) -> None:
        """Raise DeviceUnavailable or Overloaded if a new request would be refused.

        Called before the body is read. A restarting device is not a reason: requests wait for it.
        """
        self._require_usable()
        if self.overload is not None:
            sentence, retry_after_s = self.overload
            raise Overloaded(sentence, retry_after_s=retry_after_s)

    def _require_usable(self) -> None:
        if self.draining:
            raise DeviceUnavailable("the server is shutting down", retry_after_s=5.0)
        if self.fault is not None:
            raise DeviceUnavailable(f"the device has failed: {self.fault}")


class Hub:
    """The engine itself, and what front ends in its process use. For the event loop's thread.

    JSON bodies have a part of the arena of their own. Otherwise requests that hold text and wait
    for tensor memory could deadlock with requests that hold tensors and wait for text memory.
    """

    fault: str | None = None
    """Why no device works; the supervisor of the workers sets it."""

    def __init__(
        self, arena: Arena, scheduler: Scheduler, options: EngineOptions, *, backend: str
    ) -> None:
        self.arena = arena
        self.scheduler = scheduler
        self.backend = backend
        self.inline_executor: InlineExecutor | None = None
        """Computes small problems in this process; None if workers compute all."""
        self.leaving = False
        """The server reports not ready, so that load balancers send it no new requests."""
        self.draining = False
        """New requests are refused; those in flight are finished."""
        self.requests = RequestMetrics()
        self.metrics: Callable[[], bytes] = bytes
        """Returns all metrics in Prometheus' text format."""
        self.quotas = Quotas()
        self.dead: str | None = None
        self.regions = RegionRegistry(options.max_regions)
        self.tensors = TensorStore(
            self.regions,
            arena,
            budget_bytes=options.stored_bytes,
            longest_s=options.stored_longest_s,
        )
        services = (self.tensors, self.regions, self.requests)
        self._services: dict[str, object] = {Hub.__name__: self}
        self._services |= {type(service).__name__: service for service in services}
        self.on_close: list[Callable[[], None]] = [self.regions.close]
        self.watchers: list[Callable[[Status], None]] = []
        self._published: Status | None = None
        self.children = Children()
        scheduler.changed = self.children.changed = self.publish
        self._wait_s = options.wait_s

        def pool(start: int, size_bytes: int) -> LeasePool:
            return LeasePool(
                FreeList(start, FreeList.rounded(size_bytes) if size_bytes else 0),
                max_waiting=options.max_queue,
                keep_bytes=options.keep_bytes,
                discard=arena.discard,
            )

        self.texts = pool(0, options.text_bytes)
        self.memory = pool(self.texts.limit_bytes, options.tensor_bytes)
        self.reserve_memory = pool(
            self.texts.limit_bytes + self.memory.limit_bytes, options.reserve_bytes
        )

    @property
    def limit_bytes(self) -> int:
        """The memory for tensors of all requests in flight."""
        return self.memory.limit_bytes

    @property
    def status(self) -> Status:
        overload, fault = self.scheduler.overload, self.fault
        return Status(
            self.backend,
            ready=self.scheduler.workers > 0 and fault is None,
            leaving=self.leaving,
            draining=self.draining,
            fault=fault,
            overload=None if overload is None else (overload.detail, overload.retry_after_s),
            missing=tuple(sorted(self.children.missing)),
            dead=self.dead,
            timing=self.timing,
            slots=self.slots,
            short_of_memory=max(self.texts.waited_s, self.memory.waited_s) > _SHORT_AFTER_S,
        )

    @property
    def room(self) -> int:
        """How many more requests can be queued."""
        return self.scheduler.room

    @property
    def slots(self) -> int:
        """Number of problems that all workers together compute at a time."""
        return self.scheduler.slots

    @property
    def timing(self) -> bool:
        """Whether a timing is running, see `Status`."""
        return self.scheduler.timing

    def compute_inline(self, backend: InlineBackend) -> None:
        """Compute small problems in this process from now on."""
        self.inline_executor = InlineExecutor(self, backend, self.regions)

    def admit(self) -> None:
        """Raise if a new request would be refused; see `Status.admit`."""
        if self.draining or self.scheduler.full or self.fault is not None:
            self.status.admit()

    def publish(self) -> None:
        """Send the status to the front ends in other processes if it has changed."""
        status = self.status
        # Whether there is an overload, without its Retry-After, which changes all the time.
        relevant = status._replace(overload=status.overload and ("", None))
        if relevant != self._published:
            self._published = relevant
            for watch in self.watchers:
                watch(status)

    async def acquire_ticket(self, caller: Caller) -> Ticket | None:
        """Count a request towards its key's quota; None without limits. See `Quotas.acquire`."""
        return None if caller.limits == NO_LIMITS else self.quotas.acquire(caller)

    async def reserve(
        self, size_bytes: int, *, text: bool = False, regions: Sequence[RegionPart] = ()
    ) -> Lease:
        """Reserve memory for tensors or, with ``text``, a JSON body; the caller releases the lease.

        ``regions`` stay open as long as the lease; their slices are its ``regions``.

        Raises ProblemTooLarge and Overloaded; for regions NotFound and InvalidProblem.
        """
        slices = self.regions.acquire(regions) if regions else ()
        try:
            lease = None if text else self.memory.try_reserve(size_bytes)
            if lease is None and not text and size_bytes <= SMALL_REQUEST_BYTES:
                lease = self.reserve_memory.try_reserve(size_bytes)
            if lease is None:
                pool = self.texts if text else self.memory
                lease = await pool.reserve(size_bytes, self._wait_s)
        except BaseException:
            self.regions.release(slices)
            raise
        if regions:
            lease.attach(slices, self.regions.release)
        return lease

    def submit(self, lease: Lease, job: Job, deadline_s: float) -> JobHandle:
        """Queue a job whose tensors are in ``lease``, which is held until the job is done.

        Raises, directly or through ``done``, Overloaded, DeviceUnavailable, DeadlineExceeded, and
        what the backend raises.
        """
        task = self.scheduler.submit(job, deadline_s)
        lease.retain()
        task.done.add_done_callback(lease.release)
        return task

    def cancel(self, handle: JobHandle) -> None:
        """Drop a waiting job, or ask a running one to stop."""
        self.scheduler.cancel(handle)  # type: ignore[arg-type]

    async def queue_position(self, handle: JobHandle) -> int | None:
        """Return how many tasks are ahead of a job; None once it runs."""
        return self.scheduler.position(handle)  # type: ignore[arg-type]

    def report_waiting(self, length: int) -> None:
        """Report how many requests of the front ends in this process wait for admission."""
        self.scheduler.lines[self] = length

    def observe(self, record: Record) -> None:
        """Count a finished request."""
        self.requests.count(record)

    async def invoke(
        self, service: str, method: str, arguments: tuple[Any, ...], options: Mapping[str, Any]
    ) -> Any:
        """Call a method of one of the services; `call_hub` is the typed form."""
        result = getattr(self.service(service), method)(*arguments, **options)
        return await result if inspect.isawaitable(result) else result

    def service(self, name: str) -> object:
        """Return the service of this class name."""
        return self._services[name]

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return self.metrics()

    async def register_region(self, owner: str, info: RegionInfo) -> None:
        """Register a region; device memory is refused if the device's worker cannot open it.

        Raises as `RegionRegistry.register` and `Worker.probe`.
        """
        if info.device is not None:
            workers = self.scheduler.by_device
            if info.device not in workers:
                raise InvalidProblem(
                    f"device_id is {info.device}; the devices that work here are "
                    f"{', '.join(map(str, sorted(workers))) or 'none'}"
                )
            await workers[info.device].probe(info.handle, info.size_bytes)
        self.regions.register(owner, info)

    def close(self, error: ServiceError | None = None) -> None:
        """Drop waiting jobs, ask running ones to stop, and accept no more."""
        self.draining = True
        if error is not None:
            self.scheduler.refuse_all(error)
        self.scheduler.close()
        for close in self.on_close:
            close()
        self.on_close.clear()
