"""Faults cost nobody a request: workers, front ends and clients die, and every answer is right."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from convgrad import Client
from convgrad.errors import DeviceUnavailable, Internal
from convgrad_service.backends.base import Outcome
from tests.support.http_server import SAFETENSORS
from tests.support.killable import POISON, Mortal, load, mortal, ready
from tests.support.raw_http import post_head
from tests.support.tree_server import TreeServer, alive, descriptors, serving_tree, until

pytestmark = pytest.mark.processes


class OneOfTwo(Mortal):
    """One of two devices, slow enough that both are seen at work."""

    devices = 2

    def run(self, *arguments: Any) -> Outcome:
        time.sleep(0.05)
        return super().run(*arguments)


def one_of_two(device: int) -> OneOfTwo:
    """See `OneOfTwo`."""
    return OneOfTwo()


def while_unbroken(broken: Path, device: int) -> Mortal:
    """A device that cannot be used while there is such a file."""
    if broken.exists():
        raise DeviceUnavailable("it is broken")
    return Mortal()


def once_open(gate: Path, device: int) -> Mortal:
    """A device that works once this file exists."""
    until(gate.exists)
    return Mortal()


class Waiting(Mortal):
    """Computes once there is such a file: whoever has asked is being served until then."""

    def __init__(self, gate: Path, _: int) -> None:
        self._gate = gate

    def run(self, *arguments: Any) -> Outcome:
        until(self._gate.exists)
        return super().run(*arguments)


@pytest.fixture(scope="module")
def server() -> Iterator[TreeServer]:
    with serving_tree(mortal, http_workers=2, max_inflight_bytes="512MiB") as serving:
        yield serving


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_a_worker_killed_again_and_again_costs_no_request(server: TreeServer, kills: int) -> None:
    with load(server.url) as warming:
        until(lambda: warming.answered > 50)
    held, files = server.settled_bytes(), descriptors(os.getpid())
    with load(server.url) as loading:
        for _ in range(kills):
            before = loading.answered
            until(lambda: loading.answered > before + 20)  # noqa: B023
            time.sleep(random.random() * 0.05)
            server.kill_worker()
        until(lambda: loading.answered > before + 20)
    until(lambda: server.held_bytes == held)
    until(lambda: descriptors(os.getpid()) <= files)
    assert server.tree.hub.arena.resident_bytes() <= 512 * 2**20


def test_what_kills_its_worker_alone_is_internal_and_costs_nobody_else(server: TreeServer) -> None:
    poisoned = np.full((1, 1, 1, 1), POISON, np.float32)
    with (
        load(server.url),
        Client(server.url, max_retries=0, timeout=60) as client,
        pytest.raises(Internal, match="internal error"),
    ):
        client.conv_bwd_data(np.ones((1, 1, 4, 4), np.float32), poisoned)
    until(lambda: ready(server))


def test_ready_is_false_only_while_no_device_works(tmp_path: Path) -> None:
    gate = tmp_path / "open"
    gate.touch()
    ones = np.ones((1, 1, 1, 1), np.float32)
    with (
        serving_tree(partial(once_open, gate)) as server,
        Client(server.url, max_retries=0, timeout=60) as client,
        ThreadPoolExecutor(1) as asking,
    ):
        worker = server.worker_id
        assert worker is not None
        gate.unlink()  # its successor comes when the gate is open again
        os.kill(worker, signal.SIGKILL)
        until(lambda: not ready(server))
        asked = asking.submit(client.conv_bwd_data, ones, ones)  # and still nobody is refused
        with pytest.raises(TimeoutError):
            asked.result(0.1)
        gate.touch()
        assert asked.result(60).item() == 2
        until(lambda: ready(server))


def test_two_devices_work_side_by_side_and_one_is_enough() -> None:
    with serving_tree(one_of_two, slots=1) as server:
        workers = server.tree.supervisor.workers
        assert sorted(workers) == [0, 1]
        with load(server.url) as loading:
            until(lambda: server.tree.hub.scheduler.running == 2)
            killed = workers[1].process_id
            os.kill(killed, signal.SIGKILL)
            until(lambda: 1 not in workers or workers[1].process_id != killed)
            assert ready(server)
            before = loading.answered
            until(lambda: loading.answered > before + 5)
            until(lambda: sorted(workers) == [0, 1])
        assert ready(server)


def test_a_device_that_cannot_be_used_is_an_error_at_the_start(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.touch()
    with (
        pytest.raises(AssertionError, match="it is broken"),
        serving_tree(partial(while_unbroken, broken)),
    ):
        pass


@pytest.mark.slow
def test_a_device_that_breaks_is_given_up_and_taken_back_when_it_works(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    ones = np.ones((1, 1, 1, 1), np.float32)
    with serving_tree(partial(while_unbroken, broken)) as server:
        worker = server.worker_id
        assert worker is not None
        broken.touch()
        os.kill(worker, signal.SIGKILL)
        with Client(server.url, max_retries=0, timeout=60) as client:
            # It waits for as long as there is hope, and is told when there is none.
            with pytest.raises(DeviceUnavailable, match="the device has failed: it is broken"):
                client.conv_bwd_data(ones, ones)
            assert not ready(server)
            broken.unlink()
            until(lambda: server.worker_id is not None)
            assert client.conv_bwd_data(ones, ones).item() == 2


def test_a_client_that_leaves_frees_its_place(server: TreeServer) -> None:
    held = server.settled_bytes()
    body = 8 * 2**20
    header = (
        '{"grad_output":{"dtype":"F32","shape":[1,1,1024,2048],"data_offsets":[4,8388612]},'
        '"weight":{"dtype":"F32","shape":[1,1,1,1],"data_offsets":[0,4]}}'
    )
    sent = len(header).to_bytes(8, "little") + header.encode()
    port = int(server.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as connection:
        request = post_head(len(sent) + 4 + body, content_type=SAFETENSORS) + sent + b"0" * 2**20
        connection.sendall(request)
        until(lambda: server.held_bytes > held + body)
    until(lambda: server.held_bytes == held)


def test_a_front_end_that_dies_gives_back_what_it_held_and_comes_again(tmp_path: Path) -> None:
    gate = tmp_path / "open"
    with serving_tree(partial(Waiting, gate), http_workers=2) as server:
        held = server.settled_bytes()
        grad = np.ones((1, 1, 2048, 1024), np.float32)
        with ThreadPoolExecutor(1) as asking, Client(server.url, max_retries=0) as client:
            asked = asking.submit(client.conv_bwd_data, grad, np.ones((1, 1, 1, 1), np.float32))
            until(lambda: server.tree.hub.scheduler.running == 1)
            assert server.held_bytes > held
            for process in server.tree.front_processes:
                process.kill()
            assert asked.exception(60) is not None
        gate.touch()
        until(lambda: len(server.tree.front_processes) == 3)
        until(lambda: server.held_bytes == held)

        def works() -> bool:
            try:
                return ready(server)
            except httpx.HTTPError:
                return False

        until(works)


def test_every_front_end_tells_all_there_is_to_tell(server: TreeServer) -> None:
    """One answer to /metrics, whatever process is asked."""
    ones = np.ones((1, 1, 1, 1), np.float32)
    for _ in range(6):
        with Client(server.url) as client:
            client.conv_bwd_data(ones, ones)
    name = 'convgrad_requests_total{code="ok",operation="conv_bwd_data",transport="http"} '

    def counted() -> list[float]:
        # A connection each, so both are asked.
        texts = [httpx.get(f"{server.url}/metrics", timeout=60).text for _ in range(12)]
        return [float(text.partition(name)[2].split("\n")[0] or 0) for text in texts]

    # What was observed is told within a moment.
    until(lambda: len(counts := set(counted())) == 1 and counts.pop() >= 6)


@pytest.mark.parametrize(("number", "workers"), [(signal.SIGKILL, 2), (signal.SIGTERM, 1)])
def test_no_process_outlives_the_server(
    tmp_path: Path, number: signal.Signals, workers: int
) -> None:
    port_file = tmp_path / "port"
    command = "import sys; from convgrad_service.server.command import serve; sys.exit(serve())"
    process = subprocess.Popen(
        [sys.executable, "-c", command, "--port", "0", "--port-file", str(port_file)],
        env={
            **os.environ,
            "CONVGRAD_GRPC_PORT": "0",
            "CONVGRAD_HTTP_WORKERS": str(workers),
            "CONVGRAD_LOG_LEVEL": "error",
        },
        stdout=subprocess.DEVNULL,
    )
    try:
        until(port_file.exists)
        listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        children = [int(child) for child in listed.split()]
        # One worker; front ends have processes of their own where HTTP has several.
        assert len(children) == 1 + (1 + workers if workers > 1 else 0)
        process.send_signal(number)
        assert process.wait(60) == (0 if number is signal.SIGTERM else -number)
        until(lambda: not any(map(alive, children)))
    finally:
        process.kill()
        process.wait()
