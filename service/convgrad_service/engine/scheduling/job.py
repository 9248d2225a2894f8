"""Jobs, their results, and what the scheduler needs of workers."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Generic, NamedTuple, Protocol, TypeVar

from convgrad.errors import InvalidProblem
from convgrad_service.backends.base import Outcome, Vitals
from convgrad_service.engine.memory.tensor_layout import PlacedTensor, TensorLayout, pieces_of
from convgrad_service.engine.shm.mappings import not_in_place
from convgrad_service.engine.shm.registry import RegionSlice


class JobResult(NamedTuple):
    """How a job, or one part of it, was computed; see `Outcome`. The outputs are in its memory."""

    kernel: str
    compute_s: float
    pieces: int
    workspace_bytes: int
    upload_s: float
    download_s: float
    report_json: bytes = b""


def merge_results(results: Sequence[JobResult], elapsed_s: float = math.inf) -> JobResult:
    """Merge results of parts; if those ran in parallel, scale their times to ``elapsed_s``."""
    total_s = sum(part.compute_s + part.upload_s + part.download_s for part in results)
    scale = min(1.0, elapsed_s / total_s) if total_s > 0 else 1.0
    return JobResult(
        results[0].kernel,
        scale * sum(part.compute_s for part in results),
        sum(part.pieces for part in results),
        max(part.workspace_bytes for part in results),
        scale * sum(part.upload_s for part in results),
        scale * sum(part.download_s for part in results),
    )


class Job(NamedTuple):
    """A problem to compute: its layout, and where that is in memory.

    Attributes
    ----------
    base
        The offset of the lease in the arena.
    regions
        The shared memory that it uses, in the layout's order.
    tasks
        The number of parts that are scheduled separately.
    """

    layout: TensorLayout
    base: int
    regions: tuple[RegionSlice, ...] = ()
    tasks: int = 1

    @property
    def sums(self) -> bool:
        """Whether a last task adds up partial sums."""
        return self.tasks > 1 and bool(self.layout.partial_sums)

    @property
    def device(self) -> int | None:
        """The device whose memory it uses, None if any will do.

        Raises InvalidProblem if it uses the memory of several.
        """
        devices = {each.device for each in self.regions} - {None}
        if len(devices) > 1:
            listed = " and ".join(map(str, sorted(each for each in devices if each is not None)))
            raise InvalidProblem(f"the tensors are on the devices {listed}; expected one device")
        return next(iter(devices), None)


def count_tasks(layout: TensorLayout, regions: tuple[RegionSlice, ...]) -> int:
    """Return how many tasks a problem in parts is scheduled as.

    It is one if outputs may overlap inputs in a client's memory, which one part could overwrite
    before another reads them, or if inputs must first be copied to the arena.
    """
    outputs = {tensor.name for tensor in layout.outputs}
    if any(map(is_copied, layout.inputs)) or outputs & not_in_place_of(layout, regions):
        return 1
    return len(pieces_of(layout.problem, layout.parts))


def is_copied(tensor: PlacedTensor) -> bool:
    """Return whether a tensor in shared memory is copied to the arena before it is used."""
    return tensor.offset is not None and tensor.region is not None


@lru_cache(maxsize=256)
def not_in_place_of(layout: TensorLayout, regions: tuple[RegionSlice, ...]) -> frozenset[str]:
    """Return the tensors in shared memory that cannot be computed in place; see `not_in_place`."""
    shared = [tensor for tensor in (*layout.inputs, *layout.outputs) if tensor.offset is None]
    found = not_in_place(
        {name: regions[region] for name, _, _, region in shared if region is not None},
        layout.problem.outputs,
        {tensor.name: tensor.spec for tensor in shared},
    )
    return frozenset(found)


class JobHandle(Protocol):
    """A submitted job. ``done`` is set once nothing accesses its memory any longer."""

    done: asyncio.Future[JobResult]

    @property
    def waited_s(self) -> float | None:
        """Seconds from submission to start; None until it starts, or if unknown."""
        ...


class _Started(JobHandle, Protocol):
    started_s: float | None


TaskT = TypeVar("TaskT", bound=_Started)
AnyTask = TypeVar("AnyTask", contravariant=True)


class Worker(Protocol[AnyTask]):
    """What the scheduler needs of a worker.

    The worker calls `Scheduler.finished` for each task or, if kernels must be compiled first,
    `Scheduler.compiling` and later `Scheduler.compiled`. With ``slots`` 0 it gets no more tasks.
    """

    slots: int
    device: int

    @property
    def vitals(self) -> Vitals:
        """What it last reported about its device."""
        ...

    def start(self, task: AnyTask) -> None:
        """Start a task; the scheduler starts at most ``slots`` at a time."""
        ...

    def cancel(self, task: AnyTask) -> None:
        """Stop a task that it runs or compiles kernels for."""
        ...

    def has_used(self, job: Job) -> int:
        """Return how many of a job's stored tensors it may still have on its device."""
        ...

    async def probe(self, handle: bytes, size_bytes: int) -> None:
        """Check that its device's memory can be opened by ``handle``.

        Raises as `ServingBackend.open_handle`, and DeviceUnavailable if the worker ends.
        """
        ...


class TaskGroup(Generic[TaskT]):
    """A job whose parts are separate tasks; to its submitter it looks like a single `Task`.

    ``cancel`` is called with every unfinished task once one has failed. ``last`` starts a final
    task, which adds up partial sums, once all others are done.
    """

    def __init__(
        self,
        tasks: Sequence[TaskT],
        cancel: Callable[[TaskT], None],
        last: Callable[[], TaskT] | None = None,
    ) -> None:
        self.tasks: list[TaskT] = []
        self.wanted = True
        self._cancel = cancel
        self._error: BaseException | None = None
        for task in tasks:
            self._add(task)
        self.done: asyncio.Future[JobResult] = asyncio.ensure_future(self._run(last))
        self.done.add_done_callback(lambda done: done.cancelled() or done.exception())

    @property
    def waited_s(self) -> float | None:
        """How long the first task waited to start; None if none has started."""
        waits = [task.waited_s for task in self.tasks if task.waited_s is not None]
        return min(waits, default=None)

    async def _run(self, last: Callable[[], TaskT] | None) -> JobResult:
        await asyncio.wait([task.done for task in self.tasks])
        if last is not None and self._error is None:
            if not self.wanted:
                raise asyncio.CancelledError
            self._add(last())
            await asyncio.wait([self.tasks[-1].done])
        if self._error is not None:
            raise self._error
        elapsed_s = time.monotonic() - min(task.started_s or math.inf for task in self.tasks)
        return merge_results([task.done.result() for task in self.tasks], elapsed_s)

    def _add(self, task: TaskT) -> None:
        task.done.add_done_callback(self._task_done)
        self.tasks.append(task)

    def _task_done(self, done: asyncio.Future[JobResult]) -> None:
        error = asyncio.CancelledError() if done.cancelled() else done.exception()
        if error is None or self._error is not None:
            return
        self._error = error
        for task in self.tasks:
            if not task.done.done():
                self._cancel(task)


def result_of(outcome: Outcome) -> JobResult:
    """Return the result of a job that a backend has computed."""
    return JobResult(*(getattr(outcome, name) for name in JobResult._fields))
