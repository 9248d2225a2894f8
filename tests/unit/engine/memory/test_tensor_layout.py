"""Large problems in parts: the same bits on any workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from convgrad.contract import OPERATIONS
from convgrad.contract.base import validate
from convgrad.errors import InvalidProblem
from convgrad_service.backends.cpu import CpuBackend
from convgrad_service.engine.admission import Deadline, Limits
from convgrad_service.engine.embedded import ThreadWorker, embedded_hub
from convgrad_service.engine.memory import tensor_layout as parts
from convgrad_service.engine.memory.tensor_layout import tensor_layout_of
from convgrad_service.engine.options import EngineOptions
from convgrad_service.engine.pipeline import Pipeline
from convgrad_service.engine.request import ComputeRequest, Decoded
from convgrad_service.engine.scheduling.job import JobResult, count_tasks
from convgrad_service.engine.shm.registry import RegionSlice
from convgrad_service.engine.telemetry.record import Timings
from convgrad_service.problems import Problem, problem_from
from tests.support.fake_backends import Gated
from tests.support.in_memory import answer, begun, kept
from tests.support.scheduling import Recorder

DONE = JobResult("k", 1.0, 1, 0, 0.0, 0.0)
GRAD = np.random.default_rng(0).standard_normal((8, 4, 12, 12), np.float32)
WEIGHT = np.random.default_rng(1).standard_normal((4, 6, 3, 3), np.float32)
FIELDS = {"grad_output": GRAD, "weight": WEIGHT, "padding": 1}


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Split problems into parts of 8 KiB, so that small ones have several."""
    monkeypatch.setattr(parts, "PART_BYTES", 8 * 1024)
    tensor_layout_of.cache_clear()
    yield
    tensor_layout_of.cache_clear()


def problem(operation: str = "conv_bwd_data", **fields: Any) -> Problem:
    request = validate(OPERATIONS[operation].request, fields or FIELDS)
    return problem_from(operation, request)


class Plane(Pipeline):
    """A pipeline on an embedded engine with one worker."""

    def __init__(self, backend: Gated, slots: int = 1) -> None:
        self.hub = embedded_hub(backend, EngineOptions(10**7, 10**5, slots=slots, max_queue=2))
        super().__init__(self.hub, limits=Limits())


def called(operation: str = "conv_bwd_data", timeout_s: float = 60.0) -> ComputeRequest:
    return ComputeRequest(OPERATIONS[operation], Deadline.after(timeout_s), Timings())


def whole() -> NDArray[Any]:
    outcome = CpuBackend(threads=1).run(problem(), {"grad_output": GRAD, "weight": WEIGHT})
    return outcome.outputs["grad_input"]


def test_small_problems_are_not_split() -> None:
    assert parts.count_parts(problem()) == 5
    tiny = np.zeros((1, 4, 4, 4), np.float32)
    assert parts.count_parts(problem(grad_output=tiny, weight=WEIGHT)) == 1


def test_number_of_parts_is_limited() -> None:
    images = np.broadcast_to(np.zeros((), np.float32), (4096, 6, 12, 12))
    assert parts.count_parts(problem("conv_fwd", input=images, weight=WEIGHT, padding=1)) == 64


def test_parts_compute_the_same_bits_as_the_whole() -> None:
    async def scenario() -> None:
        backend = Gated(open_from_start=True)
        plane = Plane(backend, slots=3)
        result = await answer(plane, called(), lambda: FIELDS, kept)
        assert (result.outputs["grad_input"] == whole()).all()
        assert result.report.pieces == backend.runs == 5
        assert plane.hub.memory.used_bytes == 0

    asyncio.run(scenario())


def test_parts_run_on_every_worker() -> None:
    async def scenario() -> None:
        first, second = Gated(), Gated()
        plane = Plane(first)
        hub = plane.hub
        hub.scheduler.add(ThreadWorker(second, hub.arena, hub.regions, 1, hub.scheduler))
        asking = asyncio.ensure_future(answer(plane, called(), lambda: FIELDS, kept))
        for backend in (first, second):
            backend.gate.release()
            await _until(lambda: backend.runs == 1)  # noqa: B023
        for backend in (first, second):
            backend.gate.release(4)
        result = await asking
        assert first.runs + second.runs == 5
        assert (result.outputs["grad_input"] == whole()).all()

    asyncio.run(scenario())


