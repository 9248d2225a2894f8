"""Requests as they leave and answers as they arrive: forms, headers, chunks, copies."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest

from convgrad import InvalidAnswer, calls
from convgrad._body import WIRES
from tests.support.fake_server import SAFETENSORS, FakeServer, answer, ones

BF16 = np.dtype(ml_dtypes.bfloat16)
MIB = 1 << 20


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("dtype", [np.float16, BF16, np.float32, np.float64])
def test_arrays_arrive_as_they_were_sent_both_ways(wire: str, dtype: Any) -> None:
    grad_output = np.arange(6).reshape(1, 2, 3).astype(dtype)
    weight = ones(2, 1, 2, dtype=dtype)
    result = np.arange(4).reshape(1, 1, 4).astype(dtype)
    server = FakeServer([answer({"grad_input": result}, WIRES[wire].media_type)])
    with server.client(wire=wire) as client:
        returned = client.conv_bwd_data(grad_output, weight, stride=2, layout="NCW")
    tensors, parameters = server.sent()
    assert parameters == {"stride": 2, "layout": "NCW"}
    assert tensors.keys() == {"grad_output", "weight"}
    for sent, given in zip(tensors.values(), (grad_output, weight), strict=True):
        assert sent.dtype == given.dtype
        np.testing.assert_array_equal(sent, given)
    assert returned.dtype == result.dtype
    np.testing.assert_array_equal(returned, result)


@pytest.mark.parametrize("wire", WIRES)
def test_results_are_writable(wire: str) -> None:
    server = FakeServer([answer({"output": ones(1, 1, 2)}, WIRES[wire].media_type)])
    with server.client() as client:
        output = client.conv_fwd(ones(1, 1, 2), ones(1, 1, 1))
    output += 1
    assert output.sum() == 4


def test_headers() -> None:
    server = FakeServer([answer({"output": ones(1, 1, 2)})])
    with server.client(timeout=12.5, headers={"Authorization": "Bearer key"}) as client:
        client.conv_fwd(ones(1, 1, 2), ones(1, 1, 1))
    headers = server.requests[0].headers
    assert server.requests[0].url == "http://server/conv_fwd"
    assert headers["Content-Type"] == headers["Accept"] == SAFETENSORS
    assert int(headers["Content-Length"]) == len(server.requests[0].content)
    assert "Transfer-Encoding" not in headers
    assert headers["Accept-Encoding"] == "identity"
    assert headers["Authorization"] == "Bearer key"
    assert 12 < float(headers["X-Request-Timeout"]) <= 12.5
    assert len(headers["X-Request-Id"]) == 16


def test_large_tensors_leave_in_bounded_views_of_their_own_memory() -> None:
    array = np.zeros((1, 1, MIB), np.float32)
    body = WIRES["safetensors"].body(calls.conv_fwd(array, ones(1, 1, 1)))
    chunks = list(body.chunks(lambda _: None))
    assert max(chunk.nbytes for chunk in chunks) == MIB
    assert sum(chunk.nbytes for chunk in chunks) == body.total_bytes
    shared = [chunk for chunk in chunks if np.shares_memory(np.frombuffer(chunk, np.uint8), array)]
    assert sum(chunk.nbytes for chunk in shared) == array.nbytes


def test_an_answer_is_one_buffer_and_its_arrays_are_views_of_it() -> None:
    arrays = {"grad_input": ones(4), "grad_weight": ones(8), "grad_bias": ones(2)}
    server = FakeServer([answer(arrays)])
    with server.client() as client:
        result = client.conv_backward(ones(1, 1, 1), ones(1, 1, 1), ones(1, 1, 1))
    owners = {id(_owner(array)) for array in result}
    assert len(owners) == 1


def _owner(array: Any) -> Any:
    while isinstance(array, np.ndarray) and array.base is not None:
        array = array.base
    return array.obj if isinstance(array, memoryview) else array


def test_call_tells_how_the_answer_came_about() -> None:
    timing = 'decode;dur=1.5, queue;desc="waits";dur=20, compute;dur="300", odd, worse;dur=x'
    server = FakeServer([answer({"output": ones(1)}, **{"Server-Timing": timing})])
    with server.client() as client:
        got = client.call(calls.conv_fwd(ones(1, 1, 1), ones(1, 1, 1)))
    assert got.report.kernel == "by_hand"
    assert got.request_id == "at-server"
    assert got.attempts == 1
    assert got.server_timing_s == pytest.approx({"decode": 0.0015, "queue": 0.02, "compute": 0.3})


def test_async_client_gives_the_same() -> None:
    async def run() -> None:
        server = FakeServer([answer({"output": ones(1), "indices": ones(1, dtype=np.int64)})])
        async with server.async_client() as client:
            pooled = await client.maxpool2d_fwd(ones(1, 1, 2, 2), 2, return_indices=True)
            assert pooled.indices is not None
            assert pooled.indices.dtype == np.int64
        tensors, parameters = server.sent()
        assert parameters == {"kernel_size": 2, "return_indices": True}
        np.testing.assert_array_equal(tensors["input"], ones(1, 1, 2, 2))

    asyncio.run(run())


def in_chunks(*parts: bytes) -> Iterator[bytes]:
    yield from parts


@pytest.mark.parametrize(
    ("response", "sentence"),
    [
        (httpx.Response(200, content=b"<html>", headers={"Content-Type": "text/html"}), "of type"),
        (httpx.Response(200, content=b"rubbish", headers={"Content-Type": SAFETENSORS}), "read"),
        (httpx.Response(200, content=b"[]", headers={"Content-Type": "application/json"}), "read"),
        (httpx.Response(200, content=b"{}", headers={"Content-Type": "application/json"}), "read"),
        (answer({"wrong": ones(1)}), "lacks output; it has wrong"),
        (answer({"output": ones(1)}, **{"Content-Encoding": "x-odd"}), "encoded as x-odd"),
    ],
)
def test_an_answer_that_is_none_is_said_to_be_so(response: httpx.Response, sentence: str) -> None:
    server = FakeServer([response])
    with server.client() as client, pytest.raises(InvalidAnswer, match=sentence) as caught:
        client.conv_fwd(ones(1, 1, 1), ones(1, 1, 1))
    assert caught.value.request_id is not None
    assert len(server.requests) == 1


def test_operations_and_health() -> None:
    listed = httpx.Response(200, json={"operations": [{"name": "conv_fwd", "outputs": ["output"]}]})
    server = FakeServer([listed, httpx.Response(200), httpx.ConnectError("no"), problem_not_json()])
    with server.client() as client:
        assert client.operations() == {"conv_fwd": {"name": "conv_fwd", "outputs": ["output"]}}
        assert client.is_live()
        assert not client.is_ready()
        with pytest.raises(InvalidAnswer, match="operations"):
            client.operations()
    assert [request.url.path for request in server.requests] == [
        "/operations",
        "/v2/health/live",
        "/v2/health/ready",
        "/operations",
    ]


def problem_not_json() -> httpx.Response:
    return httpx.Response(200, json=["conv_fwd"])
