"""Bodies of requests that are refused before they are read: under overload most are."""

from __future__ import annotations

import threading

import httpx
import pytest

from convgrad_service.http_api import middleware
from convgrad_service.http_api.connection import Connection
from tests.support.fake_backends import Sums
from tests.support.http_server import LiveServer, serving
from tests.support.raw_http import (
    KiB,
    body_and_sum,
    post_head,
    read_all,
    read_one,
    safetensors_request,
)


@pytest.mark.parametrize("size", [1000, 200 * KiB, 3 * KiB * KiB])
def test_a_body_nobody_wanted_leaves_the_connection_usable(
    live: LiveServer, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Longer than anybody takes to send it, or a busy machine would fail here.
    monkeypatch.setattr(middleware, "_MODEST_BODY_WAIT_S", 30.0)
    with httpx.Client(base_url=live.url, timeout=60) as client:
        for _ in range(3):
            answer = client.post("/nothing", content=b"x" * size)
            assert answer.status_code == 404
            assert "connection" not in answer.headers
        assert client.get("/v2/health/live").status_code == 200


def test_a_body_nobody_wanted_that_does_not_come_is_not_waited_for(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(middleware, "_LINGER_S", 30.0)
    with live.connect() as connection:
        connection.sendall(post_head(3 * KiB * KiB, path="/nothing") + b"x" * KiB * KiB)
        first = connection.recv(65536)
        assert first.startswith(b"HTTP/1.1 404 ")
        assert b"connection: close" in first.lower()
        connection.sendall(b"x" * 2 * KiB * KiB)  # taken, or a reset would lose the answer
        assert read_all(connection) == b""


def test_a_request_that_begins_to_come_behind_a_body_nobody_wanted_is_not_cut(
    live: LiveServer,
) -> None:
    following = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nX-Note: "
    with live.connect() as connection:
        connection.sendall(post_head(1000, path="/nothing") + b"x" * 1000 + following)
        assert read_one(connection).startswith(b"HTTP/1.1 404 ")
        # If the parser forgot what it has seen, this would be a request of its own.
        connection.sendall(b"POST /nothing HTTP/1.1\r\n\r\n")
        assert read_one(connection).startswith(b"HTTP/1.1 200 ")


def test_a_request_behind_a_body_that_was_given_up_as_it_arrived_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(middleware, "_MODEST_BODY_WAIT_S", 30.0)
    stop, stopped = Connection.stop_receiving, threading.Event()

    def stopping(exchange: Connection) -> None:
        stop(exchange)
        stopped.set()

    monkeypatch.setattr(Connection, "stop_receiving", stopping)
    body, _ = body_and_sum(1, 400 * KiB)
    assert len(body) < middleware._MODEST_BODY_BYTES
    sent = safetensors_request(body)
    with serving(Sums(), body_idle_timeout_s=2.0) as server, server.connect() as connection:
        connection.sendall(sent[: len(sent) // 2])
        assert stopped.wait(60)  # its patience has ended, what comes now is dropped
        connection.sendall(sent[len(sent) // 2 :] + safetensors_request(b"x" * 1000))
        assert read_one(connection).startswith(b"HTTP/1.1 408 ")
        assert read_one(connection).startswith(b"HTTP/1.1 400 ")  # no safetensors, but a request
        connection.sendall(post_head(1000, path="/nothing") + b"x" * 1000)
        assert read_one(connection).startswith(b"HTTP/1.1 404 ")
