"""Clients that take their answers in drips: they are let go, and hold nothing up."""

from __future__ import annotations

import socket
import time

from tests.support.fake_backends import Zeros
from tests.support.http_server import serving
from tests.support.raw_http import FOR_A_LARGE_ANSWER

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


def drip(connection: socket.socket) -> bool:
    """Read a little; whether there was anything."""
    try:
        return bool(connection.recv(1024))
    except ConnectionResetError:
        return False
