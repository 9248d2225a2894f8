"""The dataplane alone, with neither a transport nor a real backend."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from convgrad.contract import OPERATIONS
from convgrad.errors import (
    DeadlineExceeded,
    DeviceUnavailable,
    MalformedRequest,
    Overloaded,
    ProblemTooLarge,
)
from convgrad_service.backends.base import Outcome
from convgrad_service.engine.dataplane import Call, Dataplane, Result
from convgrad_service.engine.deadline import Deadline
from convgrad_service.engine.limits import Limits
from convgrad_service.engine.memory import MemoryBudget
from convgrad_service.engine.queue import ComputeQueue
from convgrad_service.engine.timing import Timings
from tests.fake_backends import Blocking, Zeros

ONES = np.ones((1, 1, 4, 4), np.float32)
FIELDS = {"grad_output": ONES, "weight": ONES}


def plane(backend: Zeros | None = None, **changes: Any) -> Dataplane:
    parts: dict[str, Any] = {
        "limits": Limits(),
        "queue": ComputeQueue(1, 4),
        "memory": MemoryBudget(10**6),
    }
    return Dataplane(backend or Zeros(), **{**parts, **changes})


async def ask(
    dataplane: Dataplane, fields: Mapping[str, Any] = FIELDS, timeout_s: float = 5.0, **call: Any
) -> Result:
    with dataplane.memory.reservation() as reservation:
        made = Call(
            OPERATIONS["conv_bwd_data"], reservation, Deadline.after(timeout_s), Timings(), **call
        )
        return await dataplane.answer(made, lambda: fields, lambda result: result)


def test_an_answer_has_its_outputs_and_a_report() -> None:
    dataplane = plane()
    result = asyncio.run(ask(dataplane))
    assert result.outputs["grad_input"].shape == (1, 1, 7, 7)
    assert result.report.backend == "zeros"
    assert result.report.flops == 2 * 16 * 16
    assert dataplane.memory.used_bytes == 0


def test_decode_and_encode_run_in_threads() -> None:
    seen: list[str] = []

    async def scenario() -> None:
        dataplane = plane()
        with dataplane.memory.reservation() as reservation:
            call = Call(
                OPERATIONS["conv_bwd_data"], reservation, Deadline.after(5), timings := Timings()
            )

            def decode() -> Mapping[str, Any]:
                seen.append(threading.current_thread().name)
                return FIELDS

            def encode(result: Result) -> None:
                seen.append(threading.current_thread().name)

            await dataplane.answer(call, decode, encode)
            assert list(timings.stages_s) == ["decode", "queue", "compute", "encode"]

    asyncio.run(scenario())
    assert all(name.startswith("codec") for name in seen)
    assert len(seen) == 2


def test_refusals_come_before_the_backend() -> None:
    backend = Blocking()
    dataplane = plane(backend, limits=Limits(problem_bytes=100))
    with pytest.raises(ProblemTooLarge):
        asyncio.run(ask(dataplane))
    with pytest.raises(MalformedRequest):
        asyncio.run(ask(dataplane, {"weight": ONES}))
    assert backend.runs == 0
    assert dataplane.memory.used_bytes == 0


def test_outputs_are_reserved_before_they_exist() -> None:
    dataplane = plane(memory=MemoryBudget(7 * 7 * 4 - 1))
    with pytest.raises(ProblemTooLarge):
        asyncio.run(ask(dataplane))
    with pytest.raises(ProblemTooLarge):
        asyncio.run(ask(plane(memory=MemoryBudget(1000)), decoded_bytes=1001))
    asyncio.run(ask(plane(memory=MemoryBudget(7 * 7 * 4))))


def test_memory_is_held_while_a_thread_still_works_on_it() -> None:
    dataplane = plane()
    release = threading.Event()

    def slow_decode() -> Mapping[str, Any]:
        release.wait(5)
        return FIELDS

    async def scenario() -> None:
        with dataplane.memory.reservation() as reservation:
            call = Call(
                OPERATIONS["conv_bwd_data"], reservation, Deadline.after(0.05), Timings(), 1000
            )
            with pytest.raises(DeadlineExceeded):
                await dataplane.answer(call, slow_decode, lambda result: result)
        assert dataplane.memory.used_bytes == 1000
        release.set()
        for _ in range(500):
            if dataplane.memory.used_bytes == 0:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("memory was never given back")

    asyncio.run(scenario())


def test_time_that_was_computed_in_vain_counts_as_compute() -> None:
    """Past a deadline the work may still be ending; the queue is not to blame for it."""

    async def scenario() -> None:
        dataplane = plane(backend := Blocking())
        with dataplane.memory.reservation() as reservation:
            operation, timings = OPERATIONS["conv_bwd_data"], Timings()
            call = Call(operation, reservation, Deadline.after(0.3), timings)
            with pytest.raises(DeadlineExceeded):
                await dataplane.answer(call, lambda: FIELDS, lambda result: result)
        backend.release.set()
        assert timings.stages_s["compute"] > 0.15
        assert timings.stages_s["queue"] < 0.15

    asyncio.run(scenario())


def test_a_cancelled_caller_cancels_its_work() -> None:
    backend = Blocking()
    dataplane = plane(backend)

    async def scenario() -> None:
        asking = asyncio.ensure_future(ask(dataplane))
        await asyncio.to_thread(backend.started.acquire)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert await asyncio.to_thread(backend.ended.acquire, True, 5)

    asyncio.run(scenario())
    assert backend.cancelled == 1


def test_admission() -> None:
    backend = Blocking()
    dataplane = plane(backend, queue=ComputeQueue(1, 1))
    dataplane.admit()
    dataplane.queue.submit(lambda _: backend.release.wait(5))
    while not dataplane.queue.running:
        pass
    dataplane.queue.submit(lambda _: None)
    with pytest.raises(Overloaded):
        dataplane.admit()
    backend.release.set()
    dataplane.close()
    for refuses in (dataplane.require_ready, dataplane.admit):
        with pytest.raises(DeviceUnavailable, match="shutting down"):
            refuses()


def test_a_failed_device_takes_no_more_work() -> None:
    backend = Zeros()
    dataplane = plane(backend)
    dataplane.require_ready()
    backend.fault = "an illegal address"
    for refuses in (dataplane.require_ready, dataplane.admit):
        with pytest.raises(DeviceUnavailable, match="illegal address"):
            refuses()


def test_the_way_to_a_device_and_back_is_timed_apart() -> None:
    class Remote(Zeros):
        def run(self, *arguments: Any) -> Outcome:
            time.sleep(0.02)
            return replace(super().run(*arguments), upload_s=0.005, download_s=0.01)

    async def scenario() -> Timings:
        dataplane = plane(Remote())
        with dataplane.memory.reservation() as reservation:
            operation, timings = OPERATIONS["conv_bwd_data"], Timings()
            call = Call(operation, reservation, Deadline.after(5), timings)
            await dataplane.answer(call, lambda: FIELDS, lambda result: result)
            return timings

    stages_s = asyncio.run(scenario()).stages_s
    assert (stages_s["upload"], stages_s["download"]) == (0.005, 0.01)
    assert stages_s["compute"] == pytest.approx(0.005, abs=0.005)


def test_a_deadline_is_not_confused_with_a_timeout_inside() -> None:
    async def scenario() -> None:
        with pytest.raises(TimeoutError):
            async with Deadline.after(5).enforced():
                raise TimeoutError
        with pytest.raises(DeadlineExceeded, match=r"0\.01 s"):
            async with Deadline.after(0.01).enforced():
                await asyncio.sleep(5)
        with pytest.raises(DeadlineExceeded):
            async with Deadline.after(-1).enforced():
                await asyncio.sleep(5)

    asyncio.run(scenario())
