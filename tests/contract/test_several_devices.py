"""Several devices on one host: requests side by side, a large problem split over all of them."""

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
from convgrad_service.backends.base import Outcome
from convgrad_service.backends.cpu import CpuBackend
from convgrad_service.engine import parts
from convgrad_service.engine.arrangement import forget_sizes
from tests.contract.tree_server import TreeServer, serving_tree, until

GRAD = np.random.default_rng(0).standard_normal((16, 4, 32, 32), np.float32)
WEIGHT = np.random.default_rng(1).standard_normal((4, 6, 3, 3), np.float32)
PARTS = 8


class Slow(CpuBackend):
    """One of three devices; each takes its time for a part, so that all are seen at work."""

    devices = 3

    def run(self, *arguments: Any) -> Outcome:
        time.sleep(0.1)
        return super().run(*arguments)


def slow(device: int) -> Slow:
    """See `Slow`."""
    return Slow(threads=1)


@pytest.fixture(autouse=True, scope="module")
def _small_parts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        # The front end in this process decides how a problem is cut; workers are told.
        patch.setattr(parts, "PART_BYTES", 80_000)
        forget_sizes()
        yield
    forget_sizes()


@pytest.fixture(scope="module")
def server() -> Iterator[TreeServer]:
    options: dict[str, Any] = {"max_inflight_bytes": "256MiB", "system_shared_memory": True}
    with serving_tree(slow, slots=1, **options) as serving:
        yield serving


def bwd_data() -> Call[Any]:
    return calls.conv_bwd_data(GRAD, WEIGHT, padding=1)


class Watch(threading.Thread):
    """Sees how many tasks ran at the same time at most."""

    def __init__(self, server: TreeServer) -> None:
        super().__init__()
        self.most = 0
        self._schedule, self._ended = server.tree.hub.schedule, threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.002):
            self.most = max(self.most, self._schedule.running)

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()


def expected() -> Any:
    from convgrad.contract import OPERATIONS, validate
    from convgrad_service.problems import problem_from

    given: dict[str, Any] = {"grad_output": GRAD, "weight": WEIGHT, "padding": 1}
    problem = problem_from("conv_bwd_data", validate(OPERATIONS["conv_bwd_data"].request, given))
    tensors = {"grad_output": GRAD, "weight": WEIGHT}
    return CpuBackend(threads=1).run(problem, tensors).outputs["grad_input"]


def test_a_large_problem_is_computed_on_all_devices_to_the_same_bits(server: TreeServer) -> None:
    with Client(server.url, retries=0) as client, Watch(server) as watch:
        answer = client.call(bwd_data())
    assert watch.most == 3
    assert answer.report.pieces == PARTS
    assert (answer.outputs == expected()).all()


def test_so_is_one_whose_tensors_lie_in_shared_memory(server: TreeServer) -> None:
    with Client(server.url, retries=0, transport="shm") as client:
        assert (client.call(bwd_data()).outputs == expected()).all()  # comes over the connection
        with Watch(server) as watch:
            answer = client.call(bwd_data())
    assert watch.most == 3
    assert (answer.outputs == expected()).all()


def test_a_device_lost_in_the_middle_costs_nothing(server: TreeServer) -> None:
    workers = server.tree.supervisor.workers
    with Client(server.url, retries=0) as client:
        rows = client.iterate(bwd_data())
        first = next(rows)
        os.kill(workers[1].process_id, signal.SIGKILL)
        found = [first, *rows]
    assert (found[-1].whole == expected()).all()
    assert server.tree.hub.schedule.deaths >= 1
    until(lambda: sorted(workers) == [0, 1, 2])


def test_small_requests_go_on_beside_a_large_one(server: TreeServer) -> None:
    ones = np.ones((1, 1, 1, 1), np.float32)
    with Client(server.url, retries=0) as large, Client(server.url, retries=0) as small:
        computing = threading.Thread(target=lambda: large.call(bwd_data()))
        computing.start()
        until(lambda: server.tree.hub.schedule.running == 3)
        assert small.conv_bwd_data(ones, ones).item() == 1
        computing.join()
