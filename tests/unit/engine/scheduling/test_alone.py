"""Jobs that run alone on their worker, such as timings."""

from __future__ import annotations

import time

from convgrad_service.engine.scheduling.job import Job
from convgrad_service.engine.scheduling.scheduler import Scheduler
from tests.support.scheduling import DONE, Recorder, alone, job, known_pace, run, submit


def alone_job() -> Job:
    return Job(alone(job().layout), 0)


def test_exclusive_job_reserves_a_worker() -> None:
    async def scenario() -> None:
        schedule = Scheduler(16)
        worker = Recorder(slots=2)
        schedule.add(worker)
        deadline_s = time.monotonic() + 60
        first = submit(schedule)
        timing = schedule.submit(alone_job(), deadline_s)
        later = submit(schedule)
        # The free slot is reserved; otherwise later jobs would overtake it forever.
        assert worker.held == [first]
        assert schedule.position(timing) == 0
        assert schedule.position(later) == 1
        schedule.finished(first, DONE)
        assert worker.held == [first, timing]
        assert schedule.position(timing) is None
        schedule.finished(timing, DONE)
        assert worker.held == [first, timing, later]
        schedule.finished(later, DONE)
        assert later.done.done()

    run(scenario())


def test_exclusive_job_reserves_only_one_worker() -> None:
    async def scenario() -> None:
        schedule = Scheduler(16)
        one, other = Recorder(slots=1), Recorder(slots=1, device=1)
        schedule.add(one)
        schedule.add(other)
        deadline_s = time.monotonic() + 60
        held = [submit(schedule), submit(schedule)]
        timing = schedule.submit(alone_job(), deadline_s)
        assert schedule.position(timing) == 0
        more = submit(schedule)
        schedule.finished(held[1], DONE)
        # The first idle worker takes the timing; the other continues with other jobs.
        assert timing in one.held + other.held
        schedule.finished(held[0], DONE)
        assert more in one.held + other.held

    run(scenario())


def test_cancelling_an_exclusive_job_frees_its_reserved_worker() -> None:
    async def scenario() -> None:
        schedule = Scheduler(16)
        worker = Recorder(slots=2)
        schedule.add(worker)
        submit(schedule)
        timing = schedule.submit(alone_job(), time.monotonic() + 60)
        later = submit(schedule)
        assert later not in worker.held
        schedule.cancel(timing)
        assert later in worker.held

    run(scenario())


def test_cost_model_does_not_learn_from_timings() -> None:
    async def scenario() -> None:
        schedule = Scheduler(16, cost_model=known_pace(1000.0))
        worker = Recorder()
        schedule.add(worker)
        before_s = schedule.cost_model.estimate_s(1000)
        timing = schedule.submit(alone_job(), time.monotonic() + 60)
        assert timing.worker is worker
        schedule.finished(timing, DONE)
        assert schedule.cost_model.estimate_s(1000) == before_s

    run(scenario())
