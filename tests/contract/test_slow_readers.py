"""Clients that send or read in drips: they are let go, and hold nothing up."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

import pytest

from convgrad_service.engine import hub
from tests.support.fake_backends import Zeros
from tests.support.http_server import serving
from tests.support.raw_http import (
    FOR_A_LARGE_ANSWER,
    body_and_sum,
    read_one,
    safetensors_request,
)
from tests.support.tree_server import until

DRIP_S = 0.05


def test_an_answer_that_is_read_in_drips_is_let_go_over_http() -> None:
    with (
        serving(Zeros(), answer_idle_timeout_s=1.0, log_level="error") as server,
        server.connect() as connection,
    ):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(FOR_A_LARGE_ANSWER)
        # Each pause is short: it is the rate that is too low.
        until_s = time.monotonic() + 60
        while drip(connection) and server.held_bytes:
            assert time.monotonic() < until_s, "it goes on as long as the client likes"
            time.sleep(DRIP_S)
        server.wait_until_idle(60)


@pytest.mark.parametrize("slowly", ["sent", "read"])
def test_slow_clients_give_up_memory_that_others_wait_for(
    slowly: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is fast enough for a server that has memory to spare."""
    monkeypatch.setattr(hub, "_SHORT_AFTER_S", 0.2)
    with (
        serving(
            Zeros(), max_inflight_bytes="32MiB", max_memory_wait_s=1.0, log_level="error"
        ) as server,
        server.connect() as slow,
    ):
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        if slowly == "read":
            slow.sendall(FOR_A_LARGE_ANSWER)
        else:
            request = safetensors_request(body_and_sum(0)[0])  # of 24 MiB
            slow.sendall(request[: 2**20])
        until(lambda: server.held_bytes > 20 * 2**20)
        ended, asking = threading.Event(), safetensors_request(body_and_sum(1)[0])

        def go_on() -> None:
            at = 2**20
            while not ended.wait(DRIP_S):
                with suppress(OSError):
                    if slowly == "read":
                        slow.recv(8192)
                    else:
                        slow.sendall(request[at : at + 8192])
                        at += 8192

        dripping = threading.Thread(target=go_on)
        dripping.start()
        time.sleep(0.3)
        statuses = []
        while (not statuses or statuses[-1] == b"429") and len(statuses) < 5:
            with server.connect() as other:
                other.sendall(asking)
                statuses.append(read_one(other)[9:12])
        ended.set()
        dripping.join()
        assert statuses[-1] == b"200"
        if slowly != "read":
            refused = read_one(slow)
            assert refused.startswith(b"HTTP/1.1 408 ")
            assert b"other requests wait for the memory" in refused
        server.wait_until_idle(60)


def drip(connection: socket.socket) -> bool:
    """Read a little; whether there was anything."""
    try:
        return bool(connection.recv(1024))
    except ConnectionResetError:
        return False
