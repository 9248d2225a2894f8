"""Bodies that are too long, too slow, cut off or in crumbs, and connections that misbehave."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest

from tests.support.fake_backends import Zeros
from tests.support.http_server import EXAMPLE, JSON, SAFETENSORS, LiveServer, serving
from tests.support.raw_http import KiB, post_head, read_all, read_one
from tests.support.tree_server import until


@pytest.fixture(scope="module")
def impatient() -> Iterator[LiveServer]:
    """A server whose patience a test can wait out."""
    with serving(
        Zeros(),
        body_idle_timeout_s=0.3,
        min_body_bytes_per_s="20KiB",
        header_timeout_s=0.4,
    ) as server:
        yield server


def test_an_honest_length_over_the_limit_is_refused_at_once(live: LiveServer) -> None:
    with live.connect() as connection:
        connection.sendall(post_head(300 * KiB))  # without the body, for which it does not wait
        first = connection.recv(65536)
        assert first.startswith(b"HTTP/1.1 413 ")
        assert b"payload-too-large" in first
        assert b"connection: close" in first.lower()
        connection.shutdown(socket.SHUT_WR)
        assert read_all(connection) == b""


def test_a_length_that_lies_low_or_is_missing_does_not_help(live: LiveServer) -> None:
    with live.connect() as connection:
        connection.sendall(post_head(None))
        for _ in range(5):
            connection.sendall(b"10000\r\n" + b" " * 65536 + b"\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")


def test_the_whole_refusal_reaches_a_client_that_is_still_sending(live: LiveServer) -> None:
    # httpx sends all it has before it reads; a reset would lose the answer.
    answer = live.post(b" " * (3 * 1024 * KiB))
    assert answer.status_code == 413
    assert answer.json()["code"] == "payload-too-large"


def test_each_media_type_has_its_own_limit(live: LiveServer) -> None:
    body = b"\0" * (300 * KiB)
    assert live.post(body).status_code == 413
    assert live.post(body, headers={"Content-Type": SAFETENSORS}).status_code == 400


def test_curl_reads_the_refusal(live: LiveServer) -> None:
    command = [
        "curl",
        "-sS",
        "-o",
        "/dev/null",
        "-w",
        "%{http_code}",
        "-H",
        f"Content-Type: {JSON}",
    ]
    done = subprocess.run(
        [*command, "--data-binary", "@-", f"{live.url}/conv_bwd_data"],
        input=b" " * (2 * 1024 * KiB),
        capture_output=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, b"413"), done


def test_a_client_that_waits_to_be_told_sends_nothing_in_vain(live: LiveServer) -> None:
    with live.connect() as connection:
        connection.sendall(post_head(300 * KiB, more="Expect: 100-continue\r\n"))
        assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")
    with live.connect() as connection:
        connection.sendall(post_head(len(EXAMPLE), more="Expect: 100-continue\r\n"))
        assert connection.recv(65536).startswith(b"HTTP/1.1 100 ")
        connection.sendall(EXAMPLE)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_a_chunked_body_works(live: LiveServer) -> None:
    with httpx.Client(base_url=live.url, timeout=60) as client:
        answer = client.post(
            "/conv_bwd_data",
            content=(EXAMPLE[at : at + 10] for at in range(0, len(EXAMPLE), 10)),
            headers={"Content-Type": JSON},
        )
    assert answer.status_code == 200


def test_a_body_that_stops_coming_is_408(impatient: LiveServer) -> None:
    with impatient.connect() as connection:
        connection.sendall(post_head(1000) + b"{")
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"request-timeout" in answer
    impatient.wait_until_idle()


def test_a_body_that_drips_is_408(impatient: LiveServer) -> None:
    with impatient.connect() as connection:
        connection.sendall(post_head(100_000))
        connection.settimeout(0.05)
        answer = b""
        started = time.monotonic()
        while not answer and time.monotonic() - started < 15:
            connection.sendall(b"{")
            try:
                answer = connection.recv(65536)
            except TimeoutError:
                continue
    assert answer.startswith(b"HTTP/1.1 408 ")


def test_a_client_that_leaves_in_the_middle_is_forgotten(live: LiveServer) -> None:
    with live.connect() as connection:
        connection.sendall(post_head(100_000) + b"{" * 90_000)
        until(lambda: live.held_bytes > 0)
    live.wait_until_idle()


def test_a_body_in_crumbs_is_refused(live: LiveServer) -> None:
    with live.connect() as connection:
        connection.sendall(post_head(None))
        try:
            for _ in range(50):
                connection.sendall(b"1\r\n \r\n" * 1000)
            answer = connection.recv(65536)
        except ConnectionError:
            answer = b"HTTP/1.1 400 "  # reset, with crumbs unread: refused all the same
    assert answer.startswith(b"HTTP/1.1 400 ")
    live.wait_until_idle()


def test_headers_that_never_end_are_refused(live: LiveServer) -> None:
    with live.connect() as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: ")
        try:
            for _ in range(100):
                connection.sendall(b"a" * 4096)
            answer = read_all(connection)
        except ConnectionError:
            answer = b"HTTP/1.1 431 "  # reset: refused all the same
    assert answer.startswith(b"HTTP/1.1 431 ")


def test_many_headers_are_refused(live: LiveServer) -> None:
    with live.connect() as connection:
        fields = b"".join(b"X-%d: %s\r\n" % (i, b"a" * 100) for i in range(200))
        connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n" + fields + b"\r\n")
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"16,384 bytes" in answer
    assert b"x-request-id: " in answer


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\n"])
def test_slow_headers_are_cut_off(impatient: LiveServer, sent: bytes) -> None:
    with impatient.connect() as connection:
        connection.sendall(sent)
        started = time.monotonic()
        answer = read_all(connection)
        assert 0.2 < time.monotonic() - started < 12  # and not the 15 s of the default
    assert answer.startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize(
    "sent",
    [b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n"],
)
def test_what_is_no_http_is_400(live: LiveServer, sent: bytes) -> None:
    with live.connect() as connection:
        connection.sendall(sent)
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"application/problem+json" in answer


@pytest.mark.parametrize("chunked", [False, True])
def test_an_offer_to_upgrade_is_ignored(live: LiveServer, chunked: bool) -> None:
    offer = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(EXAMPLE), EXAMPLE) if chunked else EXAMPLE
    request = post_head(None if chunked else len(EXAMPLE), more=offer) + body
    with live.connect() as connection:
        for cut in (len(request), 30, len(request) - 10):
            connection.sendall(request[:cut])
            time.sleep(0.02)
            connection.sendall(request[cut:])
            assert read_one(connection).startswith(b"HTTP/1.1 200 ")
        connection.sendall(f"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n{offer}\r\n".encode())
        assert read_one(connection).startswith(b"HTTP/1.1 200 ")


def test_requests_may_be_sent_ahead(live: LiveServer) -> None:
    last = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with live.connect() as connection:
        connection.sendall((post_head(len(EXAMPLE)) + EXAMPLE) * 2 + last)
        assert read_all(connection).count(b"HTTP/1.1 200 ") == 3


@pytest.mark.parametrize("offer", ["", "Connection: Upgrade\r\nUpgrade: h2c\r\n"])
def test_a_flood_of_requests_sent_ahead_is_cut_off(live: LiveServer, offer: str) -> None:
    flood = f"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n{offer}\r\n".encode() * 5000
    with live.connect() as connection:
        try:
            connection.sendall(flood)
            received = read_all(connection)
        except ConnectionError:
            received = b""  # closed with requests unread
    assert received.count(b"HTTP/1.1 ") < 100
    assert live.get("/v2/health/live").status_code == 200


def test_head_is_get_without_a_body(live: LiveServer) -> None:
    answer = httpx.head(f"{live.url}/v2/health/live", timeout=60)
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["x-request-id"]


def test_both_lengths_at_once_are_refused(live: LiveServer) -> None:
    # Request smuggling: two readers of the same bytes must not see two different requests.
    with live.connect() as connection:
        connection.sendall(post_head(5, more="Transfer-Encoding: chunked\r\n") + b"0\r\n\r\n")
        assert read_all(connection).startswith(b"HTTP/1.1 400 ")


def test_there_are_only_so_many_connections() -> None:
    with serving(Zeros(), max_connections=20, log_level="error") as server:
        open_ones = [server.connect() for _ in range(20)]
        try:
            for connection in open_ones:
                connection.sendall(b"GET")  # none of them only waits
            until(lambda: not server.waits_s())
            with server.connect() as one_more:
                answer = read_all(one_more)
            assert answer.startswith(b"HTTP/1.1 429 ")
            assert b"retry-after: " in answer
        finally:
            for connection in open_ones:
                connection.close()
        until(lambda: server.get("/v2/health/live").status_code == 200)


def test_an_answer_that_nobody_reads_is_let_go() -> None:
    body = b'{"input": {"data": "AAAAAA==", "dtype": "float32", "shape": [1, 1, 1, 1]}, "weight": '
    body += b'{"data": "AAAAAA==", "dtype": "float32", "shape": [1, 1, 1, 1]}, "padding": 1200}'
    request = post_head(len(body), path="/conv_fwd", more=f"Accept: {SAFETENSORS}\r\n") + body
    with (
        serving(Zeros(), answer_idle_timeout_s=2.0, log_level="error") as server,
        server.connect() as connection,
    ):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(request)
        until(lambda: server.held_bytes > 20_000_000)
        server.wait_until_idle(30)  # and not after the 60 s of the default


@pytest.mark.parametrize("at_once", [True, False])
def test_trailers_are_not_taken_for_headers(live: LiveServer, at_once: bool) -> None:
    """A proxy in front of the server has not checked them as such."""
    trailers = b"Accept: application/vnd.safetensors\r\nX-Request-Id: smuggled\r\nHost: y\r\n\r\n"
    request = post_head(None) + b"%x\r\n%s\r\n0\r\n" % (len(EXAMPLE), EXAMPLE) + trailers
    with live.connect() as connection:
        cut = 0 if at_once else len(request) - len(trailers)
        connection.sendall(request[:cut])
        connection.sendall(request[cut:])
        answer = read_one(connection)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"content-type: application/json" in answer
    assert b"smuggled" not in answer


@pytest.mark.parametrize("framing", [b"0\r\nX: ", b"5;x="])
def test_what_frames_a_body_has_an_end(live: LiveServer, framing: bytes) -> None:
    with live.connect() as connection:
        connection.sendall(post_head(None) + framing)
        with suppress(OSError):
            for _ in range(64):
                connection.sendall(bytes(2**20).replace(b"\0", b"x"))
            pytest.fail("the server takes as much as there is")
    assert live.post().status_code == 200
