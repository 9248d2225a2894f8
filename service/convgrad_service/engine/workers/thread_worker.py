"""A worker inside this process: threads that run a backend. For tests and for embedding.

`process_worker.ProcessWorker` is the same to the scheduler, with the backend in its own process.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable

from convgrad_service.backends.base import ServingBackend
from convgrad_service.engine.memory.arena import Arena
from convgrad_service.engine.scheduling.scheduler import Task
from convgrad_service.engine.shm.mappings import RegionMappings
from convgrad_service.engine.shm.registry import RegionRegistry
from convgrad_service.engine.workers.execute import Finished, Job, run_job
from convgrad_service.thread_priority import give_way

__all__ = ["ThreadWorker"]

Report = Callable[[Task, Finished | BaseException], None]


class ThreadWorker:
    """``slots`` threads; ``finished`` is called in the loop's thread for every task."""

    def __init__(
        self,
        backend: ServingBackend,
        arena: Arena,
        regions: RegionRegistry,
        slots: int,
        finished: Report,
    ) -> None:
        self.slots, self.device = slots, 0
        self._backend, self._arena, self._finished = backend, arena, finished
        self._regions, self._segments = regions, RegionMappings(backend.open_handle)
        regions.forgotten += [self._segments.close, backend.forget]
        self._cancelled: dict[Task, threading.Event] = {}
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
        self._cancelled[task].set()

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
            result: Finished | BaseException
            try:
                job = task.job
                for region in job.regions:
                    if (found := self._regions.handle(region.file)) is not None:
                        self._segments.open_on_device(region.file, *found)
                    else:
                        self._segments.open(region.file, self._regions.descriptor(region.file))
                result = run_job(
                    self._backend, self._arena, self._segments, job, cancelled, task.part
                )
            # Whatever it was, the request that waits must hear of it.
            except BaseException as error:  # noqa: BLE001
                result = error
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._report, task, result)
            # Nothing of the request may stay alive in this thread while it waits for the next.
            del given, task, result

    def _report(self, task: Task, result: Finished | BaseException) -> None:
        del self._cancelled[task]
        self._finished(task, result)
