"""The SDK against the real server, over a real socket."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest

import convgrad
from convgrad import calls
from convgrad._body import WIRES
from convgrad._call import make_call
from convgrad.contract import OPERATIONS
from tests.support.awaited import CLIENTS
from tests.support.examples import example
from tests.support.fake_backends import Blocking, Zeros
from tests.support.fake_server import ones
from tests.support.http_server import LiveServer, serving

MIB = 1 << 20


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    with serving(Zeros(), log_level="error") as server:
        yield server


@pytest.fixture(params=CLIENTS, ids=["sync", "async"])
def client(live: LiveServer, request: pytest.FixtureRequest) -> Iterator[convgrad.Client]:
    with request.param(live.url) as client:
        yield client


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_answers(name: str, wire: str, client: convgrad.Client) -> None:
    answer = client.with_options(wire=wire).call(make_call(name, example(name), dict))
    assert set(answer.outputs) <= set(OPERATIONS[name].outputs)
    assert OPERATIONS[name].outputs[0] in answer.outputs
    assert answer.report.kernel == "zeros"
    assert answer.attempts == 1
    assert "compute" in answer.server_timing_s
    for array in answer.outputs.values():
        assert isinstance(array, np.ndarray)
        assert array.flags.writeable
        assert not array.any()


def test_methods_take_pytorchs_arguments(client: convgrad.Client) -> None:
    x, weight = ones(2, 4, 9, 9), ones(6, 2, 3, 3)
    output = client.conv_fwd(x, weight, ones(6), 2, 1, groups=2)
    assert output.shape == (2, 6, 5, 5)
    grad = client.conv_bwd_data(output, weight, stride=2, padding=1, groups=2, input_size=(9, 9))
    assert grad.shape == x.shape
    gradients = client.conv_backward(
        output, x, weight, stride=2, padding=1, groups=2, outputs=("grad_weight", "grad_bias")
    )
    assert gradients.grad_input is None
    assert gradients.grad_weight is not None
    assert gradients.grad_weight.shape == weight.shape
    pooled, indices = client.maxpool2d_fwd(x, 3, 2, padding=1, return_indices=True)
    assert indices is not None
    assert pooled.shape == indices.shape == (2, 4, 5, 5)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_dtypes_survive(wire: str, dtype: Any, client: convgrad.Client) -> None:
    given = ones(1, 1, 4, dtype=dtype)
    output = client.with_options(wire=wire).conv_fwd(given, given)
    assert output.dtype == given.dtype


def test_large_tensors(client: convgrad.Client) -> None:
    x = np.zeros((1, 16, 1024, 1024), np.float32)
    output = client.conv_fwd(x, ones(16, 1, 1, 1), groups=16)
    assert output.shape == x.shape


def test_the_server_and_the_client_refuse_in_the_same_words(
    live: LiveServer, client: convgrad.Client
) -> None:
    body = {**OPERATIONS["conv_fwd"].example, "strid": 2}
    refused = httpx.post(f"{live.url}/conv_fwd", json=body, timeout=60).json()
    with pytest.raises(convgrad.MalformedRequest) as caught:
        make_call("conv_fwd", {**example("conv_fwd"), "strid": 2}, dict)
    assert refused["detail"] == caught.value.detail


def test_a_refusal_carries_the_request_id_it_was_sent_with(client: convgrad.Client) -> None:
    with pytest.raises(convgrad.InvalidProblem) as caught:
        client.conv_fwd(ones(1, 3, 4), ones(1, 2, 1))
    assert caught.value.request_id is not None
    assert len(caught.value.request_id) == 16
    assert not caught.value.retryable


def test_operations_and_health(client: convgrad.Client) -> None:
    listed: Mapping[str, Any] = client.operations()
    assert list(listed) == list(OPERATIONS)
    assert listed["conv_fwd"]["tensors"]["bias"]["required"] is False
    assert client.is_live()
    assert client.is_ready()
    with convgrad.Client("http://127.0.0.1:9") as nowhere:
        assert not nowhere.is_live()
        assert not nowhere.is_ready()


def test_async_requests_run_side_by_side(live: LiveServer) -> None:
    async def run() -> None:
        async with convgrad.AsyncClient(live.url) as client:
            x = [ones(1, 1, size) for size in range(1, 9)]
            outputs = await asyncio.gather(*(client.conv_fwd(each, ones(1, 1, 1)) for each in x))
            assert [output.shape for output in outputs] == [each.shape for each in x]
            assert await client.is_live()
            assert await client.is_ready()
            assert set(await client.operations()) == set(OPERATIONS)
            report = (await client.call(calls.conv_fwd(x[0], ones(1, 1, 1)))).report
            assert report.kernel == "zeros"

    asyncio.run(run())


def test_a_server_too_slow_is_a_timeout() -> None:
    backend = Blocking()
    with serving(backend, log_level="error") as server:
        for client in (
            convgrad.Client(server.url, timeout=0.3),
            convgrad.Client(server.url, timeout=0.3, wire="json"),
        ):
            with client, pytest.raises((convgrad.ClientTimeout, convgrad.DeadlineExceeded)):
                client.conv_fwd(ones(1, 1, 4), ones(1, 1, 1))
        backend.release.set()


def test_a_body_too_large_is_told_even_while_it_is_sent() -> None:
    with (
        serving(Zeros(), max_body_bytes="1MiB", log_level="error") as server,
        convgrad.Client(server.url) as client,
    ):
        for _ in range(3):
            with pytest.raises(convgrad.PayloadTooLarge):
                client.conv_fwd(np.zeros((1, 1, 32 * MIB), np.float32), ones(1, 1, 1))


def test_a_busy_server_is_asked_again() -> None:
    backend = Blocking()
    x, weight = ones(1, 1, 4), ones(1, 1, 1)
    waited_s: list[float] = []

    def wait(seconds: float) -> None:
        waited_s.append(seconds)
        backend.release.set()
        server.wait_until_idle()

    with (
        serving(backend, compute_slots=1, max_queue=1, log_level="error") as server,
        ThreadPoolExecutor(2) as pool,
        convgrad.Client(server.url, sleep=wait) as client,
    ):
        running = pool.submit(client.conv_fwd, x, weight)
        assert backend.started.acquire(timeout=60)
        waiting = pool.submit(client.conv_fwd, x, weight)
        until = time.monotonic() + 60
        while server.hub.scheduler.waiting == 0:
            assert time.monotonic() < until
            time.sleep(0.005)
        answer = client.call(calls.conv_fwd(x, weight))
        assert running.result(60).shape == waiting.result(60).shape == x.shape
    assert answer.attempts == 2
    assert len(waited_s) == 1
    assert waited_s[0] >= 1
