"""Several devices on one host: requests side by side, a large problem split over all of them.

Parts that lie side by side give the bits of the whole; sums give those of the same parts added up
in their order, on however many devices.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from convgrad import Call, Client, calls
from convgrad.errors import ClientTimeout, DeadlineExceeded
from convgrad_service.backends.base import Outcome
from convgrad_service.backends.cpu import CpuBackend
from convgrad_service.engine.memory import tensor_layout as parts
from convgrad_service.engine.memory.tensor_layout import tensor_layout_of
from convgrad_service.engine.scheduling.scheduler import Task
from tests.support.tree_server import TreeServer, serving_tree, until

pytestmark = pytest.mark.processes

GRAD = np.random.default_rng(0).standard_normal((16, 4, 32, 32), np.float32)
WEIGHT = np.random.default_rng(1).standard_normal((4, 6, 3, 3), np.float32)
IMAGES = np.random.default_rng(2).standard_normal((16, 6, 32, 32), np.float32)
PARTS, SUM_PARTS = 8, 4
SUM: dict[str, Any] = {
    "input": IMAGES,
    "grad_output": GRAD,
    "weight_size": (3, 3),
    "padding": 1,
    "alpha": 0.5,
    "beta": -2.0,
    "accumulate": WEIGHT,
}


class Slow(CpuBackend):
    """One of three devices; each takes its time for a part, so that all are seen at work."""

    devices = 3

    def run(self, *arguments: Any) -> Outcome:
        time.sleep(0.1)
        return super().run(*arguments)


class TwoOfThem(Slow):
    """The same, one of two."""

    devices = 2


class Alone(Slow):
    """The same, and the only one."""

    devices = 1


def slow(device: int) -> Slow:
    """See `Slow`."""
    return Slow(threads=1)


def two(device: int) -> Slow:
    """See `TwoOfThem`."""
    return TwoOfThem(threads=1)


def alone(device: int) -> Slow:
    """See `Alone`."""
    return Alone(threads=1)


@pytest.fixture(autouse=True, scope="module")
def _small_parts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        # The front end in this process decides how a problem is cut; workers are told.
        patch.setattr(parts, "PART_BYTES", 80_000)
        tensor_layout_of.cache_clear()
        yield
    tensor_layout_of.cache_clear()


@pytest.fixture(scope="module")
def server() -> Iterator[TreeServer]:
    options: dict[str, Any] = {"max_inflight_bytes": "256MiB", "system_shared_memory": True}
    with serving_tree(slow, slots=1, **options) as serving:
        yield serving


def bwd_data() -> Call[Any]:
    return calls.conv_bwd_data(GRAD, WEIGHT, padding=1)


class Watch:
    """Sees how many tasks ran at the same time at most: it looks whenever one begins."""

    def __init__(self, server: TreeServer) -> None:
        self.most = 0
        self._schedule, self._patch = server.tree.hub.scheduler, pytest.MonkeyPatch()

    def __enter__(self) -> Watch:
        started = self._schedule._started

        def looked(task: Task, *kept: Any) -> bool:
            begun = started(task, *kept)
            self.most = max(self.most, self._schedule.running)
            return begun

        self._patch.setattr(self._schedule, "_started", looked)
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


def expected() -> Any:
    from convgrad.contract import OPERATIONS, validate
    from convgrad_service.problems import problem_from

    given: dict[str, Any] = {"grad_output": GRAD, "weight": WEIGHT, "padding": 1}
    problem = problem_from("conv_bwd_data", validate(OPERATIONS["conv_bwd_data"].request, given))
    tensors = {"grad_output": GRAD, "weight": WEIGHT}
    return CpuBackend(threads=1).run(problem, tensors).outputs["grad_input"]


def summed(operation: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a sum, computed one after another in this process."""
    from convgrad.contract import OPERATIONS, validate
    from convgrad_service.problems import problem_from, run_in_pieces

    request = validate(OPERATIONS[operation].request, given)
    problem = problem_from(operation, request)
    count = tensor_layout_of(problem).parts
    assert count >= SUM_PARTS
    cpu = CpuBackend(threads=1)
    return run_in_pieces(problem, request.tensors(), count, lambda p, t: cpu.run(p, t).outputs)


def bwd_weight() -> Call[Any]:
    return calls.grouped_conv_bwd_weight(**SUM)


def test_a_large_problem_is_computed_on_all_devices_to_the_same_bits(server: TreeServer) -> None:
    with Client(server.url, max_retries=0) as client, Watch(server) as watch:
        answer = client.call(bwd_data())
    assert watch.most == 3
    assert answer.report.pieces == PARTS
    assert (answer.outputs == expected()).all()


def test_so_is_one_whose_tensors_lie_in_shared_memory(server: TreeServer) -> None:
    with Client(server.url, max_retries=0, transport="shm") as client:
        assert (client.call(bwd_data()).outputs == expected()).all()  # comes over the connection
        with Watch(server) as watch:
            answer = client.call(bwd_data())
    assert watch.most == 3
    assert (answer.outputs == expected()).all()


