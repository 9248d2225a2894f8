"""Stored tensors through the SDK: over every wire and transport, sync and async."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import convgrad
from convgrad import Stored, calls
from convgrad_service.backends.cpu import CpuBackend
from tests.support.fake_server import ones
from tests.support.http_server import LiveServer, serving

WAYS: list[dict[str, Any]] = [{}, {"wire": "json"}, {"transport": "shm"}]
X = np.arange(64, dtype=np.float32).reshape(1, 1, 8, 8)


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    with serving(CpuBackend(), system_shared_memory=True, log_level="error") as server:
        yield server


@pytest.fixture(params=WAYS, ids=lambda way: "-".join(way.values()) or "default")
def client(live: LiveServer, request: pytest.FixtureRequest) -> Iterator[convgrad.Client]:
    with convgrad.Client(live.url, **request.param) as client:
        yield client
        for name in client.stored():
            client.drop(name)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.int64])
def test_what_is_put_is_fetched(client: convgrad.Client, dtype: Any) -> None:
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    kept = client.put("a.b-c", array)
    assert kept == Stored("a.b-c", (2, 3, 4), convgrad.DType(array.dtype.name))
    assert kept.nbytes == array.nbytes
    found = client.fetch("a.b-c")
    np.testing.assert_array_equal(found, array)
    assert found.dtype == array.dtype
    assert found.flags.writeable
    assert client.stored() == {"a.b-c": kept}
    client.drop("a.b-c")
    assert client.stored() == {}
    for ask in (client.fetch, client.drop):
        with pytest.raises(convgrad.NotFound, match=r"a\.b-c"):
            ask("a.b-c")


def test_a_step_that_leaves_its_tensors_where_they_are(client: convgrad.Client) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3, 8, 8)).astype(np.float32)
    weight = rng.standard_normal((4, 3, 3, 3)).astype(np.float32)
    expected = client.conv_fwd(x, weight, padding=1)
    expected_grads = client.conv_backward(expected, x, weight, padding=1)
    for _ in range(2):
        kept_x, kept_weight = client.put("x", x), client.put("w", weight)
        y = client.with_options(store={"output": "y"}).conv_fwd(kept_x, kept_weight, padding=1)
        assert y == Stored("y", (2, 4, 8, 8), convgrad.DType.FLOAT32)
        grads = client.with_options(store={"grad_input": "gx"}).conv_backward(
            y, kept_x, kept_weight, padding=1
        )
        assert grads.grad_input == Stored("gx", x.shape, convgrad.DType.FLOAT32)
        np.testing.assert_array_equal(grads.grad_weight, expected_grads.grad_weight)
        np.testing.assert_array_equal(client.fetch("y"), expected)
        np.testing.assert_array_equal(client.fetch("gx"), expected_grads.grad_input)


def test_a_mixture_of_stored_and_sent(client: convgrad.Client) -> None:
    kept = client.put("x", X)
    for _ in range(2):
        pooled = client.maxpool2d_fwd(kept, 2, return_indices=True)
        np.testing.assert_array_equal(pooled.output, client.maxpool2d_fwd(X, 2).output)
        grads = client.maxpool2d_bwd(ones(1, 1, 4, 4), kept, kernel_size=2)
        assert grads.sum() == 16
    # The same name, another shape: nothing of the first is remembered.
    smaller = client.put("x", X[:, :, :4])
    assert client.maxpool2d_fwd(smaller, 2).output.shape == (1, 1, 2, 4)


def test_what_contradicts_is_refused_before_it_is_sent(client: convgrad.Client) -> None:
    with pytest.raises(convgrad.NotFound, match="nowhere"):
        client.maxpool2d_fwd(Stored("nowhere", X.shape, convgrad.DType.FLOAT32), 2)
    with pytest.raises(convgrad.InvalidProblem, match="indices"):
        client.with_options(store={"indices": "i"}).maxpool2d_fwd(X, 2)
    with pytest.raises(convgrad.MalformedRequest, match="called"):
        client.put("a b", X)
    with pytest.raises(convgrad.MalformedRequest, match="time_to_live_s"):
        client.put("a", X, time_to_live_s=0)


def test_async(live: LiveServer) -> None:
    async def run() -> None:
        async with convgrad.AsyncClient(live.url) as client:
            kept = await client.put("x", X)
            y = await client.with_options(store={"output": "y"}).maxpool2d_fwd(kept, 2)
            assert y.output == Stored("y", (1, 1, 4, 4), convgrad.DType.FLOAT32)
            assert set(await client.stored()) == {"x", "y"}
            assert (await client.fetch("y")).max() == 63
            await client.drop("x")
            await client.drop("y")

    asyncio.run(run())


def test_a_call_that_stores_says_so() -> None:
    call = calls.maxpool2d_fwd(X, 2)
    assert call.storing({}) is call
    assert call.storing({"output": "y"}).parameters["store"] == {"output": "y"}
