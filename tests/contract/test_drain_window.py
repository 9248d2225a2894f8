"""After SIGTERM a server is not ready at once, and still answers until all may have noticed."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from convgrad_service.backends.cpu import CpuBackend
from tests.support.fake_backends import GatedByFile
from tests.support.h2_client import INFER, pool_request
from tests.support.http_server import EXAMPLE, JSON
from tests.support.tree_server import LONGEST_S, TreeServer, serving_tree, until

pytestmark = pytest.mark.processes

WINDOW_S = 3.0
# An empty SETTINGS frame of HTTP/2.
SETTINGS = b"\0\0\0\4\0\0\0\0\0"


def cpu(device: int) -> CpuBackend:
    return CpuBackend(threads=1)


@pytest.fixture(params=[1, 2], ids=["inside the hub", "two front ends"])
def serving(request: pytest.FixtureRequest) -> Iterator[tuple[TreeServer, Any]]:
    """A server, and what has it end as SIGTERM would."""
    made = serving_tree(cpu, http_workers=request.param, drain_s=WINDOW_S)
    server = made.__enter__()
    ended = threading.Event()

    def end() -> None:
        made.__exit__(None, None, None)
        ended.set()

    ending = threading.Thread(target=end)
    yield server, partial(_begun, ending)
    if not ending.ident:
        ending.start()
    assert ended.wait(LONGEST_S)


def _begun(ending: threading.Thread) -> float:
    ending.start()
    return time.monotonic()


def test_it_is_not_ready_at_once_and_answers_for_a_while(
    serving: tuple[TreeServer, Any],
) -> None:
    server, end = serving

    def ready() -> int:
        return httpx.get(f"{server.url}/v2/health/ready").status_code

    def ask() -> int:
        headers = {"Content-Type": JSON}
        url = f"{server.url}/conv_bwd_data"
        return httpx.post(url, content=EXAMPLE, headers=headers, timeout=60).status_code

    assert ready() == ask() == 200
    began_s = end()
    until(lambda: ready() == 503)
    assert httpx.get(f"{server.url}/v2/health/live").status_code == 200
    answered = 0
    while time.monotonic() < began_s + WINDOW_S / 2:
        # New connections too: whoever sends them has not noticed yet.
        assert ask() == 200
        answered += 1
    assert answered > 0

    def closed() -> bool:
        try:
            return ask() == 503
        except httpx.TransportError:
            return True

    until(closed)
    assert time.monotonic() >= began_s + WINDOW_S


def test_a_kept_connection_is_closed_so_that_its_client_goes_elsewhere(
    serving: tuple[TreeServer, Any],
) -> None:
    """A Service balances connections: a client that kept its own would stay with this server."""
    server, end = serving
    headers = {"Content-Type": JSON, "X-Request-Timeout": "60"}
    with httpx.Client(base_url=server.url, timeout=60) as client:

        def ask(**more: str) -> httpx.Response:
            return client.post("/conv_bwd_data", content=EXAMPLE, headers=headers | more)

        def answers() -> list[httpx.Response]:
            # One that is sent whole, one with an error, one from outside the computing endpoints.
            refused = client.post("/conv_bwd_data", content=b"{}", headers=headers)
            return [ask(), refused, client.get("/operations")]

        before = answers()
        assert [one.status_code for one in before] == [200, 400, 200]
        assert not any("connection" in one.headers for one in before)
        end()
        until(lambda: httpx.get(f"{server.url}/v2/health/ready").status_code == 503)
        within = answers()
        assert [one.status_code for one in within] == [200, 400, 200]
        assert [one.headers.get("connection") for one in within] == ["close"] * 3


def goaway_code(connection: socket.socket) -> int:
    """Read HTTP/2 frames up to a GOAWAY; return its error code. h2 reads nothing after one."""
    with connection.makefile("rb") as frames:
        while True:
            head = frames.read(9)
            body = frames.read(int.from_bytes(head[:3], "big"))
            if head[3] == 7:
                return int.from_bytes(body[4:8], "big")


def test_a_grpc_connection_gets_a_goaway_and_its_running_call_an_answer(tmp_path: Path) -> None:
    gate = tmp_path / "open"
    made = serving_tree(partial(GatedByFile, gate), drain_s=0.1)
    server = made.__enter__()
    ending = threading.Thread(target=made.__exit__, args=(None, None, None))
    host, port = server.grpc.split(":")
    with (
        socket.create_connection((host, int(port)), LONGEST_S) as idle,
        grpc.insecure_channel(server.grpc) as channel,
    ):
        idle.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SETTINGS)
        call = channel.unary_unary(INFER).future(pool_request(), timeout=LONGEST_S)
        until(lambda: server.tree.hub.scheduler.running == 1)
        ending.start()
        assert goaway_code(idle) == 0, "a graceful one: NO_ERROR"
        assert not call.done()
        idle.close()
        gate.touch()
        assert call.result()
    ending.join()
