"""Which waiting job computes next and where, how many may wait, and what a worker's death means.

Two slots a worker by default: with one, a request of a millisecond would wait for a stranger's of
a minute. The last free slot is kept for small problems, else two large ones would shut the small
ones out just as one does; a large problem loses little by that, for it already has every core.
Within those rules the order is that of arrival. A timing runs alone on its worker, which takes
nothing new from when the timing's turn has come.

A job whose kernels must be compiled first gives its slot back meanwhile: that takes seconds, which
other processes spend, and as many such jobs as there are slots would keep all others waiting.

Every job is a pure function of its inputs, which stay in the arena until it is done. So when a
worker dies, what it held runs again. One of those jobs may have killed it: each is a suspect, and
runs with nothing beside it, so that it can take no other along. One that is alone in two deaths is
the cause (in one death alone it may have met someone else's kill) and is not tried again. Where a
worker was ended because a job in it hung, that one alone is the suspect, and counts as alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Container
from typing import Protocol

from convgrad.errors import DeadlineExceeded, DeviceUnavailable, Overloaded
from convgrad_service.engine.scheduling.cost_model import CostModel
from convgrad_service.engine.scheduling.partition import OnPartDone, TaskGroup
from convgrad_service.engine.workers.execute import Finished, Job
from convgrad_service.problems.base import Lane

__all__ = ["Scheduler", "Task", "Worker", "WorkerLost"]

_RETRY_AFTER_MIN_S, _RETRY_AFTER_MAX_S = 1.0, 60.0
_DEATHS_ALONE = 2


class WorkerLost(Exception):
    """The worker that computed this job alone died, again."""


class Task:
    """One job, or one ``part`` of it: waiting, running or done.

    ``done`` is set once no worker touches the job's memory any more, also when nobody waits for
    the answer by then. ``waited_s`` is None until it starts.
    """

    def __init__(
        self, job: Job, deadline_s: float, *, large: bool, part: int | None = None
    ) -> None:
        self.job, self.deadline_s, self.large, self.part = job, deadline_s, large, part
        self.cost = _cost(job, part)
        self.device = job.device
        self.done: asyncio.Future[Finished] = asyncio.get_running_loop().create_future()
        self.wanted = True
        self.suspect = self.hung = False
        self.lane = job.lane
        self.deaths_alone = 0
        self.submitted_s = time.monotonic()
        self.started_s: float | None = None
        self.worker: Worker | None = None

    @property
    def waited_s(self) -> float | None:
        return None if self.started_s is None else self.started_s - self.submitted_s

    @property
    def alone(self) -> bool:
        """Whether nothing may run beside it."""
        return self.suspect or self.lane is Lane.ALONE

    def fail(self, error: BaseException) -> None:
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # whoever asked may have left


def _cost(job: Job, part: int | None) -> float:
    if part is None:
        return job.cost
    # What adds up the others' results is little, and says nothing of how fast a problem computes.
    return job.cost / job.tasks if part < job.tasks else 0.0


class Worker(Protocol):
    """What computes, as the schedule sees it; it calls `Scheduler.finished` for each task.

    Or, where kernels are compiled first, `Scheduler.compiling` and then `Scheduler.compiled`. One
    without ``slots`` gets no more tasks: it is about to end.
    """

    slots: int
    device: int

    def start(self, task: Task) -> None:
        """Begin to compute a task; at most ``slots`` at a time."""
        ...

    def cancel(self, task: Task) -> None:
        """Tell it that nobody wants a task any more that it runs or compiles kernels for."""
        ...

    def has_used(self, job: Job) -> int:
        """How many of a job's stored tensors it has computed with, or computed."""
        ...


