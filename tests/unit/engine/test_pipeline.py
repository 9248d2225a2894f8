"""The pipeline and the engine in one process, without a transport or a real backend."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from convgrad.contract import OPERATIONS
from convgrad.dtypes import DType
from convgrad.errors import (
    DeadlineExceeded,
    DeviceUnavailable,
    MalformedRequest,
    Overloaded,
    ProblemTooLarge,
)
from convgrad_service.backends.base import Outcome
from convgrad_service.engine.admission import CancelScope, Deadline, Limits
from convgrad_service.engine.embedded import embedded_hub
from convgrad_service.engine.execution import Execution
from convgrad_service.engine.hub import Hub
from convgrad_service.engine.memory.arena import PAGE_BYTES
from convgrad_service.engine.options import SMALL_REQUEST_BYTES, EngineOptions
from convgrad_service.engine.pipeline import Pipeline
from convgrad_service.engine.request import ComputeRequest, Decoded, blank
from convgrad_service.engine.scheduling.job import JobHandle
from convgrad_service.engine.telemetry.record import Timings
from tests.support.fake_backends import Blocking, Zeros
from tests.support.in_memory import Kept, answer, begun, kept

ONES = np.ones((1, 1, 4, 4), np.float32)
FIELDS = {"grad_output": ONES, "weight": ONES}


class Plane(Pipeline):
    """A pipeline on an embedded engine."""

    def __init__(
        self, backend: Zeros | None = None, limits: Limits | None = None, **options: Any
    ) -> None:
        chosen = EngineOptions(
            **{"tensor_bytes": 10**6, "text_bytes": 10**5, "slots": 1, "max_queue": 4, **options}
        )
        self.hub: Hub = embedded_hub(backend or Zeros(), chosen)
        super().__init__(self.hub, limits=limits or Limits())


def called(timeout_s: float = 60.0) -> ComputeRequest:
    return ComputeRequest(OPERATIONS["conv_bwd_data"], Deadline.after(timeout_s), Timings())


async def ask(
    pipeline: Pipeline, fields: Mapping[str, Any] = FIELDS, timeout_s: float = 60.0
) -> Kept:
    return await answer(pipeline, called(timeout_s), lambda: fields, kept)


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came true")


def test_result_has_outputs_and_report() -> None:
    pipeline = Plane()
    result = asyncio.run(ask(pipeline))
    assert result.outputs["grad_input"].shape == (1, 1, 7, 7)
    assert result.report.backend == "zeros"
    assert result.report.flops == 2 * 16 * 16
    assert pipeline.hub.memory.used_bytes == 0


class Adding(Zeros):
    """Fills its outputs with the sum of its inputs."""

    def run(self, problem: Any, tensors: Any, *others: Any) -> Outcome:
        outcome = super().run(problem, tensors, *others)
        for array in outcome.outputs.values():
            array += sum(tensor.sum() for tensor in tensors.values())
        return outcome


def test_inputs_and_outputs_are_in_the_arena() -> None:
    async def scenario() -> None:
        pipeline = Plane(Adding())
        spec = {name: blank((1, 1, 4, 4), DType.FLOAT32, name=name) for name in FIELDS}
        async with begun(pipeline, called(), lambda: Decoded(spec)) as work:
            arena = pipeline.hub.arena
            for array in work.inputs.values():
                assert arena.address <= array.ctypes.data < arena.address + arena.size_bytes
            work.inputs["grad_output"][...] = 2
            await work.fill({"weight": lambda place: place.fill(3)})
            await work.compute()
            output = work.outputs["grad_input"]
            assert output.min() == output.max() == 16 * 5
            assert arena.address <= output.ctypes.data < arena.address + arena.size_bytes
        assert pipeline.hub.memory.used_bytes == 0

    asyncio.run(scenario())


def test_shape_too_large_for_numpy_is_refused() -> None:
    with pytest.raises(MalformedRequest, match="too large"):
        blank((2**40, 2**40), DType.FLOAT32, name="x")


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities on Linux")
def test_computing_gives_way_to_the_event_loop() -> None:
    seen: list[int] = []

    class Looking(Zeros):
        def run(self, *arguments: Any) -> Outcome:
            seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
            return super().run(*arguments)

    asyncio.run(ask(Plane(Looking())))
    assert seen[0] > os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_decode_and_encode_run_in_threads() -> None:
    seen: list[str] = []

    async def scenario() -> None:
        pipeline = Plane()
        call = called()

        def decode() -> Mapping[str, Any]:
            seen.append(threading.current_thread().name)
            return FIELDS

        def encode(execution: Execution) -> None:
            seen.append(threading.current_thread().name)

        await answer(pipeline, call, decode, encode)
        assert list(call.timings.stages_s) == ["receive", "decode", "queue", "compute", "encode"]

    asyncio.run(scenario())
    assert all(name.startswith("codec") for name in seen)
    assert len(seen) == 2


def test_errors_of_a_thread_whose_caller_has_gone_are_not_logged() -> None:
    logged: list[Mapping[str, Any]] = []

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
        plane, go_on, ended = Plane(), threading.Event(), threading.Event()

        def fail() -> None:
            go_on.wait(10)
            ended.set()
            raise MalformedRequest("nobody reads this")

        calling = asyncio.ensure_future(plane.in_thread(fail))
        await asyncio.sleep(0)
        calling.cancel()
        await asyncio.wait([calling])
        go_on.set()
        await until(ended.is_set)
        await asyncio.sleep(0.02)
        plane.close()

    asyncio.run(scenario())
    gc.collect()
    assert not logged


def test_refused_requests_do_not_reach_the_backend() -> None:
    backend = Blocking()
    pipeline = Plane(backend, limits=Limits(problem_bytes=100))
    with pytest.raises(ProblemTooLarge):
        asyncio.run(ask(pipeline))
    with pytest.raises(MalformedRequest):
        asyncio.run(ask(pipeline, {"weight": ONES}))
    assert backend.runs == 0
    assert pipeline.hub.memory.used_bytes == 0


def test_request_larger_than_the_arena_is_refused() -> None:
    large = np.ones((1, 1, 40, 40), np.float32)
    with pytest.raises(ProblemTooLarge, match="4,096"):
        asyncio.run(ask(Plane(tensor_bytes=1), {"grad_output": large, "weight": ONES}))


@pytest.mark.parametrize("filling", [True, False], ids=["filling", "decoding"])
def test_leases_are_held_while_a_thread_uses_them(filling: bool) -> None:
    pipeline = Plane()
    begins, release = threading.Event(), threading.Event()

    def slow() -> Mapping[str, Any]:
        begins.set()
        release.wait(60)
        return FIELDS

    def slowly(_: object) -> None:
        slow()

    large = {"grad_output": np.ones((1, 1, 200, 200), np.float32), "weight": ONES}

    async def scenario() -> None:
        text = await pipeline.hub.reserve(1000, text=True)

        async def begun_and_filled() -> None:
            decode = (lambda: large) if filling else slow
            execution = begun(pipeline, called(), lambda: Decoded(decode()), body_lease=text)
            async with execution as work:
                await work.fill({"grad_output": slowly}, body_lease=text)

        scope = CancelScope()

        async def end() -> None:
            await asyncio.to_thread(begins.wait, 60)
            scope.set_deadline(called(0.0).deadline)

        ending = asyncio.ensure_future(end())
        with pytest.raises(DeadlineExceeded), scope:
            await begun_and_filled()
        await ending
        text.release()
        assert pipeline.hub.texts.used_bytes > 0
        assert (pipeline.hub.memory.used_bytes > 0) == filling
        release.set()
        hub = pipeline.hub
        await until(lambda: hub.memory.used_bytes == hub.texts.used_bytes == 0)

    asyncio.run(scenario())


def test_compute_time_counts_after_a_missed_deadline() -> None:
    """After the deadline the job may still be running; that time is not queueing."""

    async def scenario() -> None:
        pipeline = Plane(backend := Blocking())
        call = called(1.0)
        with pytest.raises(DeadlineExceeded):
            await answer(pipeline, call, lambda: FIELDS, lambda result: result)
        backend.release.set()
        assert call.timings.stages_s["compute"] > call.timings.stages_s["queue"]

    asyncio.run(scenario())


def test_compute_time_before_the_submitter_resumes_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On few cores the worker may finish before the submitting thread runs again."""
    pipeline = Plane()
    compute = pipeline.hub.submit

    def slow(*arguments: Any) -> JobHandle:
        handle = compute(*arguments)
        time.sleep(0.05)
        return handle

    monkeypatch.setattr(pipeline.hub, "submit", slow)

    async def scenario() -> Timings:
        call = called()
        await answer(pipeline, call, lambda: FIELDS, lambda result: None)
        return call.timings

    stages_s = asyncio.run(scenario()).stages_s
    assert stages_s["compute"] >= 0.05
    assert stages_s["queue"] < 0.05


