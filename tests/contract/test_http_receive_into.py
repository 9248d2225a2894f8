"""Large binary bodies land straight in the arena: whole, in order, and whatever the client does."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO

import pytest

from convgrad.errors import InvalidProblem
from convgrad.wire import safetensors
from convgrad_service.http_api import connection as module
from tests.support.fake_backends import Failing, Sums
from tests.support.http_server import LiveServer, binary_example, serving
from tests.support.raw_http import MIB, body_and_sum, read_all, read_one, safetensors_request
from tests.support.tree_server import until


@pytest.fixture(scope="module")
def summing() -> Iterator[LiveServer]:
    """A server whose answers depend on every byte."""
    with serving(Sums(), max_inflight_bytes="256MiB") as server:
        yield server


@pytest.fixture(scope="module")
def impatient() -> Iterator[LiveServer]:
    """One whose patience a test can wait out."""
    with serving(Sums(), body_idle_timeout_s=0.4, min_body_bytes_per_s="1MiB") as server:
        yield server


def answered(connection: socket.socket, reader: BinaryIO | None = None) -> float:
    """The number that all of an answer's elements are."""
    reader = reader or connection.makefile("rb")
    top = [reader.readline()]
    while top[-1].strip():
        top.append(reader.readline())
    assert top[0].startswith(b"HTTP/1.1 200 "), top
    lengths = [line.split(b":")[1] for line in top if line.lower().startswith(b"content-length:")]
    tensors, _ = safetensors.decode(reader.read(int(lengths[0])))
    found = tensors["grad_input"]
    assert found.min() == found.max()
    return float(found.flat[0])


@pytest.mark.parametrize("first", [1, 300, 200_000, 5 * MIB])
def test_every_byte_counts_however_the_body_is_cut(summing: LiveServer, first: int) -> None:
    with summing.connect() as connection:
        for seed in range(3):  # on one connection, which stays usable
            body, expected = body_and_sum(seed)
            sent = safetensors_request(body)
            connection.sendall(sent[:first])
            time.sleep(0.05)
            connection.sendall(sent[first:])
            assert answered(connection) == expected
    summing.wait_until_idle()


def test_most_of_a_large_body_is_read_where_it_belongs(
    summing: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    landed: list[int] = []

    class Counting(module.ReceiveInto):
        def buffer_updated(self, nbytes: int) -> None:
            landed.append(nbytes)
            super().buffer_updated(nbytes)

    monkeypatch.setattr("convgrad_service.http_api.connection.ReceiveInto", Counting)
    body, expected = body_and_sum(1)
    with summing.connect() as connection:
        connection.sendall(safetensors_request(body))
        assert answered(connection) == expected
    assert sum(landed) > 0.9 * len(body)


def test_requests_sent_ahead_of_answers_do_not_mix(summing: LiveServer) -> None:
    bodies = [body_and_sum(seed, elements) for seed, elements in enumerate((MIB, 2048, MIB, 1024))]
    sent = b"".join(safetensors_request(body) for body, _ in bodies)
    with summing.connect() as connection, ThreadPoolExecutor(1) as sending:
        done = sending.submit(connection.sendall, sent)
        reader = connection.makefile("rb")
        found = [answered(connection, reader) for _ in bodies]
        done.result(10)
    assert found == [expected for _, expected in bodies]
    summing.wait_until_idle()


def test_a_pause_and_a_drip_are_408(impatient: LiveServer) -> None:
    body, _ = body_and_sum(1)
    with impatient.connect() as connection:
        connection.sendall(safetensors_request(body)[: 4 * MIB])
        started = time.monotonic()
        assert read_all(connection).startswith(b"HTTP/1.1 408 ")
        assert time.monotonic() - started < 15  # and not after the 20 s of the default
    with impatient.connect() as connection:
        connection.sendall(safetensors_request(body)[: 2 * MIB])
        connection.settimeout(0.05)
        answer = b""
        started = time.monotonic()
        while not answer and time.monotonic() - started < 15:
            try:
                connection.sendall(b"12345678")
                answer = connection.recv(65536)
            except TimeoutError:
                continue
            except ConnectionError:
                answer = b"HTTP/1.1 408 "  # reset with crumbs unread
        assert answer.startswith(b"HTTP/1.1 408 ")
    impatient.wait_until_idle()


def test_a_deadline_is_504(summing: LiveServer) -> None:
    body, _ = body_and_sum(1)
    with summing.connect() as connection:
        connection.sendall(safetensors_request(body, "X-Request-Timeout: 0.2\r\n")[: 4 * MIB])
        assert connection.recv(65536).startswith(b"HTTP/1.1 504 ")
    summing.wait_until_idle()


def test_a_client_that_leaves_frees_its_place(summing: LiveServer) -> None:
    body, expected = body_and_sum(1)
    with summing.connect() as connection:
        connection.sendall(safetensors_request(body)[: 4 * MIB])
        until(lambda: summing.held_bytes > 20 * MIB)
    summing.wait_until_idle()
    with summing.connect() as connection:
        connection.sendall(safetensors_request(body))
        assert answered(connection) == expected


def test_a_client_that_left_before_its_body_had_a_place_takes_none() -> None:
    part = safetensors_request(body_and_sum(1)[0])[: 4 * MIB]
    limits = {"max_inflight_bytes": "40MiB", "max_memory_wait_s": 30.0}
    with serving(Sums(), **limits) as server:
        connections = server.server.server_state.connections
        with server.connect() as first:
            first.sendall(part)
            until(lambda: server.held_bytes > 20 * MIB)
            with server.connect() as second:
                second.sendall(part[:20_000])  # few enough that it keeps reading
                until(lambda: server.hub.memory.waiting == 1)
            until(lambda: len(connections) == 1)
        server.wait_until_idle(5)


def received(server: LiveServer) -> float:
    """Bytes of bodies, as the server counts them."""
    name = 'convgrad_received_bytes_total{operation="conv_bwd_data",transport="http"} '
    text = server.get("/metrics").text
    return float(text.partition(name)[2].split("\n")[0] or 0)


def test_what_is_counted_as_received(summing: LiveServer) -> None:
    body, _ = body_and_sum(1)
    before = received(summing)
    with summing.connect() as connection:
        connection.sendall(safetensors_request(body))
        answered(connection)
    until(lambda: received(summing) - before == len(body))


def test_a_small_body_that_is_refused_at_once_counts_once() -> None:
    body = binary_example()
    with serving(Failing(InvalidProblem("it is wrong"))) as server, server.connect() as connection:
        for asked in range(1, 4):  # the first of all alike is looked into
            connection.sendall(safetensors_request(body))
            assert read_one(connection).startswith(b"HTTP/1.1 400 ")
            until(lambda: received(server) == asked * len(body))  # noqa: B023