def test_failed_part_fails_the_request_and_frees_its_memory() -> None:
    async def scenario() -> None:
        backend = Gated()
        backend.fail_at = 3
        plane = Plane(backend)
        async with begun(plane, called(), lambda: Decoded(FIELDS)) as work:
            await work.fill(work.request.tensors())
            backend.gate.release(3)
            with pytest.raises(InvalidProblem, match="it failed"):
                await work.compute()
        await _until_idle(plane)
        assert backend.runs == 3

    asyncio.run(scenario())


def test_cancellation_between_parts_frees_memory() -> None:
    async def scenario() -> None:
        backend = Gated()
        plane = Plane(backend)
        async with begun(plane, called(), lambda: Decoded(FIELDS)) as work:
            await work.fill(work.request.tensors())
            backend.gate.release()
            computing = asyncio.ensure_future(work.compute())
            await _until(lambda: backend.runs == 1)
            computing.cancel()
            await asyncio.wait([computing])
        await _until_idle(plane)
        assert backend.runs == 1

    asyncio.run(scenario())


def test_job_in_parts_counts_once_in_the_queue() -> None:
    async def scenario() -> None:
        backend = Gated()
        plane = Plane(backend)
        asking = [
            asyncio.ensure_future(answer(plane, called(), lambda: FIELDS, kept)) for _ in range(3)
        ]
        await _until(lambda: plane.hub.scheduler.waiting == 2)
        assert plane.hub.scheduler.full  # two may wait, and one runs
        backend.gate.release(15)
        for result in await asyncio.gather(*asking):
            assert (result.outputs["grad_input"] == whole()).all()

    asyncio.run(scenario())


def test_overlapping_input_and_output_make_a_single_task() -> None:
    cut, file = problem(), (1, 2)
    size = cut.inputs["grad_output"].size_bytes

    def tasks(*regions: RegionSlice) -> int:
        arranged = tensor_layout_of(cut, ("grad_output", "grad_input"))
        return count_tasks(replace(arranged, parts=5), regions)

    given = RegionSlice(1, 0, file)
    assert tasks(given, RegionSlice(2, 0, (1, 3))) == 5  # in another file
    assert tasks(given, RegionSlice(1, -(-size // 64) * 64, file)) == 5  # after the input
    assert tasks(given, RegionSlice(2, 64, file)) == 1  # the same file under another number
    assert tasks(given, RegionSlice(2, 4, (1, 3))) == 1  # misaligned


def test_inputs_copied_from_shared_memory_make_a_single_task() -> None:
    cut = problem_from(
        "maxpool2d_bwd",
        validate(
            OPERATIONS["maxpool2d_bwd"].request,
            {
                "grad_output": np.zeros((5, 1, 2, 2), np.float32),
                "indices": np.zeros((5, 1, 2, 2), np.int64),
                "kernel_size": 2,
                "input_size": [4, 4],
            },
        ),
    )
    arranged = tensor_layout_of(cut, ("indices",))
    several = replace(arranged, parts=5)
    assert count_tasks(several, (RegionSlice(1, 0, (1, 2)),)) == 1
    apart = tensor_layout_of(cut, ("grad_output",))
    several = replace(apart, parts=5)
    assert count_tasks(several, (RegionSlice(1, 0, (1, 2)),)) == 5


def test_only_parts_of_a_dead_worker_run_again() -> None:
    async def scenario() -> None:
        plane = Plane(Gated())
        schedule = plane.hub.scheduler
        (only,) = schedule._running
        schedule.lost(only)
        dying, next_one = Recorder(2), Recorder(5)
        schedule.add(dying)
        async with begun(plane, called(), lambda: Decoded(FIELDS)) as work:
            await work.fill(work.request.tensors())
            computing = asyncio.ensure_future(work.compute())
            await _until(lambda: len(dying.held) == 2)
            schedule.finished(dying.held[0], DONE)
            schedule.lost(dying)
            schedule.add(next_one)
            again: list[int] = []
            while not computing.done():
                for task in next_one.held:
                    again.append(task.part)
                    schedule.finished(task, DONE)
                next_one.held.clear()
                await asyncio.sleep(0.01)
            assert sorted(again) == [1, 2, 3, 4]
            await computing
            assert work.report.pieces == 5

    asyncio.run(scenario())


async def _until_idle(plane: Plane) -> None:
    await _until(lambda: not (plane.hub.memory.used_bytes or plane.hub.scheduler.running))


async def _until(condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came true")
