"""A worker's process, as the hub sees it; here without the process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from convgrad.errors import DeadlineExceeded
from convgrad_service.engine.ipc.channel import RunTask
from convgrad_service.engine.options import WorkerRecipe
from convgrad_service.engine.scheduling.scheduler import Scheduler
from convgrad_service.engine.shm.registry import RegionRegistry
from convgrad_service.engine.workers.process_worker import ProcessWorker
from tests.support.fake_backends import Zeros
from tests.support.scheduling import DONE, run, submit


def test_only_what_succeeds_at_once_is_brief() -> None:
    """A brief task cannot be stopped, and one that was cancelled at once might have taken long."""

    async def scenario() -> None:
        sent: list[RunTask] = []
        scheduler = Scheduler(4)
        worker = ProcessWorker(WorkerRecipe(lambda _: Zeros()), 0, RegionRegistry(1), scheduler)
        channel: Any = SimpleNamespace(send_now=lambda message: sent.append(RunTask(*message)))
        worker._jobs = channel
        scheduler.add(worker)

        def ends_with(result: Any) -> bool:
            """Whether the next task of the same layout is brief."""
            for reply in (result, tuple(DONE)):
                task = submit(scheduler)
                brief = sent[-1].brief
                worker._task_message((sent[-1].number, reply))
                task.done.cancelled() or task.done.exception()
            return brief

        assert not ends_with(DeadlineExceeded("the client left"))
        assert ends_with(tuple(DONE))
        assert not ends_with(DeadlineExceeded("the client left"))

    run(scenario())
