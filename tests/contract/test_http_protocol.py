"""What RFC 9112 has a server refuse, and clients that take up more than their share."""

from __future__ import annotations

import gc
import re
import select
import socket
import ssl
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import numpy as np
import pytest

from convgrad import Client
from tests.support.fake_backends import Zeros
from tests.support.http_server import EXAMPLE, LiveServer, serving
from tests.support.raw_http import FOR_A_LARGE_ANSWER, read_all
from tests.support.tls_files import TlsFiles
from tests.support.tree_server import until

BODY = b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(EXAMPLE), EXAMPLE)
POST = b"POST /conv_bwd_data HTTP/1.1\r\n"
CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(EXAMPLE), EXAMPLE)

HEADS = {
    "one Host": (200, POST + b"Host: x:80\r\n" + BODY),
    "a Host without a name": (200, POST + b"Host:\r\n" + BODY),
    "an IPv6 address": (200, POST + b"Host: [::1]:8000\r\n" + BODY),
    "no Host": (400, POST + BODY),
    "two Hosts": (400, POST + b"Host: x\r\nHost: x\r\n" + BODY),
    "a Host with a space": (400, POST + b"Host: x y\r\n" + BODY),
    "a Host with a path": (400, POST + b"Host: x/y\r\n" + BODY),
    "HTTP/1.0 without Host": (200, b"POST /conv_bwd_data HTTP/1.0\r\n" + BODY),
    "HTTP/1.0 that expects a 100": (
        200,
        b"POST /conv_bwd_data HTTP/1.0\r\nExpect: 100-continue\r\n" + BODY,
    ),
    "a line over the limit": (431, b"POST /%s HTTP/1.1\r\nHost: x\r\n\r\n" % (b"a" * 20_000)),
    "HTTP/1.0 in chunks": (
        400,
        b"POST /conv_bwd_data HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKED,
    ),
    "HTTP/2.0 in the request line": (505, POST.replace(b"1.1", b"2.0") + b"Host: x\r\n" + BODY),
    "HTTP/3.0": (505, POST.replace(b"1.1", b"3.0") + b"Host: x\r\n" + BODY),
    "HTTP/0.9": (505, POST.replace(b"1.1", b"0.9") + b"Host: x\r\n" + BODY),
    "no version of HTTP": (400, POST.replace(b"1.1", b"x") + b"Host: x\r\n" + BODY),
}
for name, status, lines in (
    ("chunked", 200, b"Transfer-Encoding: Chunked"),
    ("gzip, chunked", 501, b"Transfer-Encoding: gzip, chunked"),
    (
        "gzip and chunked on lines of their own",
        501,
        b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked",
    ),
    ("chunked twice", 400, b"Transfer-Encoding: chunked, chunked"),
    ("gzip alone", 400, b"Transfer-Encoding: gzip"),
    ("a length as well", 400, b"Transfer-Encoding: chunked\r\nContent-Length: 5"),
):
    given = b"Host: x\r\nContent-Type: application/json\r\n%s\r\n\r\n" % lines
    HEADS[f"Transfer-Encoding: {name}"] = status, POST + given + CHUNKED


@pytest.mark.parametrize(("status", "request_bytes"), HEADS.values(), ids=HEADS)
def test_a_head_is_refused_as_http_says(
    live: LiveServer, status: int, request_bytes: bytes
) -> None:
    for _ in range(2):  # what is known of a head from before says the same
        with live.connect() as connection:
            connection.sendall(request_bytes)
            answer = connection.recv(65536)
        assert answer.startswith(b"HTTP/1.1 %d " % status), answer
        assert status == 200 or b'"status": %d' % status in answer


GOOD = POST + b"Host: x\r\n" + BODY
BEHIND = {
    "rubbish": ([200, 400], GOOD + b"rubbish\r\n\r\n"),
    "a body longer than its length": (
        [400, 400],
        GOOD.replace(b"h: ", b"h: 1\r\nX-Was: ") + b"\r\n",
    ),
    "a wrong Host": ([200, 400], GOOD + POST + b"Host: x y\r\n" + BODY),
    "a head that is too long": ([200, 431], GOOD + b"GET /%s HTTP/1.1\r\n\r\n" % (b"a" * 20_000)),
    "a wrong chunk": (
        [200, 200, 400],
        2 * GOOD + POST + b"Host: x\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n" + GOOD,
    ),
    "too many": ([200] * 17 + [429], 40 * GOOD),
}


