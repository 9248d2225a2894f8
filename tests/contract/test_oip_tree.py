"""The Open Inference Protocol through all of the processes: HTTP and gRPC see one engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client

from convgrad_service.backends.cpu import CpuBackend
from tests.support.h2_client import INFER, connected, grpc_message, pool_request
from tests.support.tree_server import TreeServer, serving_tree, until

pytestmark = pytest.mark.processes


def cpu(_: int) -> CpuBackend:
    return CpuBackend()


@pytest.fixture(scope="module", params=[1, 2], ids=["in the hub", "in front ends"])
def tree(request: pytest.FixtureRequest) -> Iterator[TreeServer]:
    with serving_tree(cpu, http_workers=request.param) as server:
        yield server


def pooled(
    module: Any, client: Any, array: np.ndarray[Any, Any], operation: str = "maxpool2d_fwd"
) -> np.ndarray[Any, Any]:
    tensor = module.InferInput("input", array.shape, "FP32").set_data_from_numpy(array)
    result = client.infer(operation, [tensor], parameters={"kernel_size": 2})
    found: np.ndarray[Any, Any] = result.as_numpy("output")
    return found


@pytest.mark.parametrize("size", [4, 64, 512])
def test_both_transports_give_the_same(tree: TreeServer, seed: int, size: int) -> None:
    array = np.random.default_rng(seed).standard_normal((1, 4, size, size), dtype=np.float32)
    wanted = array.reshape(1, 4, size // 2, 2, size // 2, 2).max((3, 5))
    with (
        grpc_client.InferenceServerClient(tree.grpc) as grpc,
        http_client.InferenceServerClient(tree.url.removeprefix("http://")) as http,
    ):
        np.testing.assert_array_equal(pooled(grpc_client, grpc, array), wanted)
        np.testing.assert_array_equal(pooled(http_client, http, array), wanted)


def test_each_counts_what_the_other_served(tree: TreeServer) -> None:
    # An operation that no other test here asks for, whose counts might be on their way still.
    operation = "maxpool3d_fwd"
    array = np.zeros((1, 1, 4, 4, 4), np.float32)
    with grpc_client.InferenceServerClient(tree.grpc) as grpc:

        def counted() -> list[int]:
            (over_grpc,) = grpc.get_inference_statistics(operation).model_stats
            answer = httpx.get(f"{tree.url}/v2/models/{operation}/stats", timeout=60).json()
            return [over_grpc.inference_count, answer["model_stats"][0]["inference_count"]]

        assert counted() == [0, 0]
        for asked in (1, 2):
            pooled(grpc_client, grpc, array, operation)
            until(lambda: counted() == [asked, asked])  # noqa: B023


def test_a_message_on_its_way_in_keeps_nobody_waiting(tree: TreeServer) -> None:
    """Half of a large gRPC message has come: HTTP and other calls are answered meanwhile."""
    message = grpc_message(pool_request(2**22))
    with connected(tree.grpc) as slow, grpc_client.InferenceServerClient(tree.grpc) as grpc:
        stream = slow.open(INFER)
        slow.data(stream, message[: len(message) // 2])
        assert httpx.get(f"{tree.url}/v2/health/ready", timeout=60).status_code == 200
        array = np.zeros((1, 1, 4, 4), np.float32)
        assert pooled(grpc_client, grpc, array).shape == (1, 1, 2, 2)
        slow.data(stream, message[len(message) // 2 :], last=True)
        assert slow.answer(stream).status == "0"
