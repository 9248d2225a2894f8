"""A scheduler without workers: jobs, and a worker that computes nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from convgrad_service.engine.memory.tensor_layout import PackedTensorLayout
from convgrad_service.engine.scheduling.cost_model import CostModel
from convgrad_service.engine.scheduling.scheduler import Scheduler, Task
from convgrad_service.engine.workers.execute import Finished, Job

DONE = Finished("kernel", 0.0, 1, 0, 0.0, 0.0)


@dataclass(eq=False)
class Recorder:
    """A worker that computes nothing until the test says that it has."""

    slots: int = 1
    held: list[Task] = field(default_factory=list)
    told: list[Task] = field(default_factory=list)
    device: int = 0
    used: int = 0

    def start(self, task: Task) -> None:
        self.held.append(task)

    def cancel(self, task: Task) -> None:
        self.told.append(task)

    def has_used(self, job: Job) -> int:
        return self.used


def job(cost: int = 1) -> Job:
    return Job(PackedTensorLayout(b"", cost), 0)


def known_pace(units_per_s: float) -> CostModel:
    pace = CostModel()
    for _ in range(1000):
        pace.learn(units_per_s, 1.0)
    return pace


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


def submit(schedule: Scheduler, cost: int = 1, deadline_s: float | None = None) -> Task:
    return schedule.submit(job(cost), deadline_s or time.monotonic() + 60)