def test_a_device_lost_in_the_middle_costs_nothing(server: TreeServer) -> None:
    workers = server.tree.supervisor.workers
    with Client(server.url, max_retries=0) as client:
        rows = client.iterate(bwd_data())
        first = next(rows)
        os.kill(workers[1].process_id, signal.SIGKILL)
        found = [first, *rows]
    assert (found[-1].whole == expected()).all()
    until(lambda: server.tree.hub.scheduler.deaths >= 1)
    until(lambda: sorted(workers) == [0, 1, 2])


def test_small_requests_go_on_beside_a_large_one(server: TreeServer) -> None:
    ones = np.ones((1, 1, 1, 1), np.float32)
    with Client(server.url, max_retries=0) as large, Client(server.url, max_retries=0) as small:
        seen = threading.Event()

        def compute() -> None:
            while not seen.is_set():
                large.call(bwd_data())

        computing = threading.Thread(target=compute)
        computing.start()
        try:
            until(lambda: server.tree.hub.scheduler.running == 3)
            assert small.conv_bwd_data(ones, ones).item() == 1
        finally:
            seen.set()
            computing.join()


def test_a_sum_is_computed_on_all_devices_and_added_up_in_order(server: TreeServer) -> None:
    wanted = summed("grouped_conv_bwd_weight", SUM)["grad_weight"]
    held = server.settled_bytes()
    with Client(server.url, max_retries=0) as client:
        for _ in range(2):
            with Watch(server) as watch:
                answer = client.call(bwd_weight())
            assert watch.most == 3
            assert answer.report.pieces == SUM_PARTS
            assert (answer.outputs.grad_weight == wanted).all()
    until(lambda: server.held_bytes == held)


def test_a_sum_over_shared_memory_has_the_same_bits(server: TreeServer) -> None:
    wanted = summed("grouped_conv_bwd_weight", SUM)["grad_weight"]
    with Client(server.url, max_retries=0, transport="shm") as client:
        for _ in range(2):  # the first comes over the connection
            assert (client.call(bwd_weight()).outputs.grad_weight == wanted).all()


def test_all_gradients_of_one_upload_are_split_too(server: TreeServer) -> None:
    given = {"grad_output": GRAD, "input": IMAGES, "weight": WEIGHT, "padding": 1}
    wanted = summed("conv_backward", given)
    with Client(server.url, max_retries=0) as client, Watch(server) as watch:
        found = client.conv_backward(GRAD, IMAGES, WEIGHT, padding=1)
    assert watch.most == 3
    for name, array in wanted.items():
        assert (getattr(found, name) == array).all()


@pytest.mark.parametrize("recipe", [two, alone])
def test_other_numbers_of_devices_give_the_same_bits(recipe: Any) -> None:
    wanted = summed("grouped_conv_bwd_weight", SUM)["grad_weight"]
    with serving_tree(recipe, slots=1) as other, Client(other.url, max_retries=0) as client:
        answer = client.call(bwd_weight())
    assert answer.report.pieces == SUM_PARTS
    assert (answer.outputs.grad_weight == wanted).all()


def test_a_device_killed_under_load_costs_no_sum(server: TreeServer) -> None:
    wanted = summed("grouped_conv_bwd_weight", SUM)["grad_weight"]
    schedule, workers = server.tree.hub.scheduler, server.tree.supervisor.workers
    until(lambda: sorted(workers) == [0, 1, 2])
    held, deaths, killed = server.settled_bytes(), schedule.deaths, threading.Event()
    wrong: list[BaseException | str] = []

    def ask() -> None:
        try:
            with Client(server.url, max_retries=0) as client:
                last = False
                while not last:
                    last = killed.is_set()
                    if not (client.call(bwd_weight()).outputs.grad_weight == wanted).all():
                        wrong.append("other bits")
        except BaseException as error:  # noqa: BLE001 - the test is to fail of it
            wrong.append(error)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: schedule.running == 3)
        os.kill(workers[1].process_id, signal.SIGKILL)
        until(lambda: schedule.deaths > deaths)
    finally:
        killed.set()
        for thread in threads:
            thread.join()
    assert not wrong
    until(lambda: sorted(workers) == [0, 1, 2])
    until(lambda: server.held_bytes == held)


def test_a_sum_past_its_deadline_frees_all(server: TreeServer) -> None:
    until(lambda: len(server.tree.supervisor.workers) == 3)
    held = server.settled_bytes()
    # Four parts of a tenth of a second on three devices.
    with (
        Client(server.url, max_retries=0, timeout=0.15) as client,
        pytest.raises((ClientTimeout, DeadlineExceeded)),
    ):
        client.call(bwd_weight())
    until(lambda: not server.tree.hub.scheduler.running)
    until(lambda: server.held_bytes == held)


def test_adding_up_in_no_time_makes_no_part_brief(server: TreeServer) -> None:
    """A brief task cannot be stopped, and keeps its worker from receiving the next one."""
    with Client(server.url, max_retries=0) as client:
        for _ in range(2):
            client.call(bwd_weight())
    assert not any(worker._brief for worker in server.tree.supervisor.workers.values())