class Scheduler:
    """The line in front of all workers. For the loop's thread.

    ``changed`` is called whenever what waits or who computes may have changed; ``deaths`` counts
    the workers that were lost.
    """

    def __init__(
        self, max_waiting: int, *, large_s: float = 1.0, pace: CostModel | None = None
    ) -> None:
        self.max_waiting = max_waiting
        self.pace = pace or CostModel()
        self.changed: Callable[[], None] = lambda: None
        self.deaths = 0
        self._large_s = large_s
        self._waiting: deque[Task] = deque()
        self._running: dict[Worker, list[Task]] = {}
        self._compiling: dict[Task, Worker] = {}
        self._closed = False

    @property
    def waiting(self) -> int:
        """Jobs that wait for a slot, or for kernels; of those in parts, the ones of which none has
        begun."""
        return sum(not task.part for tasks in (self._waiting, self._compiling) for task in tasks)

    @property
    def running(self) -> int:
        """Jobs that compute."""
        return sum(len(tasks) for tasks in self._running.values())

    @property
    def workers(self) -> int:
        """Workers that take jobs now."""
        return sum(worker.slots > 0 for worker in self._running)

    @property
    def room(self) -> int:
        """How many more jobs may wait, at least."""
        left = self.max_waiting - len(self._waiting) - len(self._compiling)
        return left if left > 0 else self.max_waiting - self.waiting

    @property
    def timing(self) -> bool:
        """Whether something runs that nothing may run beside."""
        return any(task.lane is Lane.ALONE for held in self._running.values() for task in held)

    @property
    def full(self) -> bool:
        """Whether as many jobs wait as may."""
        return self.room <= 0

    @property
    def overload(self) -> Overloaded | None:
        """What one more job would be refused with, if it would be."""
        if not self.full:
            return None
        tasks = [*self._waiting, *(task for held in self._running.values() for task in held)]
        slots = sum(worker.slots for worker in self._running) or 1
        seconds = self.pace.estimate_s(sum(task.cost for task in tasks)) / slots
        return Overloaded(
            f"{self.waiting} problems wait to be computed, and no more than {self.max_waiting} may",
            retry_after_s=min(max(seconds, _RETRY_AFTER_MIN_S), _RETRY_AFTER_MAX_S),
        )

    def submit(
        self, job: Job, deadline_s: float, told: OnPartDone | None = None
    ) -> Task | TaskGroup[Task]:
        """Queue a job; after ``deadline_s``, a time.monotonic(), it is not worth starting.

        ``told`` hears of each part of a job that makes several tasks.

        Raises
        ------
        Overloaded
            As many problems wait as may.
        DeviceUnavailable
            The server is ending.
        """
        if self._closed:
            raise DeviceUnavailable("the server is shutting down", retry_after_s=5.0)
        if self.full and (overload := self.overload) is not None:
            raise overload
        large = job.lane is not Lane.BY_SIZE or self.pace.estimate_s(job.cost) > self._large_s
        if job.tasks == 1:
            task = Task(job, deadline_s, large=large)
            if not self._waiting and self._started(task):
                if task.lane is Lane.ALONE:
                    self.changed()
                return task  # else without having waited, which nobody else need know of
            self._waiting.append(task)
            self._dispatch()
            return task
        parts = [Task(job, deadline_s, large=large, part=part) for part in range(job.tasks)]
        last = (lambda: self._last(job, deadline_s)) if job.sums else None
        whole = TaskGroup(parts, told, self.cancel, last)
        self._waiting.extend(parts)
        self._dispatch()
        return whole

    def position(self, task: Task | TaskGroup[Task]) -> int | None:
        """How many tasks stand before this in the line; None once it runs or is done."""
        if isinstance(task, TaskGroup):
            task = task.tasks[0]
        if task in self._compiling:
            return 0
        return self._waiting.index(task) if task in self._waiting else None

    def cancel(self, task: Task | TaskGroup[Task]) -> None:
        """Take back a waiting job; ask a running one to stop. Harmless when it is done."""
        if isinstance(task, TaskGroup):
            task.wanted = False
            for part in task.tasks:
                self.cancel(part)
            return
        task.wanted = False
        if task.worker is not None:
            task.worker.cancel(task)
            return
        if (worker := self._compiling.pop(task, None)) is not None:
            worker.cancel(task)
        with contextlib.suppress(ValueError):
            self._waiting.remove(task)
        task.done.cancel()
        self._dispatch()

    def add(self, worker: Worker) -> None:
        """Give a worker jobs from now on."""
        self._running[worker] = []
        self._dispatch()

    def finished(self, task: Task, result: Finished | BaseException) -> None:
        """A worker is done with a task."""
        assert task.worker is not None and task.started_s is not None  # noqa: PT018, S101
        self._running[task.worker].remove(task)
        task.worker = None
        if isinstance(result, BaseException):
            task.fail(result)
        elif not task.done.done():
            if task.lane is Lane.BY_SIZE:
                self.pace.learn(task.cost, time.monotonic() - task.started_s)
            task.done.set_result(result)
        if self._waiting or task.lane is Lane.ALONE:
            self._dispatch()

    def compiling(self, task: Task) -> None:
        """A worker has put a task aside until its kernels are compiled, see `compiled`."""
        assert task.worker is not None  # noqa: S101
        self._running[task.worker].remove(task)
        if task.wanted:
            self._compiling[task] = task.worker
        else:
            task.worker.cancel(task)
            task.done.cancel()
        task.worker = task.started_s = None
        self._dispatch()

    def compiled(self, task: Task, error: BaseException | None) -> None:
        """A worker has compiled a task's kernels, so that any may run it next, or could not."""
        if self._compiling.pop(task, None) is None:
            return  # nobody waits for it any more
        if error is not None:
            task.fail(error)
        else:
            self._waiting.appendleft(task)
        self._dispatch()

    def lost(self, worker: Worker) -> None:
        """A worker has died: what it held runs again, or is refused for having killed it."""
        held = self._running.pop(worker, [])
        for task in [task for task, by in self._compiling.items() if by is worker]:
            del self._compiling[task]
            self._waiting.appendleft(task)
        self.deaths += 1
        known = any(task.hung for task in held)
        for task in reversed(held):
            task.worker = None
            task.suspect |= task.hung or not known
            task.deaths_alone += task.hung or len(held) == 1
            task.hung = False
            if not task.wanted:
                task.done.cancel()
            elif task.deaths_alone >= _DEATHS_ALONE:
                task.fail(WorkerLost("alone in two workers that ended"))
            else:
                self._waiting.appendleft(task)
        self._dispatch()

    def refuse_all(self, error: BaseException) -> None:
        """Fail what waits: nothing will ever compute it."""
        waiting = [*self._waiting, *self._compiling]
        self._waiting.clear()
        self._compiling.clear()
        for task in waiting:
            task.fail(error)
        self.changed()

    def close(self) -> None:
        """Drop what waits, ask what runs to stop, take no more."""
        self._closed = True
        running = (task for held in self._running.values() for task in held)
        for task in [*self._waiting, *self._compiling, *running]:
            self.cancel(task)

    def _last(self, job: Job, deadline_s: float) -> Task:
        """Queue what adds up a job's parts, before all that waits: it holds more memory than
        others, and takes less time."""
        task = Task(job, deadline_s, large=False, part=job.tasks)
        if self._closed:
            task.done.cancel()
        else:
            self._waiting.appendleft(task)
            self._dispatch()
        return task

    def _dispatch(self) -> None:
        if self._waiting:
            self._start_what_may()
        self.changed()

    def _start_what_may(self) -> None:
        # What is to run alone would wait for ever beside those that keep coming: a worker takes
        # nothing new until it has become idle for it.
        kept: set[Worker] = set()
        for task in list(self._waiting):
            if time.monotonic() >= task.deadline_s:
                self._waiting.remove(task)
                waited_s = time.monotonic() - task.submitted_s
                task.fail(
                    DeadlineExceeded(
                        f"the deadline passed while the problem waited {waited_s:.3f} s to start"
                    )
                )
                continue
            if not self._free_slots():
                return
            if self._started(task, kept):
                self._waiting.remove(task)
            elif task.lane is Lane.ALONE:
                kept.update(self._idlest(task, kept))

    def _idlest(self, task: Task, kept: Container[Worker]) -> list[Worker]:
        """The worker that will be the first to be idle, of those that may take a task."""
        able = [
            worker
            for worker in self._running
            if worker not in kept and task.device in (None, worker.device)
        ]
        return sorted(able, key=lambda worker: len(self._running[worker]))[:1]

    def _started(self, task: Task, kept: Container[Worker] = ()) -> bool:
        """Start a task, if a worker may take it now: on the one that has the least to do, and of
        several such on the one that may still have its stored tensors on its device.

        Workers that are ``kept`` for another take none.
        """
        now_s = time.monotonic()
        able = [
            worker
            for worker in self._running
            if worker not in kept and self._may_start(worker, task)
        ]
        if not able or now_s >= task.deadline_s:
            return False
        worker = able[0]
        if len(able) > 1:
            least = min(len(self._running[each]) for each in able)
            idlest = [each for each in able if len(self._running[each]) == least]
            worker = idlest[0]
            if len(idlest) > 1 and task.job.regions:
                worker = max(idlest, key=lambda each: each.has_used(task.job))
        self._running[worker].append(task)
        task.worker, task.started_s = worker, now_s
        worker.start(task)
        return True

    def _free_slots(self) -> bool:
        return any(len(held) < worker.slots for worker, held in self._running.items())

    def _may_start(self, worker: Worker, task: Task) -> bool:
        held = self._running[worker]
        if task.device is not None and task.device != worker.device:
            return False
        if len(held) >= worker.slots:
            return False
        if not held:
            return True
        if task.alone or any(other.alone for other in held):
            return False
        return not task.large or sum(other.large for other in held) < max(1, worker.slots - 1)
