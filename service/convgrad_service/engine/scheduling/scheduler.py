"""The scheduler: a queue in front of all workers, and recovery of jobs whose worker died.

A worker computes two jobs at a time by default: with one slot, a request of a millisecond would
wait for someone else's minute. The last free slot of a worker is reserved for small problems; large
ones lose little by that, because each uses every core anyway. Otherwise the queue is first come,
first served. A timing runs alone on its worker, which takes no new tasks while the timing waits.

A task whose kernels must first be compiled gives up its slot for those seconds; otherwise a few
such tasks would block all others.

Jobs are pure functions of their inputs, which stay in the arena until they are done, so the jobs of
a worker that died run again. One of them may have killed it: each becomes a suspect and runs alone,
so that it cannot take others down. A job that was alone in two deaths is the cause and fails (a
single death may have been an unrelated kill). If a worker was killed because one job hung, only
that job is a suspect, and counts as alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Container, Mapping

from convgrad.errors import DeadlineExceeded, DeviceUnavailable, Overloaded
from convgrad_service.engine.scheduling.job import Job, JobResult, TaskGroup, Worker
from convgrad_service.problems.base import Lane

_RETRY_AFTER_MIN_S, _RETRY_AFTER_MAX_S = 1.0, 60.0
_DEATHS_ALONE = 2
# The initial guess of the cost per second, a modest CPU. It weighs ten microseconds, so any
# measurement outweighs it.
_FIRST_GUESS_PER_S = 2e10
# Each measurement scales older ones by this factor, so about the last twenty count.
_DECAY = 0.95


class CostModel:
    """An estimate of how long problems take, learned from those that ran.

    It sets Retry-After, tells large problems from small ones, and detects hung workers.
    """

    def __init__(self) -> None:
        self._cost = _FIRST_GUESS_PER_S * 1e-5
        self._seconds = 1e-5

    def estimate_s(self, cost: float) -> float:
        """Return the seconds that work of this cost is expected to take."""
        return cost * self._seconds / self._cost

    def learn(self, cost: float, seconds: float) -> None:
        """Record that work of this cost took ``seconds``."""
        if cost <= 0 or seconds <= 0:
            return
        self._cost = self._cost * _DECAY + cost
        self._seconds = self._seconds * _DECAY + seconds


class Task:
    """A job, or one ``part`` of it: waiting, compiling kernels, running or done.

    ``done`` is set once no worker accesses the job's memory, even if the request is gone.
    ``wanted`` is False once it was cancelled, ``hung`` once its worker is killed because of it.
    """

    def __init__(
        self, job: Job, deadline_s: float, *, large: bool, part: int | None = None
    ) -> None:
        self.job, self.deadline_s, self.large, self.part = job, deadline_s, large, part
        self.cost = job.layout.cost
        if part is not None:
            # The last part adds up partial sums: little work, and no measure of a problem's speed.
            self.cost = self.cost / job.tasks if part < job.tasks else 0.0
        self.device = job.device if job.regions else None
        self.lane = job.layout.problem.lane
        self.done: asyncio.Future[JobResult] = asyncio.get_running_loop().create_future()
        self.wanted = True
        self.suspect = self.hung = False
        self.deaths_alone = 0
        self.submitted_s = time.monotonic()
        self.started_s: float | None = None
        self.worker: Worker[Task] | None = None

    @property
    def waited_s(self) -> float | None:
        """Seconds from submission to start; None until it starts."""
        return None if self.started_s is None else self.started_s - self.submitted_s

    @property
    def alone(self) -> bool:
        """Whether it must be the only task of its worker."""
        return self.suspect or self.lane is Lane.ALONE

    def fail(self, error: BaseException) -> None:
        """End it with an error, unless it has ended."""
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # mark it as retrieved: the submitter may be gone


class WorkerLost(Exception):
    """The job was alone in workers that died twice."""


class Scheduler:
    """The queue in front of all workers. For the event loop's thread.

    ``changed`` is called whenever the queue or the workers may have changed; ``deaths`` counts lost
    workers; ``lines`` has the number of requests that wait for admission, by front end.
    """

    def __init__(
        self, max_waiting: int, *, large_s: float = 1.0, cost_model: CostModel | None = None
    ) -> None:
        self.max_waiting = max_waiting
        self.cost_model = cost_model or CostModel()
        self.changed: Callable[[], None] = lambda: None
        self.deaths = 0
        self.lines: dict[object, int] = {}
        self._large_s = large_s
        self._waiting: deque[Task] = deque()
        self._running: dict[Worker[Task], list[Task]] = {}
        self._compiling: dict[Task, Worker[Task]] = {}
        self._closed = False

    @property
    def waiting(self) -> int:
        """Jobs waiting for a slot or for kernels; jobs in parts count until one part starts."""
        return sum(not task.part for tasks in (self._waiting, self._compiling) for task in tasks)

    @property
    def running(self) -> int:
        """Tasks that run."""
        return sum(len(tasks) for tasks in self._running.values())

    @property
    def by_device(self) -> Mapping[int, Worker[Task]]:
        """All workers, by device."""
        return {worker.device: worker for worker in self._running}

    @property
    def workers(self) -> int:
        """Workers that accept tasks."""
        return sum(worker.slots > 0 for worker in self._running)

    @property
    def slots(self) -> int:
        """Tasks that all workers compute at a time."""
        return sum(worker.slots for worker in self._running)

    @property
    def room(self) -> int:
        """How many more jobs may be queued."""
        left = self.max_waiting - len(self._waiting) - len(self._compiling)
        return left if left > 0 else self.max_waiting - self.waiting

    @property
    def timing(self) -> bool:
        """Whether a timing is running."""
        return any(task.lane is Lane.ALONE for held in self._running.values() for task in held)

    @property
    def full(self) -> bool:
        """Whether the queue is full."""
        return self.room <= 0

    @property
    def overload(self) -> Overloaded | None:
        """The error for one more job; None if it would be queued."""
        if not self.full:
            return None
        tasks = [*self._waiting, *(task for held in self._running.values() for task in held)]
        seconds = self.cost_model.estimate_s(sum(task.cost for task in tasks)) / (self.slots or 1)
        return Overloaded(
            f"{self.waiting} problems are queued; the limit is {self.max_waiting}",
            retry_after_s=min(max(seconds, _RETRY_AFTER_MIN_S), _RETRY_AFTER_MAX_S),
        )

    def submit(self, job: Job, deadline_s: float) -> Task | TaskGroup[Task]:
        """Queue a job, to be started before ``deadline_s`` (of time.monotonic()) or not at all.

        Raises
        ------
        Overloaded
            The queue is full.
        DeviceUnavailable
            The server is shutting down.
        """
        if self._closed:
            raise DeviceUnavailable("the server is shutting down", retry_after_s=5.0)
        if self.full and (overload := self.overload) is not None:
            raise overload
        large = (
            job.layout.problem.lane is not Lane.BY_SIZE
            or self.cost_model.estimate_s(job.layout.cost) > self._large_s
        )
        if job.tasks == 1:
            task = Task(job, deadline_s, large=large)
            if not self._waiting and self._started(task):
                if task.lane is Lane.ALONE:
                    self.changed()
                return task  # the queue has not changed
            self._waiting.append(task)
            self._dispatch()
            return task
        parts = [Task(job, deadline_s, large=large, part=part) for part in range(job.tasks)]
        last = (lambda: self._last(job, deadline_s)) if job.sums else None
        group = TaskGroup(parts, self.cancel, last)
        self._waiting.extend(parts)
        self._dispatch()
        return group

    def position(self, task: Task | TaskGroup[Task]) -> int | None:
        """Return how many tasks are ahead in the queue; None once it runs or is done."""
        if isinstance(task, TaskGroup):
            task = task.tasks[0]
        if task in self._compiling:
            return 0
        return self._waiting.index(task) if task in self._waiting else None

    def cancel(self, task: Task | TaskGroup[Task]) -> None:
        """Drop a waiting job, or ask a running one to stop; does nothing once it is done."""
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

    def add(self, worker: Worker[Task]) -> None:
        """Add a worker."""
        self._running[worker] = []
        self._dispatch()

    def finished(self, task: Task, result: JobResult | BaseException) -> None:
        """Record that a worker has finished a task."""
        assert task.worker is not None and task.started_s is not None  # noqa: PT018, S101
        self._running[task.worker].remove(task)
        task.worker = None
        if isinstance(result, BaseException):
            task.fail(result)
        elif not task.done.done():
            if task.lane is Lane.BY_SIZE:
                self.cost_model.learn(task.cost, time.monotonic() - task.started_s)
            task.done.set_result(result)
        if self._waiting or task.lane is Lane.ALONE:
            self._dispatch()

    def compiling(self, task: Task) -> None:
        """Free a task's slot while its kernels are compiled, until `compiled` is called."""
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
        """Requeue a task whose kernels are compiled, first in line, or fail it with ``error``."""
        if self._compiling.pop(task, None) is None:
            return  # it was cancelled
        if error is not None:
            task.fail(error)
        else:
            self._waiting.appendleft(task)
        self._dispatch()

    def lost(self, worker: Worker[Task]) -> None:
        """Remove a worker that died, and requeue or fail its tasks."""
        held = self._running.pop(worker, [])
        for task in [task for task, by in self._compiling.items() if by is worker]:
            del self._compiling[task]
            self._waiting.appendleft(task)
        self.deaths += 1
        culprit_known = any(task.hung for task in held)
        for task in reversed(held):
            task.worker = None
            task.suspect |= task.hung or not culprit_known
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
        """Fail all waiting tasks: no worker will ever run them."""
        waiting = [*self._waiting, *self._compiling]
        self._waiting.clear()
        self._compiling.clear()
        for task in waiting:
            task.fail(error)
        self.changed()

    def close(self) -> None:
        """Drop waiting jobs, ask running ones to stop, and accept no more."""
        self._closed = True
        running = (task for held in self._running.values() for task in held)
        for task in [*self._waiting, *self._compiling, *running]:
            self.cancel(task)

    def _last(self, job: Job, deadline_s: float) -> Task:
        """Queue the task that adds up partial sums first in line: it is short, and frees memory."""
        task = Task(job, deadline_s, large=False, part=job.tasks)
        if self._closed:
            task.done.cancel()
        else:
            self._waiting.appendleft(task)
            self._dispatch()
        return task

    def _dispatch(self) -> None:
        if self._waiting:
            self._start_ready()
        self.changed()

    def _start_ready(self) -> None:
        """Start every waiting task that a worker can take now."""
        # A task that must run alone would never find an idle worker under load, so the least busy
        # one is reserved for it until it is idle.
        reserved: set[Worker[Task]] = set()
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
            if self._started(task, reserved):
                self._waiting.remove(task)
            elif task.lane is Lane.ALONE:
                able = [
                    worker
                    for worker in self._running
                    if worker not in reserved and task.device in (None, worker.device)
                ]
                if able:
                    reserved.add(min(able, key=lambda worker: len(self._running[worker])))

    def _started(self, task: Task, reserved: Container[Worker[Task]] = ()) -> bool:
        """Start a task if a worker that is not ``reserved`` can take it now.

        Takes the least busy worker; among several, one that may have its stored tensors on device.
        """
        now_s = time.monotonic()
        able = [
            worker
            for worker in self._running
            if worker not in reserved and self._may_start(worker, task)
        ]
        if not able or now_s >= task.deadline_s:
            return False
        worker = able[0]
        if len(able) > 1:
            worker = min(able, key=lambda by: (len(self._running[by]), -by.has_used(task.job)))
        self._running[worker].append(task)
        task.worker, task.started_s = worker, now_s
        worker.start(task)
        return True

    def _free_slots(self) -> bool:
        return any(len(held) < worker.slots for worker, held in self._running.items())

    def _may_start(self, worker: Worker[Task], task: Task) -> bool:
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
