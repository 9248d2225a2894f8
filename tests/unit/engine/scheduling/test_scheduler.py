"""The schedule: order, lanes, bounds, cancellation, deadlines, and the deaths of workers."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from convgrad.errors import DeadlineExceeded, DeviceUnavailable, Overloaded
from convgrad_service.engine.memory.tensor_layout import PackedTensorLayout
from convgrad_service.engine.scheduling.cost_model import CostModel
from convgrad_service.engine.scheduling.scheduler import Scheduler, Task, WorkerLost
from convgrad_service.engine.shm.registry import InRegion
from convgrad_service.engine.workers.execute import Job
from tests.support.scheduling import DONE, Recorder, known_pace, run, submit


def finish(schedule: Scheduler, worker: Recorder, result: Any = DONE) -> Task:
    task = worker.held.pop(0)
    schedule.finished(task, result)
    return task


def test_jobs_run_in_order_of_arrival_and_results_come_through() -> None:
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


def test_more_than_may_wait_is_refused_with_an_estimate() -> None:
    async def scenario() -> None:
        schedule, worker = Scheduler(2, pace=known_pace(100.0), large_s=100.0), Recorder()
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
        schedule, worker = Scheduler(10, pace=known_pace(1.0)), Recorder(slots=2)
        schedule.add(worker)
        first, second, small = submit(schedule, 10), submit(schedule, 10), submit(schedule, 0)
        assert worker.held == [first, small]
        finish(schedule, worker)
        assert worker.held == [small, second]
        alone = Recorder(slots=1)
        only = Scheduler(10, pace=known_pace(1.0))
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


def test_cancelled_while_waiting_never_runs_and_while_running_is_told() -> None:
    async def scenario() -> None:
        schedule, worker = Scheduler(10), Recorder()
        schedule.add(worker)
        running, waiting = submit(schedule), submit(schedule)
        schedule.cancel(waiting)
        assert waiting.done.cancelled()
        schedule.cancel(running)
        assert worker.told == [running]
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


def test_closing_cancels_what_waits_and_what_runs() -> None:
    async def scenario() -> None:
        schedule, worker = Scheduler(10), Recorder()
        schedule.add(worker)
        running, waiting = submit(schedule), submit(schedule)
        schedule.close()
        assert worker.told == [running]
        assert waiting.done.cancelled()
        with pytest.raises(DeviceUnavailable, match="shutting down"):
            submit(schedule)

    run(scenario())


def test_what_a_dead_worker_held_runs_again_one_at_a_time_and_first() -> None:
    async def scenario() -> None:
        schedule, first = Scheduler(10), Recorder(slots=3)
        schedule.add(first)
        held = [submit(schedule) for _ in range(3)]
        waiting = submit(schedule)
        schedule.cancel(held[1])
        schedule.lost(first)
        assert held[1].done.cancelled()  # nobody wants it: it is not tried again
        fresh = Recorder(slots=3)
        schedule.add(fresh)
        assert fresh.held == [held[0]]  # alone, although there are slots
        finish(schedule, fresh)
        assert fresh.held == [held[2]]
        finish(schedule, fresh)
        assert fresh.held == [waiting]

    run(scenario())


def test_a_job_that_is_alone_in_two_deaths_is_not_tried_again() -> None:
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
        assert deaths == 3  # one in company, two alone
        assert isinstance(killer.done.exception(), WorkerLost)
        assert worker.held == [other]
        finish(schedule, worker)
        assert other.done.result() is DONE

    run(scenario())


def test_of_a_worker_with_a_job_that_hung_that_job_alone_is_a_suspect() -> None:
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
        assert isinstance(hung.done.exception(), WorkerLost)  # it hung once beside, and died alone
        last = Recorder(slots=2)
        schedule.add(last)
        assert last.held == [other]

    run(scenario())


def test_a_worker_that_is_about_to_end_gets_no_more_jobs() -> None:
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


def test_without_a_worker_jobs_wait_until_there_is_no_hope() -> None:
    async def scenario() -> None:
        schedule = Scheduler(10)
        task = submit(schedule)
        assert not task.done.done()
        schedule.refuse_all(DeviceUnavailable("gone"))
        assert isinstance(task.done.exception(), DeviceUnavailable)
        assert schedule.waiting == 0

    run(scenario())


def test_the_pace_follows_what_was_measured() -> None:
    pace = CostModel()
    for _ in range(100):
        pace.learn(cost=1e9, seconds=2.0)
    assert pace.estimate_s(5e8) == pytest.approx(1.0, rel=0.01)
    for _ in range(100):
        pace.learn(cost=1e9, seconds=0.5)
    assert pace.estimate_s(5e8) == pytest.approx(0.25, rel=0.05)


def test_of_idle_workers_that_which_has_a_job_s_tensors_takes_it() -> None:
    async def scenario() -> None:
        schedule = Scheduler(9)
        workers = [Recorder(2), Recorder(2, used=1), Recorder(2, used=2)]
        for worker in workers:
            schedule.add(worker)
        with_tensors = Job(PackedTensorLayout(b"", 1), 0, (InRegion(1, 0, kept=True),))
        until_s = time.monotonic() + 60
        for expected in (2, 1, 0, 2):
            before = len(workers[expected].held)
            schedule.submit(with_tensors, until_s)
            assert len(workers[expected].held) == before + 1
        submit(schedule)  # of no stored tensor: the first of those with the least to do
        assert [len(worker.held) for worker in workers] == [2, 1, 2]

    run(scenario())


def test_a_job_whose_kernels_are_compiled_leaves_its_slot_to_others() -> None:
    async def scenario() -> None:
        schedule, worker = Scheduler(2), Recorder()
        schedule.add(worker)
        cold, warm = submit(schedule), submit(schedule)
        schedule.compiling(worker.held.pop(0))
        assert worker.held == [warm]
        assert cold.waited_s is None
        # It is one of those that wait, of which there may be so many.
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


def test_a_job_whose_kernels_are_refused_fails() -> None:
    async def scenario() -> None:
        schedule, worker = Scheduler(10), Recorder()
        schedule.add(worker)
        cold = submit(schedule)
        schedule.compiling(worker.held.pop())
        schedule.compiled(cold, ZeroDivisionError())
        assert isinstance(cold.done.exception(), ZeroDivisionError)
        assert (schedule.running, schedule.waiting) == (0, 0)

    run(scenario())


def test_cancelled_while_its_kernels_are_compiled_never_runs() -> None:
    async def scenario() -> None:
        schedule, worker = Scheduler(10), Recorder()
        schedule.add(worker)
        cold = submit(schedule)
        schedule.compiling(worker.held.pop())
        schedule.cancel(cold)
        assert cold.done.cancelled()
        assert worker.told == [cold]
        schedule.compiled(cold, None)
        # One that was cancelled just before the worker said so.
        other = submit(schedule)
        schedule.cancel(other)
        schedule.compiling(worker.held.pop())
        assert other.done.cancelled()
        assert worker.held == []
        assert schedule.waiting == 0

    run(scenario())


def test_kernels_that_a_dead_worker_compiled_are_compiled_by_another() -> None:
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
