"""Helpers for tests of the scheduler: jobs, and a worker whose tasks the test finishes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from convgrad.contract import OPERATIONS, validate
from convgrad_service.backends.base import Vitals
from convgrad_service.engine.memory.tensor_layout import TensorLayout, tensor_layout_of
from convgrad_service.engine.scheduling.job import Job, JobResult
from convgrad_service.engine.scheduling.scheduler import CostModel, Scheduler, Task
from convgrad_service.problems import problem_from
from convgrad_service.problems.base import Lane

DONE = JobResult("kernel", 0.0, 1, 0, 0.0, 0.0)


@dataclass(eq=False)
class Recorder:
    """A worker whose tasks the test finishes."""

    slots: int = 1
    held: list[Task] = field(default_factory=list)
    cancelled: list[Task] = field(default_factory=list)
    device: int = 0
    used: int = 0
    vitals: Vitals = field(default_factory=Vitals)

    def start(self, task: Task) -> None:
        self.held.append(task)

    def cancel(self, task: Task) -> None:
        self.cancelled.append(task)

    def has_used(self, job: Job) -> int:
        return self.used if job.regions else 0

    async def probe(self, handle: bytes, size_bytes: int) -> None:
        raise NotImplementedError("it has no device")


def pooling(width: int = 2, shared: tuple[str, ...] = ()) -> TensorLayout:
    """Lay out a small problem, another one for each ``width``."""
    fields = {"input": np.zeros((1, 1, 2, width), np.float32), "kernel_size": 1}
    request = validate(OPERATIONS["maxpool2d_fwd"].request, fields)
    return tensor_layout_of(problem_from("maxpool2d_fwd", request), shared)


def job(cost: int = 1) -> Job:
    return Job(replace(pooling(), cost=cost), 0)


def alone(layout: TensorLayout) -> TensorLayout:
    """Return the layout with a problem that must run alone, as a timing's must."""
    problem = layout.problem
    alone_kind: Any = type("Alone", (type(problem),), {"lane": Lane.ALONE})
    values = {each.name: getattr(problem, each.name) for each in fields(problem)}  # type: ignore[arg-type]
    return replace(layout, problem=alone_kind(**values))


def known_pace(units_per_s: float) -> CostModel:
    pace = CostModel()
    for _ in range(1000):
        pace.learn(units_per_s, 1.0)
    return pace


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


def submit(schedule: Scheduler, cost: int = 1, deadline_s: float | None = None) -> Task:
    return schedule.submit(job(cost), deadline_s or time.monotonic() + 60)
