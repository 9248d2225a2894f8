"""An engine within one process: the hub on its event loop and a worker made of threads.

For embedding and for tests. `convgrad serve` runs workers in processes, see `workers.supervisor`.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from concurrent.futures import Future

from convgrad.errors import ServiceError
from convgrad_service.backends.base import ServingBackend, Vitals
from convgrad_service.engine.hub import Hub
from convgrad_service.engine.memory.arena import Arena
from convgrad_service.engine.options import EngineOptions
from convgrad_service.engine.scheduling.job import Job, JobResult
from convgrad_service.engine.scheduling.scheduler import Scheduler, Task
from convgrad_service.engine.shm.mappings import RegionMappings
from convgrad_service.engine.shm.registry import RegionRegistry
from convgrad_service.engine.workers.worker import compile_ahead, run_job
from convgrad_service.process import lower_priority, without_traceback

_SLOTS = 2


def embedded_hub(backend: ServingBackend, options: EngineOptions) -> Hub:
    """Make a hub with one `ThreadWorker`; closing the hub ends its threads."""
    arena = Arena.create(options.arena_bytes)
    scheduler = Scheduler(options.max_queue, large_s=options.large_s)
    hub = _EmbeddedHub(arena, scheduler, options, backend=backend.name)
    hub.worker_backend = backend
    worker = ThreadWorker(backend, arena, hub.regions, options.slots or _SLOTS, scheduler)
    scheduler.add(worker)
    hub.on_close.append(worker.close)
    return hub


class _EmbeddedHub(Hub):
    worker_backend: ServingBackend

    @property
    def fault(self) -> str | None:  # type: ignore[override]
        return self.worker_backend.fault


class ThreadWorker:
    """A `Worker` of ``slots`` threads; calls the scheduler on the event loop."""

    def __init__(
        self,
        backend: ServingBackend,
        arena: Arena,
        regions: RegionRegistry,
        slots: int,
        scheduler: Scheduler,
    ) -> None:
        self.slots, self.device = slots, 0
        self._backend, self._arena, self._scheduler = backend, arena, scheduler
        self._regions, self._mappings = regions, RegionMappings(backend)
        regions.on_closed += [self._mappings.close, backend.forget]
        self._cancelled: dict[Task, threading.Event] = {}
        self._compiling: dict[Task, Future[None]] = {}
        self._tasks: queue.SimpleQueue[
            tuple[Task, threading.Event, asyncio.AbstractEventLoop] | None
        ] = queue.SimpleQueue()
        for index in range(slots):
            # Daemons: a kernel that ignores its cancellation must not keep the process alive.
            threading.Thread(target=self._serve, name=f"compute-{index}", daemon=True).start()

    @property
    def vitals(self) -> Vitals:
        return self._backend.vitals()

    def start(self, task: Task) -> None:
        self._cancelled[task] = threading.Event()
        self._tasks.put((task, self._cancelled[task], asyncio.get_running_loop()))

    def cancel(self, task: Task) -> None:
        if task in self._cancelled:
            self._cancelled[task].set()
        else:
            self._compiling[task].cancel()

    def has_used(self, job: Job) -> int:
        return 0  # there is no other worker to choose

    async def probe(self, handle: bytes, size_bytes: int) -> None:
        self._backend.open_handle(handle, size_bytes).close()

    def close(self) -> None:
        """End the threads after their current tasks."""
        for _ in range(self.slots):
            self._tasks.put(None)

    def _serve(self) -> None:
        lower_priority()
        while (taken := self._tasks.get()) is not None:
            task, cancelled, loop = taken
            result: JobResult | Future[None] | BaseException
            compiling: Future[None] | None = None
            try:
                job = task.job
                compiling = compile_ahead(self._backend, job.layout, task.part)
                for number in (each.region for each in job.regions):
                    handle, end = self._regions.extent(number)
                    if handle is not None:
                        self._mappings.open_on_device(number, handle, end)
                    else:
                        self._mappings.open(number, self._regions.descriptor(number), end)
                result = compiling or run_job(
                    self._backend, self._arena, self._mappings, job, cancelled, task.part
                )
            # Any error must reach the waiting request.
            except BaseException as error:  # noqa: BLE001
                result = without_traceback(error) if isinstance(error, ServiceError) else error
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._report, task, result)
            # Keep nothing of the request alive while waiting for the next one.
            del taken, task, result, compiling

    def _report(self, task: Task, result: JobResult | Future[None] | BaseException) -> None:
        del self._cancelled[task]
        if not isinstance(result, Future):
            self._scheduler.finished(task, result)
            return
        loop = asyncio.get_running_loop()
        self._compiling[task] = result
        self._scheduler.compiling(task)
        result.add_done_callback(lambda _: loop.call_soon_threadsafe(self._compiled, task))

    def _compiled(self, task: Task) -> None:
        compiled = self._compiling.pop(task)
        self._scheduler.compiled(task, None if compiled.cancelled() else compiled.exception())
