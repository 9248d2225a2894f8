"""Small problems that never reach a worker, through all of the processes of a server."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from tritonclient.utils import InferenceServerException, shared_memory

from convgrad_service.engine.options import InlineBackend
from convgrad_service.engine.scheduling.scheduler import Scheduler
from tests.support.fake_backends import Sums
from tests.support.tree_server import TreeServer, serving_tree, until
from tests.support.triton_clients import SHM, Pool, pooling

# How long it takes is learnt from the first of all alike.
_BY_WORKERS = 1
_ASKED = 8


def sums(_: int) -> Sums:
    return Sums()


@pytest.fixture(scope="module")
def tree() -> Iterator[TreeServer]:
    with serving_tree(
        sums, beside=InlineBackend("sums", Sums), system_shared_memory=True
    ) as server:
        yield server


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The jobs that were given to the schedule for its workers."""
    jobs: list[object] = []
    submit = Scheduler.submit

    def counted(schedule: Scheduler, job: Any, *rest: Any) -> Any:
        jobs.append(job)
        return submit(schedule, job, *rest)

    monkeypatch.setattr(Scheduler, "submit", counted)
    return jobs


def ask(pool: Pool, size: int) -> None:
    for turn in range(_ASKED):
        array = np.full((1, 1, 2 * size, 2 * size), turn, np.float32)
        assert (pool(array, size) == array.sum()).all()


@pytest.mark.parametrize(("transport", "size"), [("sdk", 2), ("http", 3), ("grpc", 4)])
def test_workers_compute_no_more_than_the_first_of_all_alike(
    tree: TreeServer, submitted: list[object], transport: str, size: int
) -> None:
    def counted() -> int:
        found = tree.tree.hub.requests.statistics().get("maxpool2d_fwd")
        return 0 if found is None else found.success.count

    held, before = tree.settled_bytes(), counted()
    pool, close = pooling(transport, tree.url.removeprefix("http://"), tree.grpc)
    try:
        ask(pool, size)
    finally:
        close()
    assert len(submitted) == _BY_WORKERS
    # All of them are counted, and none holds anything any more.
    until(lambda: counted() == before + _ASKED)
    until(lambda: tree.held_bytes == held)


def test_a_deadline_that_has_passed_is_missed(tree: TreeServer) -> None:
    with http_client.InferenceServerClient(tree.url.removeprefix("http://")) as client:
        array = np.zeros((1, 1, 5, 5), np.float32)
        given = http_client.InferInput("input", array.shape, "FP32").set_data_from_numpy(array)

        def pool(headers: dict[str, str] | None = None) -> None:
            client.infer("maxpool2d_fwd", [given], parameters={"kernel_size": 5}, headers=headers)

        for _ in range(_ASKED):
            pool()
        with pytest.raises(InferenceServerException, match="504"):
            pool({"X-Request-Timeout": "0.000000001"})
        pool({"X-Request-Timeout": "60"})


@pytest.mark.parametrize(("module", "side"), [(http_client, 4), (grpc_client, 8)])
def test_shared_memory_is_computed_on_too(
    tree: TreeServer, submitted: list[object], module: Any, side: int
) -> None:
    address = tree.url.removeprefix("http://") if module is http_client else tree.grpc
    client = module.InferenceServerClient(address)
    name = f"on_the_spot_{uuid.uuid4().hex[:8]}"
    given_bytes, wanted_bytes = 4 * side**2, side**2
    region = shared_memory.create_shared_memory_region(name, f"/{name}", given_bytes + wanted_bytes)
    given = module.InferInput("input", (1, 1, side, side), "FP32")
    given.set_shared_memory(name, given_bytes)
    wanted = module.InferRequestedOutput("output")
    wanted.set_shared_memory(name, wanted_bytes, given_bytes)

    def infer() -> None:
        client.infer("maxpool2d_fwd", [given], outputs=[wanted], parameters={"kernel_size": 2})

    def pool(array: Any) -> Any:
        shared_memory.set_shared_memory_region(region, [array])
        infer()
        shape = side // 2, side // 2
        return shared_memory.get_contents_as_numpy(region, np.float32, shape, given_bytes)

    try:
        client.register_system_shared_memory(name, f"/{name}", given_bytes + wanted_bytes)
        for turn in range(_ASKED):
            array = np.full((side, side), turn, np.float32)
            assert (pool(array) == array.sum()).all()
        assert len(submitted) <= _BY_WORKERS
        os.truncate(SHM / name, given_bytes // 2)
        with pytest.raises(InferenceServerException, match="shorter"):
            infer()
        os.truncate(SHM / name, given_bytes + wanted_bytes)
        assert (pool(array) == array.sum()).all()  # nobody died of it
        client.unregister_system_shared_memory(name)  # which waits for what is in use
        with pytest.raises(InferenceServerException, match="there is no region"):
            infer()
    finally:
        client.close()
        shared_memory.destroy_shared_memory_region(region)
