"""A worker process, as the hub sees it; `worker` is the other end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from convgrad.errors import DeviceUnavailable, ServiceError
from convgrad_service.backends.base import Vitals
from convgrad_service.engine.ipc.channel import (
    MAX_MISSED,
    Cancel,
    Channel,
    Compiled,
    Compiling,
    Forget,
    Heartbeat,
    Hello,
    InternTable,
    NewRegion,
    Ping,
    Pong,
    Probe,
    ProbeResult,
    RunTask,
)
from convgrad_service.engine.memory.arena import Arena
from convgrad_service.engine.options import WorkerRecipe
from convgrad_service.engine.scheduling.job import Job, JobResult
from convgrad_service.engine.scheduling.scheduler import Scheduler, Task
from convgrad_service.engine.shm.registry import RegionRegistry, RegionSlice
from convgrad_service.engine.workers.child_process import START_S, DescriptorReserve, spawn
from convgrad_service.engine.workers.worker import worker_main

# Tasks that took less than this before are sent as `RunTask.brief`.
_BRIEF_S = 1e-3
# A task hangs if it makes no progress for this many times the expected time of all tasks of its
# worker: single kernels can be ten times as slow as the cost model expects.
_STALL_FACTOR = 20


class ProcessWorker:
    """A `Worker`; ``lost`` gets the exit code once its process has ended."""

    def __init__(
        self,
        recipe: WorkerRecipe,
        device: int,
        regions: RegionRegistry,
        scheduler: Scheduler,
    ) -> None:
        self.slots, self.device = recipe.slots or 1, device
        self._regions = regions
        self._sent_regions: set[int] = set()
        self._used: dict[int, int] = {}  # the versions of stored tensors, by region
        self.greeting: Hello
        self.vitals = Vitals()
        loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[int] = loop.create_future()
        self._greeted: asyncio.Future[Hello] = loop.create_future()
        self._scheduler = scheduler
        self._numbers = itertools.count()
        self._tasks: dict[int, tuple[Task, int]] = {}
        self._compiling: dict[int, Task] = {}
        self._layouts = InternTable()
        self._brief: set[int] = set()  # interned layouts that took less than `_BRIEF_S`
        self._probes: dict[int, asyncio.Future[ServiceError | None]] = {}
        self.finished = 0
        """The number of tasks that ended, in any way."""
        self._heartbeat = Heartbeat()
        self._progress: dict[int, int] = {}
        self._stalled_s: dict[int, float] = {}  # seconds without progress, by task
        self._ending: asyncio.Task[None] | None = None
        self._process: subprocess.Popen[bytes]
        self._jobs: Channel
        self._control: Channel
        self._files: socket.socket

    @classmethod
    async def start_process(
        cls,
        recipe: WorkerRecipe,
        device: int,
        arena: Arena,
        regions: RegionRegistry,
        scheduler: Scheduler,
        reserve: DescriptorReserve,
    ) -> ProcessWorker:
        """Start a worker and wait until it is ready; ``reserve`` frees descriptors for the start.

        Raises
        ------
        DeviceUnavailable
            The backend does not work here, or the process ended.
        OSError
            The process could not be started.
        """
        worker = cls(recipe, device, regions, scheduler)
        with reserve.spent():
            worker._process, (jobs, control, worker._files) = spawn(
                "convgrad-worker",
                worker_main,
                *(recipe, device, arena.descriptor),
                descriptors=[arena.descriptor],
                sockets=[socket.SOCK_STREAM] * 3,
            )
        worker._jobs = await Channel.open(jobs, worker._task_message, worker._process_lost)
        worker._control = await Channel.open(control, worker._control_message, worker._process_lost)
        regions.on_closed.append(worker._forget)
        try:
            async with asyncio.timeout(None if recipe.warm_up else START_S):
                worker.greeting = await worker._greeted
        except BaseException as error:
            worker._process_lost()
            if isinstance(error, TimeoutError):
                detail = f"a worker's process was not ready within {START_S} s"
                raise DeviceUnavailable(detail) from None
            if isinstance(error, ServiceError):
                await worker.lost
            raise
        worker.slots = worker.greeting.slots
        return worker

    @property
    def process_id(self) -> int:
        """The id of its process."""
        return self._process.pid

    @property
    def busy(self) -> bool:
        """Whether it has tasks."""
        return bool(self._tasks)

    def start(self, task: Task) -> None:
        number, job = next(self._numbers), task.job
        new: Sequence[NewRegion] = ()
        if job.regions:
            new = self._send_regions(job.regions)
            self._used.update((each.region, each.version) for each in job.regions if each.stored)
        slot, packed = interned = self._layouts.intern(job.layout.packed)
        if packed is not None:
            self._brief.discard(slot)
        # Not for parts: their times differ, and the last one may be brief while others are not.
        brief = task.part is None and not self._tasks and slot in self._brief
        self._tasks[number] = task, slot
        message = RunTask(number, interned, job.base, job.regions, task.part, new, brief)
        self._jobs.send_now(tuple(message))

    def has_used(self, job: Job) -> int:
        return sum(self._used.get(each.region) == each.version for each in job.regions)

    def cancel(self, task: Task) -> None:
        compiling = self._compiling.items()
        running = ((number, held) for number, (held, _) in self._tasks.items())
        for number, held in (*compiling, *running):
            if held is task:
                self._control.send(Cancel(number))

    def check(self, beat_s: float, progress_timeout_s: float) -> str | None:
        """Ping it, every ``beat_s``; return why it must be killed if it is silent or hangs."""
        if self._heartbeat.count_ping():
            return f"has been silent for {MAX_MISSED * beat_s:g} s"
        self._control.send(Ping())
        cost = sum(task.cost for task, _ in self._tasks.values())
        expected_s = self._scheduler.cost_model.estimate_s(cost)
        longest_s = max(progress_timeout_s, _STALL_FACTOR * expected_s)
        self._stalled_s = {
            number: self._stalled_s.get(number, -beat_s) + beat_s for number in self._tasks
        }
        hung = [number for number, stalled_s in self._stalled_s.items() if stalled_s > longest_s]
        for number in hung:
            self._tasks[number][0].hung = True
        return f"has made no progress with a problem for {longest_s:g} s" if hung else None

    def end(self) -> None:
        """Kill its process; ``lost`` is set when that is done."""
        self._process_lost()

    async def stop(self) -> None:
        """Kill its process and wait until it has ended."""
        self._control.close()
        self._process_lost()
        await self.lost

    async def probe(self, handle: bytes, size_bytes: int) -> None:
        number = next(self._numbers)
        answered = self._probes[number] = asyncio.get_running_loop().create_future()
        self._control.send(Probe(number, handle, size_bytes))
        try:
            if (error := await answered) is not None:
                raise error
        finally:
            del self._probes[number]

    def _send_regions(self, regions: Sequence[RegionSlice]) -> Sequence[NewRegion]:
        """Send the files of regions that the worker has not opened; return all new regions."""
        new = [
            (number, *self._regions.extent(number))
            for number in sorted({each.region for each in regions} - self._sent_regions)
        ]
        # If the worker has just died, its tasks run again elsewhere.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for number, handle, _ in new:
                if handle is None:
                    socket.send_fds(self._files, [b"."], [self._regions.descriptor(number)])
        self._sent_regions.update(number for number, _, _ in new)
        return new

    def _forget(self, region: int) -> None:
        if region in self._sent_regions:
            self._sent_regions.remove(region)
            self._used.pop(region, None)
            self._control.send(Forget(region))

    def _task_message(self, message: tuple[int, Any]) -> None:
        number, result = message
        if type(result) is tuple:
            result = JobResult(*result)
        if isinstance(result, Compiled):
            self._scheduler.compiled(self._compiling.pop(number), result.error)
            return
        task, slot = self._tasks.pop(number)
        self.finished += 1
        if isinstance(result, Compiling):
            self._compiling[number] = task
            self._scheduler.compiling(task)
            return
        assert task.started_s is not None  # noqa: S101
        took_s = time.monotonic() - task.started_s
        # A task that was cancelled or failed does not predict the time of the next one of its kind.
        if task.part is None and took_s < _BRIEF_S and isinstance(result, JobResult):
            self._brief.add(slot)
        else:
            self._brief.discard(slot)
        self._scheduler.finished(task, result)

    def _control_message(self, message: Any) -> None:
        if isinstance(message, Vitals):
            self.vitals = message
            return
        if isinstance(message, Pong):
            self._heartbeat.answered()
            for number, progress in message.progress:
                if self._progress.get(number) != progress and number in self._stalled_s:
                    self._stalled_s[number] = 0.0
            self._progress = dict(message.progress)
            return
        if isinstance(message, ProbeResult):
            if (answered := self._probes.get(message.number)) and not answered.done():
                answered.set_result(message.error)
            return
        if self._greeted.done():
            return
        if isinstance(message, Hello):
            self._greeted.set_result(message)
        else:
            assert isinstance(message, ServiceError)  # noqa: S101
            self._greeted.set_exception(message)

    def _process_lost(self) -> None:
        if self._ending is None:
            self.slots = 0  # no more tasks
            self._scheduler.changed()
            self._ending = asyncio.ensure_future(self._end())

    async def _end(self) -> None:
        # Its tasks' memory may only be reused once it is dead.
        self._process.kill()
        code = await asyncio.to_thread(self._process.wait)
        self._regions.on_closed.remove(self._forget)
        self._jobs.close()
        self._control.close()
        self._files.close()
        for answered in self._probes.values():
            if not answered.done():
                answered.set_result(DeviceUnavailable("the worker ended", retry_after_s=1.0))
        if not self._greeted.done():
            self._greeted.set_exception(
                DeviceUnavailable(f"a worker's process ended as it started (exit code {code})")
            )
        self.lost.set_result(code)
