"""Sums over parts on several workers, and their failures."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from convgrad.contract import OPERATIONS
from convgrad.contract.base import validate
from convgrad.errors import DeadlineExceeded, InvalidProblem
from convgrad_service.backends.cpu import CpuBackend
from convgrad_service.engine.admission import Deadline, Limits
from convgrad_service.engine.embedded import ThreadWorker, embedded_hub
from convgrad_service.engine.memory import tensor_layout as parts
from convgrad_service.engine.memory.tensor_layout import tensor_layout_of
from convgrad_service.engine.options import EngineOptions
from convgrad_service.engine.pipeline import Pipeline
from convgrad_service.engine.request import ComputeRequest, Decoded
from convgrad_service.engine.scheduling.job import JobResult
from convgrad_service.engine.telemetry.record import Timings
from convgrad_service.problems import run_in_pieces
from tests.support.fake_backends import Gated
from tests.support.in_memory import answer, begun, kept
from tests.support.numerics.arrays import Arrays
from tests.support.numerics.bounds import assert_same_bits
from tests.support.scheduling import Recorder
from tests.support.split_sums import BACKWARD, FIELDS, problem

BACKEND = CpuBackend(threads=1)
DONE = JobResult("k", 1.0, 1, 0, 0.0, 0.0)


class Plane(Pipeline):
    """A pipeline on an embedded engine with several workers, each with its own backend."""

    def __init__(self, *backends: Gated) -> None:
        self.hub = embedded_hub(backends[0], EngineOptions(10**7, 10**5, slots=1, max_queue=2))
        hub = self.hub
        for backend in backends[1:]:
            hub.scheduler.add(ThreadWorker(backend, hub.arena, hub.regions, 1, hub.scheduler))
        super().__init__(hub, limits=Limits())


def called(operation: str = "grouped_conv_bwd_weight", timeout_s: float = 60.0) -> ComputeRequest:
    return ComputeRequest(OPERATIONS[operation], Deadline.after(timeout_s), Timings())


def in_parts(fields: Any, operation: str = "grouped_conv_bwd_weight") -> Arrays:
    cut = problem(operation, **fields)
    request = validate(OPERATIONS[operation].request, fields)
    count = tensor_layout_of(cut).parts
    assert count > 1
    return run_in_pieces(cut, request.tensors(), count, lambda p, t: BACKEND.run(p, t).outputs)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_result_does_not_depend_on_the_number_of_devices(devices: int) -> None:
    async def scenario() -> None:
        backends = [Gated(open_from_start=True) for _ in range(devices)]
        plane = Plane(*backends)
        accumulate = np.ones((4, 3, 3, 3), np.float32)
        fields = {**FIELDS, "alpha": 0.5, "beta": 2.0, "accumulate": accumulate}
        result = await answer(plane, called(), lambda: fields, kept)
        wanted = in_parts(fields)["grad_weight"]
        assert_same_bits(result.outputs["grad_weight"], wanted)
        assert result.report.pieces == sum(backend.runs for backend in backends) == 4
        assert result.report.workspace_bytes >= 4 * wanted.nbytes
        assert plane.hub.memory.used_bytes == 0

    asyncio.run(scenario())


@pytest.mark.usefixtures("small_parts")
def test_result_does_not_depend_on_completion_order() -> None:
    async def scenario() -> None:
        wanted = in_parts(FIELDS)["grad_weight"]
        for first in (0, 1):
            backends = [Gated(), Gated()]
            plane = Plane(*backends)
            asking = asyncio.ensure_future(answer(plane, called(), lambda: FIELDS, kept))
            backends[first].gate.release(3)
            await _until(lambda: backends[first].runs == 3)  # noqa: B023
            backends[1 - first].gate.release(1)
            assert_same_bits((await asking).outputs["grad_weight"], wanted)

    asyncio.run(scenario())


@pytest.mark.usefixtures("small_parts")
def test_one_gradient_is_a_sum_over_parts_and_the_other_is_not() -> None:
    async def scenario() -> None:
        backend = Gated(open_from_start=True)
        plane = Plane(backend)
        wanted = in_parts(BACKWARD, "conv_backward")
        result = await answer(plane, called("conv_backward"), lambda: BACKWARD, kept)
        for name, array in wanted.items():
            assert_same_bits(result.outputs[name], array, name)
        cut = problem("conv_backward", **BACKWARD)
        assert backend.runs == len(parts.pieces_of(cut, parts.count_parts(cut)))
        assert plane.hub.memory.used_bytes == 0

    asyncio.run(scenario())


def _with(plane: Plane, worker: Recorder) -> None:
    (only,) = plane.hub.scheduler._running
    plane.hub.scheduler.lost(only)
    plane.hub.scheduler.add(worker)


@pytest.mark.usefixtures("small_parts")
def test_last_task_waits_for_all_and_survives_a_worker_death() -> None:
    async def scenario() -> None:
        plane = Plane(Gated())
        schedule, dying = plane.hub.scheduler, Recorder(9)
        _with(plane, dying)
        async with begun(plane, called(), lambda: Decoded(FIELDS)) as work:
            await work.fill(work.request.tensors())
            computing = asyncio.ensure_future(work.compute())
            await _until(lambda: len(dying.held) == 4)
            *others, last = dying.held
            for task in others:
                schedule.finished(task, DONE)
            await asyncio.sleep(0.05)
            assert len(dying.held) == 4  # one partial sum is missing
            schedule.finished(last, DONE)
            await _until(lambda: len(dying.held) == 5)
            assert dying.held[4].part == 4
            schedule.lost(dying)
            fresh = Recorder(9)
            schedule.add(fresh)
            (again,) = fresh.held
            assert again is dying.held[4]
            schedule.finished(again, DONE._replace(pieces=0))
            await computing
            assert work.report.pieces == 4
        await _until_idle(plane)

    asyncio.run(scenario())


@pytest.mark.usefixtures("small_parts")
def test_cancellation_before_the_last_task_frees_memory() -> None:
    async def scenario() -> None:
        for when in ("computing", "adding up"):
            plane = Plane(Gated())
            schedule, worker = plane.hub.scheduler, Recorder(9)
            _with(plane, worker)
            async with begun(plane, called(), lambda: Decoded(FIELDS)) as work:
                await work.fill(work.request.tensors())
                computing = asyncio.ensure_future(work.compute())
                await _until(lambda: len(worker.held) == 4)  # noqa: B023
                if when == "adding up":
                    for task in worker.held[:4]:
                        schedule.finished(task, DONE)
                    await _until(lambda: len(worker.held) == 5)  # noqa: B023
                computing.cancel()
                await asyncio.gather(computing, return_exceptions=True)
                running = [task for task in worker.held if not task.done.done()]
                assert worker.cancelled == running
                for task in running:
                    schedule.finished(task, DeadlineExceeded("the deadline passed"))
            await _until_idle(plane)
            assert len(worker.held) == (5 if when == "adding up" else 4)

    asyncio.run(scenario())


@pytest.mark.usefixtures("small_parts")
def test_failed_part_fails_the_sum() -> None:
    async def scenario() -> None:
        backend = Gated(open_from_start=True)
        backend.fail_at = 2
        plane = Plane(backend)
        with pytest.raises(InvalidProblem, match="it failed"):
            await answer(plane, called(), lambda: FIELDS, kept)
        await _until_idle(plane)

    asyncio.run(scenario())


async def _until_idle(plane: Plane) -> None:
    await _until(lambda: not (plane.hub.memory.used_bytes or plane.hub.scheduler.running))


async def _until(condition: Any) -> None:
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came true")
