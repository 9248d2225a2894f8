"""Which problems run inline, with the same results as in a worker."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from convgrad.contract import OPERATIONS, validate
from convgrad.contract.examinations import PLANS
from convgrad.errors import InvalidProblem
from convgrad_service.backends.base import Outcome
from convgrad_service.engine.embedded import embedded_hub
from convgrad_service.engine.hub import Hub
from convgrad_service.engine.memory.tensor_layout import TensorLayout, tensor_layout_of
from convgrad_service.engine.options import EngineOptions, InlineBackend
from convgrad_service.engine.scheduling.job import Job
from convgrad_service.engine.scheduling.scheduler import Task
from convgrad_service.engine.shm.registry import RegionSlice
from convgrad_service.engine.workers.inline_executor import InlineExecutor
from convgrad_service.problems import problem_from
from tests.support.fake_backends import Failing, Sums, Zeros
from tests.support.scheduling import alone

ARRAY = np.arange(16, dtype=np.float32).reshape(1, 1, 4, 4)
POOL = {"input": ARRAY, "kernel_size": 2}
BY_INDEX = {
    "grad_output": np.ones((1, 1, 2, 2), np.float32),
    "indices": np.array([[[[5, 7], [13, 15]]]]),
    "kernel_size": 2,
    "input_size": [4, 4],
}


def arranged(name: str, fields: Mapping[str, Any], shared: tuple[str, ...] = ()) -> TensorLayout:
    operation = OPERATIONS[name]
    return tensor_layout_of(problem_from(name, validate(operation.request, fields)), shared)


@contextmanager
def inline_executor(
    backend: Callable[[], Zeros] = Sums,
    name: str = "sums",
    files: Mapping[int, int] = MappingProxyType({}),
) -> Iterator[tuple[Hub, InlineExecutor]]:
    """Make an executor next to a hub whose workers run a backend named "sums"."""
    options = EngineOptions(tensor_bytes=10**6, text_bytes=10**5)
    hub = embedded_hub(Sums(), options)
    regions: Any = SimpleNamespace(
        descriptor=files.__getitem__, extent=lambda _: (None, 2**20), on_closed=[]
    )
    yield hub, InlineExecutor(hub, InlineBackend(name, backend), regions)
    hub.close()
    assert hub.memory.used_bytes == 0


def run(test: Callable[[], None]) -> None:
    """Run a scenario on an event loop, which the hub needs."""

    async def inside() -> None:
        test()

    asyncio.run(inside())


def test_layouts_that_a_worker_computed_fast_run_inline() -> None:
    def test() -> None:
        with inline_executor() as (hub, executor):
            layout = arranged("maxpool2d_fwd", POOL)
            lease = hub.memory.try_reserve(layout.size_bytes)
            assert lease is not None
            given, made = layout.inputs[0], layout.outputs[0]
            assert given.offset is not None
            assert made.offset is not None
            hub.arena.array(lease.offset + given.offset, given.spec)[...] = ARRAY
            assert executor.try_run(layout, lease.offset) is None  # no worker has computed it
            executor.learn(layout, 1e-6)
            finished = executor.try_run(layout, lease.offset)
            assert finished is not None
            assert finished.kernel == "zeros"
            found = hub.arena.array(lease.offset + made.offset, made.spec)
            assert (found == ARRAY.sum()).all()
            lease.release()

    run(test)


class Slow(Sums):
    """Reports times longer than a worker's."""

    def run(self, *arguments: Any) -> Outcome:
        return replace(super().run(*arguments), compute_s=1e-3)


def test_slow_layouts_return_to_workers() -> None:
    def test() -> None:
        with inline_executor(Slow) as (_, executor):
            layout = arranged("maxpool2d_fwd", POOL)
            executor.learn(layout, 1e-3)
            assert executor.try_run(layout, 0) is None  # a worker took long
            executor.learn(layout, 1e-6)
            tries = 0
            while executor.try_run(layout, 0) is not None:
                tries += 1
                executor.learn(layout, 1e-6)
            assert tries > 1  # a single run proves nothing on a busy machine

    run(test)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("maxpool2d_bwd", BY_INDEX),
        ("maxpool2d_fwd", {"input": np.zeros((1, 64, 16, 16), np.float32), "kernel_size": 2}),
    ],
    ids=["its data names elements", "it is large"],
)
def test_large_or_indexed_problems_never_run_inline(name: str, fields: Mapping[str, Any]) -> None:
    def test() -> None:
        with inline_executor() as (_, executor):
            layout = arranged(name, fields)
            executor.learn(layout, 1e-6)
            assert executor.try_run(layout, 0) is None

    run(test)