@pytest.mark.parametrize(("statuses", "sent"), BEHIND.values(), ids=BEHIND)
def test_requests_before_one_that_is_refused_are_answered(
    live: LiveServer, statuses: list[int], sent: bytes
) -> None:
    with live.connect() as connection:
        connection.sendall(sent)
        answers = read_all(connection)
    assert [int(each) for each in re.findall(rb"HTTP/1.1 (\d+) ", answers)] == statuses


def test_a_target_that_cannot_be_read_is_quoted(live: LiveServer) -> None:
    with live.connect() as connection:
        connection.sendall(b"CONNECT example:443 HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"invalid url b'example:443'" in answer


def test_a_client_of_http_2_is_told_the_version(live: LiveServer) -> None:
    with live.connect() as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 505 ")
    assert b"expected HTTP/1.1" in answer


def test_a_client_that_closes_its_half_is_told_that_it_counts_as_gone(live: LiveServer) -> None:
    with live.connect() as connection:
        connection.sendall(GOOD[:-1])
        until(lambda: bool(live.server.server_state.connections))
        connection.shutdown(socket.SHUT_WR)
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"counts as gone" in answer


def test_a_connection_that_fails_behind_an_unread_answer_is_ended() -> None:
    with (
        serving(Zeros(), answer_idle_timeout_s=1.0, log_level="error") as server,
        server.connect() as connection,
    ):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(FOR_A_LARGE_ANSWER)
        until(lambda: bool(server.server.server_state.connections))
        (protocol,) = server.server.server_state.connections
        until(lambda: protocol.flow.write_paused, 20)
        connection.sendall(b"rubbish\r\n\r\n")
        until(lambda: not server.server.server_state.connections, 10)
        server.wait_until_idle()


def test_the_rest_of_an_answer_is_not_waited_for_longer_than_the_rest_was() -> None:
    """A client that reads until little enough is left that writing is not paused any more."""
    with (
        serving(Zeros(), answer_idle_timeout_s=1.0, log_level="error") as server,
        server.connect() as connection,
    ):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(FOR_A_LARGE_ANSWER.replace(b"Host: x", b"Host: x\r\nConnection: close"))
        until(lambda: bool(server.server.server_state.connections))
        (protocol,) = server.server.server_state.connections
        while not protocol.transport.is_closing():
            assert connection.recv(65536)
        until(lambda: not server.server.server_state.connections, 20)


def test_a_handshake_that_is_not_finished_counts_and_ends(tmp_path: Path) -> None:
    files = TlsFiles.made(tmp_path)
    limits = {"max_connections": 4, "header_timeout_s": 2.0}
    with serving(Zeros(), **files.server(), **limits) as server, ExitStack() as held:
        for _ in range(4):
            held.enter_context(server.connect())
        until(lambda: len(server.server._handshakes) == 4)
        began_s = time.monotonic()
        with server.connect(20) as refused, pytest.raises(OSError):  # noqa: PT011
            files.client_context().wrap_socket(refused, server_hostname="localhost")
        assert time.monotonic() - began_s < 2  # at once, and not when another has timed out

        def works() -> bool:
            try:
                url = f"https://127.0.0.1:{server.port}/v2/health/live"
                return httpx.get(url, verify=files.client_context()).status_code == 200
            except (httpx.TransportError, ssl.SSLError):
                return False

        until(works, 20)


def test_connections_that_only_wait_make_room_for_others() -> None:
    live = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
    with (
        serving(Zeros(), max_connections=4, log_level="error") as server,
        ExitStack() as held,
    ):
        kept, fresh, half, later = (held.enter_context(server.connect(20)) for _ in range(4))

        def asks(connection: socket.socket) -> bytes:
            connection.sendall(live)
            return connection.recv(65536)

        assert asks(kept).startswith(b"HTTP/1.1 200 ")
        half.sendall(live[:9])
        until(lambda: min(server.waits_s()) > 0.1)  # longer than the clock's resolution
        assert asks(later).startswith(b"HTTP/1.1 200 ")
        until(lambda: len(waits_s := server.waits_s()) == 3 and min(waits_s) > 1.1)
        # One that never asked goes first, then who was answered first; who is asking stays.
        for gone in (fresh, kept):
            assert asks(held.enter_context(server.connect(20))).startswith(b"HTTP/1.1 200 ")
            assert gone.recv(1) == b""
        assert asks(later).startswith(b"HTTP/1.1 200 ")
        half.sendall(live[9:])
        assert half.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_heads_half_sent_make_room_for_others_too() -> None:
    live = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
    with (
        serving(Zeros(), max_connections=2, log_level="error") as server,
        ExitStack() as held,
    ):
        for _ in range(2):
            held.enter_context(server.connect(20)).sendall(live[:9])

        def is_answered() -> bool:
            with server.connect(20) as connection, suppress(ConnectionError):
                connection.sendall(live)
                return connection.recv(65536).startswith(b"HTTP/1.1 200 ")
            return False

        until(is_answered, 10)  # and not after header_timeout_s


def test_one_client_with_many_heads_half_sent_makes_room_at_once() -> None:
    live = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
    with (
        serving(Zeros(), max_connections=4, log_level="error") as server,
        ExitStack() as held,
    ):
        flood = [held.enter_context(server.connect(20)) for _ in range(4)]
        for each in flood:
            each.sendall(live[:9])
        until(lambda: len(server.server.server_state.connections) == 4)
        began_s = time.monotonic()
        source = "127.0.0.2", 0
        with socket.create_connection((server.host, server.port), 20, source) as other:
            other.sendall(live)
            assert other.recv(65536).startswith(b"HTTP/1.1 200 ")
            # It has no room for more of its own.
            with server.connect(20) as one_more:
                one_more.sendall(live)
                assert one_more.recv(65536).startswith(b"HTTP/1.1 429 ")
        assert time.monotonic() - began_s < 1  # the time after which any would make room
        (gone,) = select.select(flood, [], [], 0)[0]
        assert gone.recv(1) == b""


@pytest.mark.parametrize(
    "path", ["/v2/systemsharedmemory/region/a/register", "/v2/repository/index"]
)
def test_a_body_that_stops_is_given_up_wherever_it_is_for(path: str) -> None:
    with serving(Zeros(), body_idle_timeout_s=0.3) as server, server.connect(20) as connection:
        connection.sendall(b"POST %s HTTP/1.1\r\nHost: x\r\n" % path.encode())
        connection.sendall(b"Content-Length: 100\r\n\r\n{")
        assert connection.recv(65536).startswith(b"HTTP/1.1 408 ")


def test_a_tensor_stored_again_and_again_takes_no_more_than_one() -> None:
    ones = np.ones((1, 1, 1, 1), np.float32)
    with serving(Zeros(), log_level="error") as server, Client(server.url) as client:

        def after_storing(times: int) -> int:
            for _ in range(times):
                client.put("again", ones)
            gc.collect()
            return sys.getallocatedblocks()

        after_storing(200)  # until caches and pools have grown
        before = after_storing(10)
        # A timer and what it holds would be a dozen blocks each time.
        assert after_storing(200) < before + 400


def test_a_small_request_cannot_ask_for_a_large_answer() -> None:
    body = (
        b'{"input": {"values": [[[[0]]]], "dtype": "float32"}, '
        b'"weight": {"values": [[[[0]]]], "dtype": "float32"}, "padding": 16000}'
    )
    with serving(Zeros(), max_inflight_bytes="8GiB", max_output_ratio=2.0) as server:
        refused = server.post(body, path="/conv_fwd")
        assert (refused.status_code, refused.json()["code"]) == (413, "problem-too-large")
        assert "at most 2 bytes for each byte that it receives" in refused.json()["detail"]
        assert "CONVGRAD_MAX_OUTPUT_RATIO" in refused.json()["detail"]
        # 64 MiB are always allowed.
        assert server.post(body.replace(b"16000", b"100"), path="/conv_fwd").status_code == 200
