"""Large answers over HTTP: computed in parts, sent as they lie in memory, read row by row."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from convgrad import AsyncClient, Call, Client, calls
from convgrad.errors import InvalidProblem
from convgrad.wire import safetensors
from convgrad_service.backends.cpu import CpuBackend
from convgrad_service.engine.memory import tensor_layout as parts
from convgrad_service.engine.memory.tensor_layout import tensor_layout_of
from convgrad_service.http_api import transport
from tests.support.fake_backends import Gated
from tests.support.fake_server import FakeServer, answer, problem
from tests.support.http_server import LiveServer, binary_example, serving
from tests.support.tree_server import until

GRAD = np.random.default_rng(0).standard_normal((8, 4, 96, 96), np.float32)
WEIGHT = np.random.default_rng(1).standard_normal((4, 6, 3, 3), np.float32)
PARTS = 5
PART_BYTES = 500_000


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(parts, "PART_BYTES", PART_BYTES)
    tensor_layout_of.cache_clear()
    yield
    tensor_layout_of.cache_clear()


@pytest.fixture
def backend() -> Gated:
    return Gated()


@pytest.fixture
def server(backend: Gated) -> Iterator[LiveServer]:
    with serving(backend, max_inflight_bytes="64MiB", compute_slots=1) as live:
        yield live
        backend.gate.release(100)


@pytest.fixture(scope="module")
def expected() -> NDArray[Any]:
    from convgrad.contract import OPERATIONS, validate
    from convgrad_service.problems import problem_from

    given = {"grad_output": GRAD, "weight": WEIGHT, "padding": 1}
    problem = problem_from(
        "conv_bwd_data", validate(OPERATIONS["conv_bwd_data"].request, dict(given))
    )
    tensors = {"grad_output": GRAD, "weight": WEIGHT}
    return CpuBackend(threads=1).run(problem, tensors).outputs["grad_input"]


def test_an_answer_is_copied_where_memory_cannot_be_sent_as_it_lies(
    server: LiveServer, backend: Gated, expected: NDArray[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As over TLS, and behind another server."""
    monkeypatch.setattr(transport, "connection_of", lambda scope: None)
    backend.gate.release(PARTS)
    with Client(server.url, max_retries=0) as client:
        assert (client.conv_bwd_data(GRAD, WEIGHT, padding=1) == expected).all()
    assert backend.runs == PARTS
    server.wait_until_idle()


def test_a_part_that_fails_is_an_error_and_ends_the_rest(
    server: LiveServer, backend: Gated
) -> None:
    backend.fail_at = 3
    backend.gate.release(3)
    with (
        Client(server.url, max_retries=0) as client,
        pytest.raises(InvalidProblem, match="it failed"),
    ):
        client.conv_bwd_data(GRAD, WEIGHT, padding=1)
    server.wait_until_idle()
    assert backend.runs == 3


def test_a_client_that_leaves_in_the_middle_stops_the_rest(
    server: LiveServer, backend: Gated
) -> None:
    body = binary_example({"grad_output": GRAD, "weight": WEIGHT}, padding=1)
    head = (
        f"POST /conv_bwd_data HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        f"Content-Type: {safetensors.MEDIA_TYPE}\r\n\r\n"
    )
    with server.connect() as connection:
        connection.sendall(head.encode() + body)
        backend.gate.release()
        until(lambda: backend.runs == 1)
    server.wait_until_idle()
    assert backend.runs == 1


def test_the_connection_serves_on_after_a_large_answer(
    server: LiveServer, backend: Gated, expected: NDArray[Any]
) -> None:
    backend.gate.release(2 * PARTS)
    with Client(server.url, max_retries=0) as client:
        for _ in range(2):
            assert (client.conv_bwd_data(GRAD, WEIGHT, padding=1) == expected).all()


def test_json_has_its_answer_whole(
    server: LiveServer, backend: Gated, expected: NDArray[Any]
) -> None:
    backend.gate.release(PARTS)
    with Client(server.url, max_retries=0, wire="json") as client:
        assert (client.conv_bwd_data(GRAD, WEIGHT, padding=1) == expected).all()


def bwd_data() -> Call[NDArray[Any]]:
    return calls.conv_bwd_data(GRAD, WEIGHT, padding=1)


@pytest.mark.parametrize("own", [True, False], ids=["sockets", "httpx"])
def test_the_sdk_yields_parts_as_they_come(
    server: LiveServer, backend: Gated, expected: NDArray[Any], own: bool
) -> None:
    with (
        httpx.Client(timeout=60) as http,
        Client(server.url, http_client=None if own else http) as client,
    ):
        found = np.full_like(expected, np.nan)
        backend.gate.release(2 * PARTS)
        end = 0
        for part in client.iterate(bwd_data()):
            assert (part.output, part.axis, part.start) == ("grad_input", 0, end)
            assert part.whole.shape == expected.shape
            found[part.start : part.stop] = part.array
            end = part.stop
        assert (found == expected).all()
        assert (part.whole == expected).all()
        # And the connection is good for more.
        assert (client.conv_bwd_data(GRAD, WEIGHT, padding=1) == expected).all()


def test_the_async_sdk_yields_parts_too(
    server: LiveServer, backend: Gated, expected: NDArray[Any]
) -> None:
    async def scenario() -> None:
        backend.gate.release(PARTS)
        async with AsyncClient(server.url) as client:
            rows = [part async for part in client.iterate(bwd_data())]
        assert sum(part.stop - part.start for part in rows) == len(expected)
        assert (rows[-1].whole == expected).all()

    asyncio.run(scenario())


def test_an_error_is_raised_before_the_first_part(server: LiveServer) -> None:
    wrong = calls.conv_bwd_data(GRAD, WEIGHT, padding=1, input_size=[5, 5])
    with Client(server.url) as client, pytest.raises(InvalidProblem):
        next(client.iterate(wrong))


def test_what_fails_before_the_first_part_is_tried_again(expected: NDArray[Any]) -> None:
    good = answer({"grad_input": expected})
    fake = FakeServer([problem("overloaded"), good])
    with fake.client(max_retries=1) as client:
        (part,) = client.iterate(bwd_data())
    assert (part.array == expected).all()
    assert len(fake.requests) == 2
