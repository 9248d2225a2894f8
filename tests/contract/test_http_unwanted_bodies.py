"""Bodies of requests that are refused before they are read: under overload most are."""

from __future__ import annotations

import httpx
import pytest

from convgrad_service.http_api import middleware
from tests.contract.server import LiveServer
from tests.contract.test_http_body import KiB, head, read_all


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
        connection.sendall(head(3 * KiB * KiB, path="/nothing") + b"x" * KiB * KiB)
        first = connection.recv(65536)
        assert first.startswith(b"HTTP/1.1 404 ")
        assert b"connection: close" in first.lower()
        connection.sendall(b"x" * 2 * KiB * KiB)  # taken, or a reset would lose the answer
        assert read_all(connection) == b""