class Lingering(Blocking):
    """Ignores cancellation, and finishes when the test allows it."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()

    def run(self, *arguments: Any) -> Outcome:
        outcome = super().run(*arguments)
        assert self.let_go.wait(60)
        return outcome


def test_cancelling_the_caller_cancels_the_job() -> None:
    backend = Lingering()
    pipeline = Plane(backend)

    async def scenario() -> None:
        asking = asyncio.ensure_future(ask(pipeline))
        await asyncio.to_thread(backend.started.acquire)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert pipeline.hub.memory.used_bytes > 0  # until the backend is done with it
        backend.let_go.set()
        await until(lambda: pipeline.hub.memory.used_bytes == 0)

    asyncio.run(scenario())
    assert backend.cancelled == 1


def test_admission() -> None:
    async def scenario() -> None:
        backend = Blocking()
        pipeline = Plane(backend, max_queue=1)
        pipeline.admit()
        first = asyncio.ensure_future(ask(pipeline))
        await asyncio.to_thread(backend.started.acquire)
        pipeline.admit()
        second = asyncio.ensure_future(ask(pipeline))
        await until(lambda: pipeline.hub.scheduler.waiting == 1)
        with pytest.raises(Overloaded):
            pipeline.admit()
        backend.release.set()
        await asyncio.gather(first, second)
        pipeline.close()
        for refuses in (pipeline.require_ready, pipeline.admit):
            with pytest.raises(DeviceUnavailable, match="shutting down"):
                refuses()

    asyncio.run(scenario())


def test_small_requests_use_the_reserve_while_memory_is_full() -> None:
    async def scenario() -> None:
        pipeline = Plane(reserve_bytes=3 * PAGE_BYTES, wait_s=0.05)
        hub = pipeline.hub
        everything = await hub.reserve(hub.memory.limit_bytes)
        assert (await ask(pipeline)).outputs["grad_input"].shape
        assert hub.reserve_memory.used_bytes == 0
        small = [await hub.reserve(SMALL_REQUEST_BYTES // 64) for _ in range(3)]
        assert hub.reserve_memory.used_bytes == 3 * PAGE_BYTES
        with pytest.raises(Overloaded):  # the reserve is full too
            await hub.reserve(1)
        small.pop().release()
        with pytest.raises(Overloaded):  # it is for small requests only
            await hub.reserve(SMALL_REQUEST_BYTES + 1)
        everything.release()
        assert await hub.reserve(1) is not None
        assert hub.reserve_memory.used_bytes == 2 * PAGE_BYTES

    asyncio.run(scenario())


def test_failed_device_refuses_requests() -> None:
    backend = Zeros()
    pipeline = Plane(backend)
    pipeline.require_ready()
    backend.fault = "an illegal address"
    for refuses in (pipeline.require_ready, pipeline.admit):
        with pytest.raises(DeviceUnavailable, match="illegal address"):
            refuses()


def test_upload_and_download_are_separate_stages() -> None:
    class Remote(Zeros):
        def run(self, *arguments: Any) -> Outcome:
            time.sleep(0.02)
            return replace(super().run(*arguments), upload_s=0.005, download_s=0.01)

    async def scenario() -> tuple[Timings, float]:
        call = called()
        began_s = time.perf_counter()
        await answer(Plane(Remote()), call, lambda: FIELDS, lambda result: None)
        return call.timings, time.perf_counter() - began_s

    timings, whole_s = asyncio.run(scenario())
    stages_s = timings.stages_s
    assert (stages_s["upload"], stages_s["download"]) == (0.005, 0.01)
    assert 0.004 < stages_s["compute"] <= whole_s - 0.015


def test_deadline_is_distinct_from_an_inner_timeout() -> None:
    async def scenario() -> None:
        with pytest.raises(TimeoutError), CancelScope(Deadline.after(5)):
            raise TimeoutError
        with (
            pytest.raises(DeadlineExceeded, match=r"0\.01 s"),
            CancelScope(Deadline.after(0.01)),
        ):
            await asyncio.sleep(5)
        with pytest.raises(DeadlineExceeded), CancelScope(Deadline.after(-1)):
            await asyncio.sleep(5)

    asyncio.run(scenario())
