"""The scheduler: order, lanes, limits, cancellation, deadlines, and worker deaths."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from convgrad.errors import DeadlineExceeded, DeviceUnavailable, Overloaded
from convgrad_service.engine.scheduling.scheduler import CostModel, Scheduler, Task, WorkerLost
from convgrad_service.engine.shm.registry import RegionSlice
from tests.support.scheduling import DONE, Recorder, job, known_pace, run, submit


def finish(schedule: Scheduler, worker: Recorder, result: Any = DONE) -> Task:
    task = worker.held.pop(0)
    schedule.finished(task, result)
    return task


def test_jobs_run_in_order_and_return_results() -> None:
    async def scenario() -> None:
        schedule, worker = Scheduler(10), Recorder()
        early = submit(schedule)
        schedule.add(worker)
        tasks = [early, *(submit(schedule) for _ in range(3))]
        assert (schedule.running, schedule.waiting) == (1, 3)
        assert [finish(schedule, worker) for _ in tasks] == tasks
        assert tasks[0].done.result() is DONE
        assert tasks[1].waited_s is not None
        failing = submit(schedule)
        finish(schedule, worker, ZeroDivisionError())
        assert isinstance(failing.done.exception(), ZeroDivisionError)

    run(scenario())


def test_full_queue_refuses_with_retry_after() -> None:
    async def scenario() -> None:
        schedule, worker = Scheduler(2, cost_model=known_pace(100.0), large_s=100.0), Recorder()
        schedule.add(worker)
        submit(schedule, 500)
        submit(schedule, 300)
        assert schedule.overload is None
        submit(schedule, 200)
        with pytest.raises(Overloaded) as refused:
            submit(schedule)
        assert refused.value.retry_after_s == pytest.approx(10.0, rel=0.05)
        assert schedule.overload is not None

    run(scenario())


def test_large_jobs_leave_the_last_slot_free() -> None:
    async def scenario() -> None:
        schedule, worker = Scheduler(10, cost_model=known_pace(1.0)), Recorder(slots=2)
        schedule.add(worker)
        first, second, small = submit(schedule, 10), submit(schedule, 10), submit(schedule, 0)
        assert worker.held == [first, small]
        finish(schedule, worker)
        assert worker.held == [small, second]
        alone = Recorder(slots=1)
        only = Scheduler(10, cost_model=known_pace(1.0))
        only.add(alone)
        assert alone.held == [submit(only, 100)]

    run(scenario())


def test_the_least_busy_worker_is_next() -> None:
    async def scenario() -> None:
        schedule, workers = Scheduler(10), [Recorder(slots=2), Recorder(slots=2)]
        for worker in workers:
            schedule.add(worker)
        for _ in range(4):
            submit(schedule)
        assert [len(worker.held) for worker in workers] == [2, 2]
        finish(schedule, workers[1])
        assert submit(schedule) in workers[1].held

    run(scenario())


def test_cancelling_waiting_and_running_jobs() -> None:
    async def scenario() -> None:
        schedule, worker = Scheduler(10), Recorder()
        schedule.add(worker)
        running, waiting = submit(schedule), submit(schedule)
        schedule.cancel(waiting)
        assert waiting.done.cancelled()
        schedule.cancel(running)
        assert worker.cancelled == [running]
        assert not running.done.done()  # its memory is still in use
        finish(schedule, worker)
        assert running.done.done()
        assert (worker.held, schedule.waiting) == ([], 0)

    run(scenario())


def test_a_job_past_its_deadline_does_not_start() -> None:
    async def scenario() -> None:
        schedule, worker = Scheduler(10), Recorder()
        schedule.add(worker)
        submit(schedule)
        late = submit(schedule, deadline_s=time.monotonic() + 0.01)
        await asyncio.sleep(0.02)
        finish(schedule, worker)
        assert isinstance(late.done.exception(), DeadlineExceeded)
        assert worker.held == []

    run(scenario())


def test_close_cancels_waiting_and_running_jobs() -> None:
    async def scenario() -> None:
        schedule, worker = Scheduler(10), Recorder()
        schedule.add(worker)
        running, waiting = submit(schedule), submit(schedule)
        schedule.close()
        assert worker.cancelled == [running]
        assert waiting.done.cancelled()
        with pytest.raises(DeviceUnavailable, match="shutting down"):
            submit(schedule)

    run(scenario())


def test_tasks_of_a_dead_worker_run_again_first_and_alone() -> None:
    async def scenario() -> None:
        schedule, first = Scheduler(10), Recorder(slots=3)
        schedule.add(first)
        held = [submit(schedule) for _ in range(3)]
        waiting = submit(schedule)
        schedule.cancel(held[1])
        schedule.lost(first)
        assert held[1].done.cancelled()  # it was cancelled, so it does not run again
        fresh = Recorder(slots=3)
        schedule.add(fresh)
        assert fresh.held == [held[0]]  # alone, although there are free slots
        finish(schedule, fresh)
        assert fresh.held == [held[2]]
        finish(schedule, fresh)
        assert fresh.held == [waiting]

    run(scenario())


def test_job_alone_in_two_deaths_fails() -> None:
    async def scenario() -> None:
        schedule, worker = Scheduler(10), Recorder(slots=2)
        schedule.add(worker)
        killer, other = submit(schedule), submit(schedule)
        deaths = 0
        while not killer.done.done():
            schedule.lost(worker)
            deaths += 1
            worker = Recorder(slots=2)
            schedule.add(worker)
            assert deaths < 9
            if not killer.done.done():
                assert worker.held == [killer]
        assert deaths == 3  # once with others, twice alone
        assert isinstance(killer.done.exception(), WorkerLost)
        assert worker.held == [other]
        finish(schedule, worker)
        assert other.done.result() is DONE

    run(scenario())


def test_only_the_hung_job_is_a_suspect() -> None:
    async def scenario() -> None:
        schedule, worker = Scheduler(10), Recorder(slots=2)
        schedule.add(worker)
        hung, other = submit(schedule), submit(schedule)
        hung.hung = True
        schedule.lost(worker)
        fresh = Recorder(slots=2)
        schedule.add(fresh)
        assert (hung.suspect, other.suspect) == (True, False)
        assert fresh.held == [hung]
        schedule.lost(fresh)
        assert isinstance(hung.done.exception(), WorkerLost)  # it hung once and died alone once
        last = Recorder(slots=2)
        schedule.add(last)
        assert last.held == [other]

    run(scenario())


def test_worker_without_slots_gets_no_tasks() -> None:
    async def scenario() -> None:
        schedule, ending = Scheduler(10), Recorder(slots=2)
        schedule.add(ending)
        ending.slots = 0
        task = submit(schedule)
        assert (ending.held, schedule.workers, schedule.waiting) == ([], 0, 1)
        schedule.lost(ending)
        fresh = Recorder()
        schedule.add(fresh)
        assert fresh.held == [task]

    run(scenario())


def test_jobs_wait_without_workers_until_refused() -> None:
    async def scenario() -> None:
        schedule = Scheduler(10)
        task = submit(schedule)
        assert not task.done.done()
        schedule.refuse_all(DeviceUnavailable("gone"))
        assert isinstance(task.done.exception(), DeviceUnavailable)
        assert schedule.waiting == 0

    run(scenario())


def test_cost_model_follows_measurements() -> None:
    pace = CostModel()
    for _ in range(100):
        pace.learn(cost=1e9, seconds=2.0)
    assert pace.estimate_s(5e8) == pytest.approx(1.0, rel=0.01)
    for _ in range(100):
        pace.learn(cost=1e9, seconds=0.5)
    assert pace.estimate_s(5e8) == pytest.approx(0.25, rel=0.05)


def test_idle_worker_with_the_stored_tensors_is_preferred() -> None:
    async def scenario() -> None:
        schedule = Scheduler(9)
        workers = [Recorder(2), Recorder(2, used=1), Recorder(2, used=2)]
        for worker in workers:
            schedule.add(worker)
        with_tensors = job()._replace(regions=(RegionSlice(1, 0, stored=True),))
        until_s = time.monotonic() + 60
        for expected in (2, 1, 0, 2):
            before = len(workers[expected].held)
            schedule.submit(with_tensors, until_s)
            assert len(workers[expected].held) == before + 1
        submit(schedule)  # without stored tensors: the first of the least busy
        assert [len(worker.held) for worker in workers] == [2, 1, 2]

    run(scenario())


def test_compiling_job_frees_its_slot() -> None:
    async def scenario() -> None:
        schedule, worker = Scheduler(2), Recorder()
        schedule.add(worker)
        cold, warm = submit(schedule), submit(schedule)
        schedule.compiling(worker.held.pop(0))
        assert worker.held == [warm]
        assert cold.waited_s is None
        # It counts as waiting.
        later = submit(schedule)
        assert schedule.waiting == 2
        with pytest.raises(Overloaded):
            submit(schedule)
        schedule.compiled(cold, None)
        finish(schedule, worker)
        assert worker.held == [cold], "before those that came later"
        finish(schedule, worker)
        assert worker.held == [later]
        assert cold.done.result() is DONE

    run(scenario())


def test_job_fails_if_its_kernels_do_not_compile() -> None:
    async def scenario() -> None:
        schedule, worker = Scheduler(10), Recorder()
        schedule.add(worker)
        cold = submit(schedule)
        schedule.compiling(worker.held.pop())
        schedule.compiled(cold, ZeroDivisionError())
        assert isinstance(cold.done.exception(), ZeroDivisionError)
        assert (schedule.running, schedule.waiting) == (0, 0)

    run(scenario())


def test_job_cancelled_while_compiling_never_runs() -> None:
    async def scenario() -> None:
        schedule, worker = Scheduler(10), Recorder()
        schedule.add(worker)
        cold = submit(schedule)
        schedule.compiling(worker.held.pop())
        schedule.cancel(cold)
        assert cold.done.cancelled()
        assert worker.cancelled == [cold]
        schedule.compiled(cold, None)
        # Cancelled just before the worker reported that it compiles.
        other = submit(schedule)
        schedule.cancel(other)
        schedule.compiling(worker.held.pop())
        assert other.done.cancelled()
        assert worker.held == []
        assert schedule.waiting == 0

    run(scenario())


def test_compiling_job_of_a_dead_worker_runs_elsewhere() -> None:
    async def scenario() -> None:
        schedule, dying, other = Scheduler(10), Recorder(), Recorder()
        schedule.add(dying)
        cold = submit(schedule)
        schedule.compiling(dying.held.pop())
        schedule.lost(dying)
        assert not cold.suspect, "it ran nothing"
        schedule.add(other)
        assert other.held == [cold]

    run(scenario())
