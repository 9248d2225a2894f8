"""A process that hangs is noticed, ended and replaced, and what it had to do is done again."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from convgrad import Client
from convgrad.errors import Internal
from convgrad_service.backends.base import Cancellation, Outcome
from convgrad_service.problems import Problem
from tests.support.killable import Mortal, load, mortal, ready
from tests.support.tree_server import TreeServer, serving_tree, until

pytestmark = pytest.mark.processes

ONES = np.ones((1, 1, 1, 1), np.float32)
HANGS, SLOW = 13.0, 14.0
SILENT_S = 2.0


class Hanging(Mortal):
    """Hangs while there is such a file, or where a tensor says so; may be slow, and get on."""

    def __init__(self, hung: Path, _: int) -> None:
        self._hung = hung

    def run(
        self,
        problem: Problem,
        tensors: Mapping[str, NDArray[Any]],
        cancelled: threading.Event | None = None,
        out: Mapping[str, NDArray[Any]] | None = None,
    ) -> Outcome:
        weight = tensors["weight"].flat[0]
        while weight == HANGS or self._hung.exists():
            time.sleep(0.05)  # whatever anybody says
        if weight == SLOW:
            assert isinstance(cancelled, Cancellation)
            for _ in range(30):
                time.sleep(0.1)
                cancelled.advanced()
        return super().run(problem, tensors, cancelled, out)


@pytest.fixture
def server() -> Iterator[TreeServer]:
    with serving_tree(mortal, http_workers=2, heartbeat_timeout_s=SILENT_S) as serving:
        yield serving


def hung(server: TreeServer, name: str) -> int:
    return server.tree.hub.children.hung[name]


# Twenty starts of a worker take minutes on a busy machine.
MANY = pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])


@pytest.mark.parametrize("stops", [1, MANY])
def test_a_worker_that_is_stopped_under_load_costs_no_request(
    server: TreeServer, stops: int
) -> None:
    with load(server.url) as loading:
        for number in range(stops):
            before = loading.answered
            until(lambda: loading.answered > before + 20)  # noqa: B023
            stopped = server.worker_id
            assert stopped is not None
            os.kill(stopped, signal.SIGSTOP)
            until(lambda: hung(server, "convgrad-worker") == number + 1)  # noqa: B023
            assert not server.tree.hub.status.ready
            until(lambda: server.worker_id not in (None, stopped))  # noqa: B023
        before = loading.answered
        until(lambda: loading.answered > before + 20)
    assert ready(server)
    # From the stop to the answer: silence, and the start of a worker on a busy machine.
    assert loading.longest_s < 2 * SILENT_S + 40
    assert "convgrad_children_hung_total" in httpx.get(f"{server.url}/metrics", timeout=60).text


def test_a_front_end_that_is_stopped_is_replaced(server: TreeServer) -> None:
    stopped = [process.pid for process in server.tree.front_processes]
    for process_id in stopped:
        os.kill(process_id, signal.SIGSTOP)
    until(lambda: sum(server.tree.hub.children.hung.values()) == len(stopped))

    def works() -> bool:
        with suppress(httpx.HTTPError):
            return ready(server)
        return False

    until(works)
    assert not {process.pid for process in server.tree.front_processes} & set(stopped)


def test_a_problem_that_hangs_is_an_error_and_costs_nobody_else(tmp_path: Path) -> None:
    make = partial(Hanging, tmp_path / "hung")
    timeouts = {"heartbeat_timeout_s": 2.0, "progress_timeout_s": 1.0}
    with (
        serving_tree(make, **timeouts) as server,
        load(server.url) as loading,
        Client(server.url, max_retries=0, timeout=60) as client,
    ):
        with pytest.raises(Internal):
            client.conv_bwd_data(ONES, HANGS * ONES)
        assert hung(server, "convgrad-worker") == 2  # beside others, and alone
        before = loading.answered
        until(lambda: loading.answered > before + 20)
        assert client.conv_bwd_data(ONES, SLOW * ONES).item() == SLOW + 1
        assert hung(server, "convgrad-worker") == 2


def test_a_server_whose_device_goes_on_hanging_is_not_live(tmp_path: Path) -> None:
    gate = tmp_path / "hung"
    timeouts = {"heartbeat_timeout_s": 1.0, "progress_timeout_s": 0.5, "device_timeout_s": 2.0}
    with serving_tree(partial(Hanging, gate), **timeouts) as server:

        def live() -> bool:
            return httpx.get(f"{server.url}/v2/health/live", timeout=60).status_code == 200

        assert live()
        gate.touch()
        with Client(server.url, max_retries=0, timeout=60) as client:

            def fails() -> bool:
                with pytest.raises(Internal):
                    client.conv_bwd_data(ONES, ONES)
                return not live()

            until(fails)
            gate.unlink()
            # A worker that answers while it is idle is tried again: nobody sends an unready one
            # the request that would prove it.
            until(lambda: live() and ready(server))
            assert client.conv_bwd_data(ONES, ONES).item() == 2
