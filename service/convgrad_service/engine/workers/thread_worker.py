"""A worker inside this process: threads that run a backend. For tests and for embedding.

`process_worker.ProcessWorker` is the same to the scheduler, with the backend in its own process.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from concurrent.futures import Future

from convgrad_service.backends.base import ServingBackend
from convgrad_service.engine.memory.arena import Arena
from convgrad_service.engine.scheduling.scheduler import Scheduler, Task
from convgrad_service.engine.shm.mappings import RegionMappings
from convgrad_service.engine.shm.registry import RegionRegistry
from convgrad_service.engine.workers.execute import Finished, Job, compile_ahead, run_job
from convgrad_service.thread_priority import give_way

__all__ = ["ThreadWorker"]


class ThreadWorker:
    """``slots`` threads; ``schedule`` is told of every task in the loop's thread."""

    def __init__(
        self,
        backend: ServingBackend,
        arena: Arena,
        regions: RegionRegistry,
        slots: int,
        schedule: Scheduler,
    ) -> None:
        self.slots, self.device = slots, 0
        self._backend, self._arena, self._schedule = backend, arena, schedule
        self._regions, self._segments = regions, RegionMappings(backend.open_handle)
        regions.forgotten += [self._segments.close, backend.forget]
        self._cancelled: dict[Task, threading.Event] = {}
        self._compiling: dict[Task, Future[None]] = {}
        self._tasks: queue.SimpleQueue[
            tuple[Task, threading.Event, asyncio.AbstractEventLoop] | None
        ] = queue.SimpleQueue()
        for index in range(slots):
            # Daemons: a kernel that ignores its cancellation must not keep the process alive.
            threading.Thread(target=self._serve, name=f"compute-{index}", daemon=True).start()

    def start(self, task: Task) -> None:
        """See `Worker.start`."""
        self._cancelled[task] = threading.Event()
        self._tasks.put((task, self._cancelled[task], asyncio.get_running_loop()))

    def cancel(self, task: Task) -> None:
        """See `Worker.cancel`."""
        if task in self._cancelled:
            self._cancelled[task].set()
        else:
            self._compiling[task].cancel()

    def has_used(self, job: Job) -> int:
        """See `Worker.has_used`: all share one memory."""
        return 0

    async def probe(self, handle: bytes, size_bytes: int) -> None:
        """See `ProcessWorker.probe`."""
        self._backend.open_handle(handle, size_bytes).close()

    def close(self) -> None:
        """End the threads, once what they compute has ended."""
        for _ in range(self.slots):
            self._tasks.put(None)

    def _serve(self) -> None:
        give_way()
        while (given := self._tasks.get()) is not None:
            task, cancelled, loop = given
            result: Finished | Future[None] | BaseException
            compiling: Future[None] | None = None
            try:
                job = task.job
                compiling = compile_ahead(self._backend, job.layout.unpacked(), task.part)
                for region in job.regions:
                    if (found := self._regions.handle(region.file)) is not None:
                        self._segments.open_on_device(region.file, *found)
                    else:
                        self._segments.open(region.file, self._regions.descriptor(region.file))
                result = compiling or run_job(
                    self._backend, self._arena, self._segments, job, cancelled, task.part
                )
            # Whatever it was, the request that waits must hear of it.
            except BaseException as error:  # noqa: BLE001
                result = error
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._report, task, result)
            # Nothing of the request may stay alive in this thread while it waits for the next.
            del given, task, result, compiling

    def _report(self, task: Task, result: Finished | Future[None] | BaseException) -> None:
        del self._cancelled[task]
        if not isinstance(result, Future):
            self._schedule.finished(task, result)
            return
        loop = asyncio.get_running_loop()
        self._compiling[task] = result
        self._schedule.compiling(task)
        result.add_done_callback(lambda _: loop.call_soon_threadsafe(self._compiled, task))

    def _compiled(self, task: Task) -> None:
        compiled = self._compiling.pop(task)
        self._schedule.compiled(task, None if compiled.cancelled() else compiled.exception())