def test_nothing_runs_inline_if_workers_use_another_backend() -> None:
    def test() -> None:
        with inline_executor(name="cpu") as (_, executor):
            layout = arranged("maxpool2d_fwd", POOL)
            executor.learn(layout, 1e-6)
            assert executor.try_run(layout, 0) is None

    run(test)


@pytest.fixture
def file() -> Iterator[Callable[[bytes], int]]:
    """Return a function that creates a file with given bytes."""
    made: list[int] = []

    def make(data: bytes) -> int:
        made.append(os.memfd_create("region"))
        os.write(made[-1], data)
        return made[-1]

    yield make
    for descriptor in made:
        os.close(descriptor)


SHARED = RegionSlice(1, 0), RegionSlice(2, 8)


def test_shared_memory_is_read_and_written_at_its_offsets(
    file: Callable[[bytes], int],
) -> None:
    files = {1: file(ARRAY.tobytes()), 2: file(bytes(32))}

    def test() -> None:
        with inline_executor(files=files) as (_, executor):
            layout = arranged("maxpool2d_fwd", POOL, ("input", "output"))
            executor.learn(layout, 1e-6)
            assert executor.try_run(layout, 0, SHARED) is not None

    run(test)
    found = np.frombuffer(os.pread(files[2], 32, 0), np.float32)
    assert found.tolist() == [0, 0, 120, 120, 120, 120, 0, 0]


def test_a_file_that_is_cut_off_while_it_is_mapped_is_an_error_of_the_request(
    file: Callable[[bytes], int],
) -> None:
    files = {1: file(ARRAY.tobytes()), 2: file(bytes(32))}

    def test() -> None:
        with inline_executor(files=files) as (_, executor):
            layout = arranged("maxpool2d_fwd", POOL, ("input", "output"))
            executor.learn(layout, 1e-6)
            assert executor.try_run(layout, 0, SHARED) is not None
            os.ftruncate(files[1], 0)
            with pytest.raises(InvalidProblem, match="has been shortened"):
                executor.try_run(layout, 0, SHARED)

    run(test)


@pytest.mark.parametrize(
    ("kept_bytes", "backend", "sentence"),
    [
        (40, Sums, "has been shortened"),
        (64, lambda: Failing(InvalidProblem("this is wrong")), "this is wrong"),
    ],
    ids=["its file was cut off", "the backend refuses it"],
)
def test_errors_are_raised_to_the_request(
    file: Callable[[bytes], int], kept_bytes: int, backend: Callable[[], Zeros], sentence: str
) -> None:
    files = {1: file(ARRAY.tobytes()[:kept_bytes]), 2: file(bytes(32))}

    def test() -> None:
        with inline_executor(backend, files=files) as (
            _,
            executor,
        ):  # regions are not released here
            layout = arranged("maxpool2d_fwd", POOL, ("input", "output"))
            executor.learn(layout, 1e-6)
            with pytest.raises(InvalidProblem, match=sentence):
                executor.try_run(layout, 0, SHARED)

    run(test)


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="this system has none")
def test_full_file_system_is_an_error_of_the_request(
    file: Callable[[bytes], int],
) -> None:
    full = os.open("/dev/full", os.O_RDWR)  # like /dev/shm, if a client's file is sparse
    files = {1: file(ARRAY.tobytes()), 2: full}

    def test() -> None:
        with inline_executor(files=files) as (_, executor):
            layout = arranged("maxpool2d_fwd", POOL, ("input", "output"))
            executor.learn(layout, 1e-6)
            with pytest.raises(InvalidProblem, match="has been shortened"):
                executor.try_run(layout, 0, SHARED)

    try:
        run(test)
    finally:
        os.close(full)


def test_examinations_never_run_inline() -> None:
    def test() -> None:
        with inline_executor() as (_, executor):
            plan = PLANS["conv_fwd"]
            request = validate(plan.request, plan.example)
            layout = tensor_layout_of(problem_from(plan.name, request))
            executor.learn(layout, 1e-6)
            assert executor.try_run(layout, 0) is None

    run(test)


def test_nothing_runs_inline_during_a_timing() -> None:
    def test() -> None:
        with inline_executor() as (hub, executor):
            layout = arranged("maxpool2d_fwd", POOL)
            executor.learn(layout, 1e-6)
            assert executor.try_run(layout, 0) is not None
            (worker,) = hub.scheduler._running
            timing = Task(Job(alone(layout), 0), 0.0, large=True)
            hub.scheduler._running[worker].append(timing)
            assert hub.status.timing
            assert executor.try_run(layout, 0) is None
            hub.scheduler._running[worker].remove(timing)
            assert executor.try_run(layout, 0) is not None

    run(test)
