"""Requests like one before them are answered at once, and no answer differs for it.

Through all of the processes, so that what a worker and the hub were told once counts too.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from tritonclient.utils import InferenceServerException, shared_memory

import convgrad
from convgrad_service.backends.cpu import CpuBackend
from convgrad_service.engine.execution import Execution
from convgrad_service.engine.options import InlineBackend
from convgrad_service.engine.pipeline import Pipeline
from convgrad_service.engine.request import ComputeRequest
from tests.support.fake_backends import Blocking
from tests.support.oip_server import OipServer, serving_oip
from tests.support.tree_server import TreeServer, serving_tree, until
from tests.support.triton_clients import Array, pooling

TRANSPORTS = ("sdk", "http", "grpc")


def cpu(_: int) -> CpuBackend:
    return CpuBackend()


@pytest.fixture(
    scope="module",
    params=[None, InlineBackend("cpu", CpuBackend)],
    ids=["by a worker", "inline"],
)
def tree(request: pytest.FixtureRequest) -> Iterator[TreeServer]:
    with serving_tree(cpu, beside=request.param, system_shared_memory=True) as server:
        yield server


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operations of requests that the front ends of this process knew by their keys."""
    found: list[str] = []
    prepare = Pipeline.prepare

    async def counted(
        self: Pipeline, request: ComputeRequest, decode: Any, **options: Any
    ) -> Execution:
        assert request.operation is not None
        if self.knows(request.operation, options["key"]):
            found.append(request.operation.name)
        return await prepare(self, request, decode, **options)

    monkeypatch.setattr(Pipeline, "prepare", counted)
    return found


def expected(array: Array, size: int) -> Array:
    n, c, h, w = array.shape
    found: Array = array.reshape(n, c, h // size, size, w // size, size).max((3, 5))
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_answer_is_that_of_its_own_request(tree: TreeServer, transport: str) -> None:
    pool, close = pooling(transport, tree.url.removeprefix("http://"), tree.grpc)
    draw = np.random.default_rng(0)
    try:
        for turn in range(30):
            # Two layers whose messages are of the same length, and two whose are not.
            for size, side in ((2, 4), (4, 4), (2, 16)):
                array = draw.standard_normal((1, 3, side, side), np.float32)
                found = pool(array, size)
                np.testing.assert_array_equal(found, expected(array, size), str((turn, size)))
    finally:
        close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_all_but_the_first_are_known(known: list[str], transport: str) -> None:
    with serving_oip(CpuBackend()) as server:
        pool, close = pooling(transport, server.http, server.grpc)
        try:
            for _ in range(5):
                pool(np.zeros((1, 1, 4, 4), np.float32), 2)
        finally:
            close()
        assert known == ["maxpool2d_fwd"] * 4
        until(lambda: server.pipeline.engine.memory.used_bytes == 0)  # type: ignore[attr-defined]


@pytest.mark.parametrize("module", [http_client, grpc_client])
def test_a_region_that_is_gone_is_missed(tree: TreeServer, module: Any) -> None:
    address = tree.url.removeprefix("http://") if module is http_client else tree.grpc
    client = module.InferenceServerClient(address)
    name = f"known_{uuid.uuid4().hex[:8]}"
    region = shared_memory.create_shared_memory_region(name, f"/{name}", 128)
    try:
        client.register_system_shared_memory(name, f"/{name}", 128)
        given = module.InferInput("input", (1, 1, 4, 4), "FP32")
        given.set_shared_memory(name, 64)
        wanted = module.InferRequestedOutput("output")
        wanted.set_shared_memory(name, 16, 64)

        def pool() -> Array:
            client.infer("maxpool2d_fwd", [given], outputs=[wanted], parameters={"kernel_size": 2})
            output: Array = shared_memory.get_contents_as_numpy(region, np.float32, (4,), 64)
            return output.copy()

        for turn in range(5):
            array = np.arange(16, dtype=np.float32) + turn
            shared_memory.set_shared_memory_region(region, [array])
            assert pool().tolist() == [5 + turn, 7 + turn, 13 + turn, 15 + turn]
        client.unregister_system_shared_memory(name)
        with pytest.raises(InferenceServerException, match="there is no region"):
            pool()
    finally:
        client.close()
        shared_memory.destroy_shared_memory_region(region)


@pytest.fixture
def blocking() -> Iterator[tuple[OipServer, Blocking]]:
    backend = Blocking()
    with serving_oip(backend) as server:
        yield server, backend
        backend.release.set()


@pytest.mark.parametrize("transport", ["sdk", "grpc"])
def test_a_deadline_ends_what_was_known_too(
    blocking: tuple[OipServer, Blocking], known: list[str], transport: str
) -> None:
    server, backend = blocking
    array = np.zeros((1, 1, 4, 4), np.float32)
    backend.release.set()
    pool, close = pooling(transport, server.http, server.grpc)
    pool(array, 2)
    close()
    backend.release.clear()
    # A deadline so short may pass on the way there, where much else is to be done.
    for deadline_s in (0.3, 3, 30):
        ask_within(deadline_s, server, transport, array)
        if known:
            break
    assert set(known) == {"maxpool2d_fwd"}


def ask_within(deadline_s: float, server: OipServer, transport: str, array: Array) -> None:
    """Ask what is not answered, and find that the deadline has passed."""
    if transport == "sdk":
        with (
            convgrad.Client(f"http://{server.http}", max_retries=0, timeout=deadline_s) as client,
            pytest.raises((convgrad.errors.DeadlineExceeded, convgrad.errors.ClientTimeout)),
        ):
            client.maxpool2d_fwd(array, 2)
        return
    with grpc_client.InferenceServerClient(server.grpc) as client:
        given = grpc_client.InferInput("input", array.shape, "FP32").set_data_from_numpy(array)
        parameters = {"kernel_size": 2}
        with pytest.raises(InferenceServerException, match=r"(?i)deadline"):
            client.infer("maxpool2d_fwd", [given], parameters=parameters, client_timeout=deadline_s)
