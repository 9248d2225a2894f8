"""Jobs that run with nothing beside them, as timings do."""

from __future__ import annotations

import time

from convgrad_service.engine.memory.tensor_layout import PackedTensorLayout
from convgrad_service.engine.scheduling.scheduler import Scheduler
from convgrad_service.engine.workers.execute import Job
from convgrad_service.problems.base import Lane
from tests.support.scheduling import DONE, Recorder, known_pace, run, submit


def alone_job() -> Job:
    return Job(PackedTensorLayout(b"", 1), 0, lane=Lane.ALONE)


def test_what_is_to_run_alone_waits_for_a_worker_and_keeps_it() -> None:
    async def scenario() -> None:
        schedule = Scheduler(16)
        worker = Recorder(slots=2)
        schedule.add(worker)
        deadline_s = time.monotonic() + 60
        first = submit(schedule)
        timing = schedule.submit(alone_job(), deadline_s)
        later = submit(schedule)
        # A slot is free, but it is kept: else what comes later would go before it for ever.
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


def test_of_two_workers_one_alone_waits_for_what_runs_alone() -> None:
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
        # Whichever is idle first takes the timing, the other goes on with what comes.
        assert timing in one.held + other.held
        schedule.finished(held[0], DONE)
        assert more in one.held + other.held

    run(scenario())


def test_cancelling_what_waits_to_run_alone_lets_others_go_on() -> None:
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


def test_the_pace_is_not_learnt_of_timings() -> None:
    async def scenario() -> None:
        schedule = Scheduler(16, pace=known_pace(1000.0))
        worker = Recorder()
        schedule.add(worker)
        before_s = schedule.pace.estimate_s(1000)
        timing = schedule.submit(alone_job(), time.monotonic() + 60)
        assert timing.worker is worker
        schedule.finished(timing, DONE)
        assert schedule.pace.estimate_s(1000) == before_s

    run(scenario())
