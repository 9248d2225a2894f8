"""A worker in a process of its own, as the hub sees it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from convgrad.errors import DeviceUnavailable, ServiceError
from convgrad_service.backends.base import ServingBackend, Vitals
from convgrad_service.engine.ipc.channel import Channel
from convgrad_service.engine.ipc.heartbeat import MOST_MISSED, Heartbeat, Ping, Pong
from convgrad_service.engine.ipc.interning import InternTable
from convgrad_service.engine.memory.arena import Arena
from convgrad_service.engine.scheduling.scheduler import Scheduler, Task
from convgrad_service.engine.shm.registry import InRegion, RegionRegistry
from convgrad_service.engine.workers.child_process import DescriptorReserve, spawn
from convgrad_service.engine.workers.execute import Finished, Job
from convgrad_service.engine.workers.inline_executor import InlineBackend
from convgrad_service.engine.workers.worker_main import (
    Cancel,
    Compiled,
    Compiling,
    Forget,
    Hello,
    NewRegion,
    Probe,
    Probed,
    Start,
    worker_main,
)

__all__ = ["ProcessWorker", "WorkerRecipe"]


# Of a worker with nothing else to do, the next may wait so long for a thread.
_BRIEF_S = 1e-3
# Compiling what a GPU needs first takes seconds; this is for a driver that never answers.
_START_S = 300


# A task hangs that has made no progress for so many times as long as its worker's tasks together
# are expected to take: a device's kernels are sometimes ten times as slow as the others were.
_STALL_FACTOR = 20


class WorkerRecipe(NamedTuple):
    """How to start a worker: in its process, ``prepare`` is called, then ``make_backend`` with the
    number of its device. It computes ``slots`` jobs at a time, or as many as its backend likes.
    ``beside`` is what front ends may compute with themselves, see `inline_executor`. Of a device's
    first worker, ``warm_up`` is called with the backend before it is ready, which may take long."""

    make_backend: Callable[[int], ServingBackend]
    slots: int | None = None
    prepare: Callable[[], None] = gc.enable  # which it is already: nothing is to be prepared
    beside: InlineBackend | None = None
    warm_up: Callable[[ServingBackend], None] | None = None


class ProcessWorker:
    """See `scheduler.Worker`. ``lost`` is set once its process has ended and is gone for good."""

    def __init__(
        self,
        recipe: WorkerRecipe,
        device: int,
        regions: RegionRegistry,
        schedule: Scheduler,
    ) -> None:
        self.slots, self.device = recipe.slots or 1, device
        self._regions = regions
        self._sent_regions: set[int] = set()
        self._used: dict[int, int] = {}  # of stored tensors' regions, the latest version
        self.greeting: Hello
        self.vitals = Vitals()
        loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[int] = loop.create_future()
        self._greeted: asyncio.Future[Hello] = loop.create_future()
        self._schedule = schedule
        self._numbers = itertools.count()
        self._tasks: dict[int, tuple[Task, int]] = {}
        self._compiling: dict[int, Task] = {}
        self._named = InternTable()
        self._brief: set[int] = set()  # of what it was told, what took it no time the last time
        self._probes: dict[int, asyncio.Future[ServiceError | None]] = {}
        self.finished = 0
        """Tasks that it has ended, in whatever way."""
        self._heartbeat = Heartbeat()
        self._progress: dict[int, int] = {}
        self._stalled_s: dict[int, float] = {}  # of each task, since it was seen to make progress
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
        schedule: Scheduler,
        reserve: DescriptorReserve,
    ) -> ProcessWorker:
        """A worker that is ready; ``reserve`` is spent where there are no descriptors else.

        Raises
        ------
        DeviceUnavailable
            Its backend cannot work here, or its process ended before it could say.
        OSError
            The system has not what a process takes.
        """
        worker = cls(recipe, device, regions, schedule)
        with reserve.spent(), contextlib.ExitStack() as failing, contextlib.ExitStack() as after:
            ours = []
            theirs = []
            for _ in range(3):
                end, other = socket.socketpair()
                ours.append(failing.enter_context(end))
                theirs.append(after.enter_context(other).fileno())
            start = Start(
                recipe.make_backend,
                recipe.prepare,
                recipe.warm_up,
                device,
                recipe.slots,
                arena.descriptor,
                *theirs,
            )
            worker._process = spawn(
                "convgrad-worker", worker_main, start, descriptors=[arena.descriptor, *theirs]
            )
            failing.pop_all()
        worker._jobs = await Channel.open(ours[0], worker._answered, worker._gone)
        worker._control = await Channel.open(ours[1], worker._said, worker._gone)
        worker._files = ours[2]
        regions.forgotten.append(worker._forget)
        try:
            async with asyncio.timeout(None if recipe.warm_up else _START_S):
                worker.greeting = await worker._greeted
        except TimeoutError:
            worker._gone()
            raise DeviceUnavailable(
                f"a worker's process did not say within {_START_S} s that it works"
            ) from None
        except ServiceError:
            worker._gone()
            await worker.lost
            raise
        except BaseException:
            worker._gone()
            raise
        worker.slots = worker.greeting.slots
        return worker

    @property
    def process_id(self) -> int:
        """Of its process."""
        return self._process.pid

    @property
    def busy(self) -> bool:
        """Whether it has tasks."""
        return bool(self._tasks)

    def start(self, task: Task) -> None:
        """See `Worker.start`."""
        number, job = next(self._numbers), task.job
        new = self._sent(job.regions) if job.regions else ()
        self._used.update((place.file, place.version) for place in job.regions if place.kept)
        named, text = self._named.name(job.layout.text)
        if text is not None:
            self._brief.discard(named)
        # Of a job in parts each takes its own time: what adds them up may be brief, and they not.
        brief = task.part is None and not self._tasks and named in self._brief
        self._tasks[number] = task, named
        regions = tuple(map(tuple, job.regions))
        order = (number, (named, text), job.base, regions, task.part, new, brief)
        self._jobs.tell_now(order)

    def has_used(self, job: Job) -> int:
        """See `Worker.has_used`."""
        return sum(self._used.get(place.file) == place.version for place in job.regions)

    def cancel(self, task: Task) -> None:
        """See `Worker.cancel`."""
        compiling = self._compiling.items()
        running = ((number, held) for number, (held, _) in self._tasks.items())
        for number, held in (*compiling, *running):
            if held is task:
                self._control.tell(Cancel(number))

    def check(self, beat_s: float, progress_timeout_s: float) -> str | None:
        """Ask whether it is alive, which is to be done every ``beat_s``; why it must be ended, if
        it is not or if a task hangs."""
        if self._heartbeat.missed():
            return f"has been silent for {MOST_MISSED * beat_s:g} s"
        self._control.tell(Ping())
        cost = sum(task.cost for task, _ in self._tasks.values())
        expected_s = self._schedule.pace.estimate_s(cost)
        longest_s = max(progress_timeout_s, _STALL_FACTOR * expected_s)
        self._stalled_s = {
            number: self._stalled_s.get(number, -beat_s) + beat_s for number in self._tasks
        }
        hung = [number for number, stalled_s in self._stalled_s.items() if stalled_s > longest_s]
        for number in hung:
            self._tasks[number][0].hung = True
        return f"has made no progress with a problem for {longest_s:g} s" if hung else None

    def end(self) -> None:
        """End its process, whatever it computes; ``lost`` says when that is done."""
        self._gone()

    async def stop(self) -> None:
        """End its process, and return once it has ended."""
        self._control.close()
        self._gone()
        await self.lost

    async def probe(self, handle: bytes, size_bytes: int) -> None:
        """Open a handle of its device's memory and close it again.

        Raises what `ServingBackend.open_handle` does, and DeviceUnavailable if it ends meanwhile.
        """
        number = next(self._numbers)
        answered = self._probes[number] = asyncio.get_running_loop().create_future()
        self._control.tell(Probe(number, handle, size_bytes))
        try:
            if (error := await answered) is not None:
                raise error
        finally:
            del self._probes[number]

    def _sent(self, regions: Sequence[InRegion]) -> Sequence[NewRegion]:
        """The regions that the worker has not opened yet; the files of those that have one are
        sent."""
        new = [
            (region, self._regions.handle(region))
            for region in sorted({region.file for region in regions} - self._sent_regions)
        ]
        # A worker that has just died takes none; then the job runs again with all the others.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for region, handle in new:
                if handle is None:
                    socket.send_fds(self._files, [b"."], [self._regions.descriptor(region)])
        self._sent_regions.update(region for region, _ in new)
        return new

    def _forget(self, region: int) -> None:
        if region in self._sent_regions:
            self._sent_regions.remove(region)
            self._used.pop(region, None)
            self._control.tell(Forget(region))

    def _answered(
        self, message: tuple[int, tuple[Any, ...] | Compiling | Compiled | BaseException]
    ) -> None:
        number, plain = message
        if isinstance(plain, Compiled):
            self._schedule.compiled(self._compiling.pop(number), plain.error)
            return
        task, named = self._tasks.pop(number)
        self.finished += 1
        if isinstance(plain, Compiling):
            self._compiling[number] = task
            self._schedule.compiling(task)
            return
        result = plain if isinstance(plain, BaseException) else Finished(*plain)
        assert task.started_s is not None  # noqa: S101
        if task.part is None and time.monotonic() - task.started_s < _BRIEF_S:
            self._brief.add(named)
        else:
            self._brief.discard(named)
        self._schedule.finished(task, result)

    def _said(self, message: Any) -> None:
        if isinstance(message, Vitals):
            self.vitals = message
            return
        if isinstance(message, Pong):
            self._heartbeat.heard()
            for number, progress in message.progress:
                if self._progress.get(number) != progress and number in self._stalled_s:
                    self._stalled_s[number] = 0.0
            self._progress = dict(message.progress)
            return
        if isinstance(message, Probed):
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

    def _gone(self) -> None:
        if self._ending is None:
            self.slots = 0  # it gets no more tasks
            self._schedule.changed()
            self._ending = asyncio.ensure_future(self._end())

    async def _end(self) -> None:
        # Not before it is dead may anybody else use the memory that it was given.
        self._process.kill()
        code = await asyncio.to_thread(self._process.wait)
        self._regions.forgotten.remove(self._forget)
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
