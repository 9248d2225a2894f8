"""A worker for tests of the scheduler, whose tasks the test itself finishes."""

from __future__ import annotations

from convgrad_service.engine.scheduling.task import Task
from convgrad_service.engine.workers.execute import Job

__all__ = ["ManualWorker"]


class ManualWorker:
    """A `scheduling.task.Worker` that records what it is given."""

    device = 0

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.held: list[Task] = []
        self.cancelled: list[Task] = []

    def start(self, task: Task) -> None:
        self.held.append(task)

    def cancel(self, task: Task) -> None:
        self.cancelled.append(task)

    def has_used(self, job: Job) -> int:
        return 0
