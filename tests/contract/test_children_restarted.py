"""Nothing dies for good: workers whose loops fail, children that cannot be started for a time."""

from __future__ import annotations

import json
import os
import resource
import signal
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton

import convgrad
from convgrad import Client
from tests.support.killable import mortal
from tests.support.tree_server import TreeServer, descriptors, serving_tree, until

pytestmark = pytest.mark.processes

SHM = Path("/dev/shm")  # noqa: S108 - what is tested
ONES = np.ones((1, 1, 1, 1), np.float32)


@pytest.fixture(scope="module")
def server() -> Iterator[TreeServer]:
    with serving_tree(mortal, http_workers=2, system_shared_memory=True) as serving:
        yield serving


def works(server: TreeServer) -> bool:
    with Client(server.url, max_retries=0, timeout=60) as client:
        return bool(client.conv_bwd_data(ONES, ONES).item() == 2)


def infer(name: str) -> dict[str, object]:
    place = {"shared_memory_region": name, "shared_memory_byte_size": 4}
    tensor = {"datatype": "FP32", "shape": [1, 1, 1, 1], "parameters": place}
    return {"inputs": [{"name": each, **tensor} for each in ("grad_output", "weight")]}


@pytest.mark.parametrize("address_space", ["enough", "short"])
def test_a_region_of_a_huge_file_costs_nobody_else(
    server: TreeServer, address_space: str, request: pytest.FixtureRequest
) -> None:
    """A worker maps the file up to the region's end; where that fails, its own requests do."""
    path = SHM / f"sparse_{uuid.uuid4().hex}"
    path.touch()
    os.truncate(path, 2**47)
    region = "/v2/systemsharedmemory/region/sparse"
    worker = server.worker_id
    assert worker is not None
    offset, expected = 0, 200
    if address_space == "short":
        pages = int(Path(f"/proc/{worker}/statm").read_text().split()[0])
        most = pages * os.sysconf("SC_PAGE_SIZE") + 2**30
        before = resource.prlimit(worker, resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
        request.addfinalizer(lambda: resource.prlimit(worker, resource.RLIMIT_AS, before))
        offset, expected = 2**40, 400
    try:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            body = json.dumps({"key": path.name, "offset": offset, "byte_size": 1024})
            client.post(f"{region}/register", content=body).raise_for_status()
            for _ in range(3):
                answer = client.post("/v2/models/conv_bwd_data/infer", json=infer("sparse"))
                assert answer.status_code == expected, answer.text
                assert expected == 200 or "cannot be mapped" in answer.json()["detail"]
            assert works(server)
            client.post(f"{region}/unregister").raise_for_status()
        assert server.worker_id == worker
    finally:
        path.unlink()


def test_a_worker_without_descriptors_is_replaced(server: TreeServer) -> None:
    with Client(server.url, max_retries=0, timeout=60) as client:
        stored = [client.put(f"w{number}", ONES) for number in range(2)]
        worker = server.worker_id
        assert worker is not None
        resource.prlimit(worker, resource.RLIMIT_NOFILE, (1, 4096))
        for weight in stored:
            assert client.conv_bwd_data(ONES, weight).item() == 2
    until(lambda: server.worker_id not in (None, worker))


@pytest.mark.parametrize("child", ["convgrad-worker", "convgrad-grpc", "convgrad-http"])
def test_a_child_that_could_not_be_started_is_started_later(
    server: TreeServer, child: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    failed_starts = server.tree.hub.children.failed_starts
    before = failed_starts.total()
    for module in ("engine.workers.process_worker", "server.process_tree"):
        monkeypatch.setattr(f"convgrad_service.{module}.spawn", refused)
    killed = next(each for each in server.children() if name_of(each).startswith(child))
    os.kill(killed, signal.SIGKILL)
    until(lambda: failed_starts.total() >= before + 3)
    assert not ready(server)
    monkeypatch.undo()
    until(lambda: ready(server))
    assert works(server)
    with triton.InferenceServerClient(server.grpc) as client:  # the port that it had before
        assert client.is_server_ready()
    with convgrad.Client(server.url) as client, httpx.Client(base_url=server.url) as raw:
        assert client.conv_bwd_data(ONES, ONES).item() == 2
        text = raw.get("/metrics").text
    failures = [line for line in text.splitlines() if "child_start_failures_total{" in line]
    assert any(child in line for line in failures), text


def test_nobody_is_refused_while_the_grpc_front_end_is_started_again(server: TreeServer) -> None:
    inputs = []
    for name, shape in (("grad_output", (64, 64, 8, 8)), ("weight", (64, 64, 1, 1))):
        inputs.append(triton.InferInput(name, shape, "FP32"))
        inputs[-1].set_data_from_numpy(np.ones(shape, np.float32))
    for _ in range(2):
        until(lambda: ready(server))
        kill_grpc(server)
        with triton.InferenceServerClient(server.grpc) as client:
            answer = client.infer("conv_bwd_data", inputs, client_timeout=60)
        output = answer.as_numpy("grad_input")
        assert output.shape == (64, 64, 8, 8)
        assert (output == 64**3 + 64**2).all()  # of this backend: the sum of all inputs
    until(lambda: ready(server))


def test_a_child_is_started_when_connections_hold_all_descriptors(server: TreeServer) -> None:
    held: list[int] = []
    failed_starts = server.tree.hub.children.failed_starts
    before = failed_starts.total()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors(os.getpid()) + 8, limits[1]))
    try:
        with suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        killed = server.worker_id
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        until(lambda: server.worker_id not in (None, killed))
        assert failed_starts.total() == before
    finally:
        for each in held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def kill_grpc(server: TreeServer) -> None:
    """Kill the gRPC front end, and wait until its server knows."""
    killed = server.tree.processes["grpc"]
    os.kill(killed, signal.SIGKILL)
    until(lambda: server.tree.processes.get("grpc") != killed)


def name_of(process_id: int) -> str:
    return Path(f"/proc/{process_id}/comm").read_text().strip()


def ready(server: TreeServer) -> bool:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        return client.get("/v2/health/ready").status_code == 200
