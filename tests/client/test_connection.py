"""The SDK's own HTTP/1.1: what it sends, every way an answer can be framed, and how it breaks."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import convgrad
from convgrad import ClientTimeout, ConnectionFailed, InvalidAnswer, calls
from convgrad._direct import DirectTransport, is_direct
from convgrad._transport import HttpxTransport
from tests.support.awaited import CLIENTS
from tests.support.fake_server import SAFETENSORS, FakeServer, answer, ones, problem
from tests.support.local_http import listening

Handler = Callable[[socket.socket], None]
GOOD = answer({"output": ones(1, 1, 1)})
BODY = GOOD.content
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\n" % SAFETENSORS.encode()
MIB = 1 << 20


@pytest.fixture(params=CLIENTS, ids=["sync", "async"])
def make(request: pytest.FixtureRequest) -> Any:
    """Makes a client of either kind."""
    return request.param


def ask(client: Any, size: int = 1) -> np.ndarray:
    return client.conv_fwd(np.ones((1, 1, size), np.float32), ones(1, 1, 1))


@contextmanager
def raw_server(*handlers: Handler) -> Iterator[str]:
    """A server whose connections are served by these functions, one after another."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        for handler in handlers:
            accepted, _ = listener.accept()
            with accepted:
                accepted.settimeout(60)
                handler(accepted)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(60)
        assert not thread.is_alive(), "fewer connections came than there are handlers"
    finally:
        listener.close()


def read_request(connection: socket.socket) -> bytes:
    """One whole request."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(
        int(line.partition(b":")[2])
        for line in head.split(b"\r\n")
        if line.lower().startswith(b"content-length")
    )
    while len(body) < length:
        body += connection.recv(65536)
    return head


def answering(*parts: bytes, pause_s: float = 0.0) -> Handler:
    def handle(connection: socket.socket) -> None:
        read_request(connection)
        for part in parts:
            connection.sendall(part)
            time.sleep(pause_s)

    return handle


def chunked(*sizes: int) -> bytes:
    parts, at = [], 0
    for size in (*sizes, len(BODY) - sum(sizes)):
        part = BODY[at : at + size]
        parts.append(b"%x;note=1\r\n%s\r\n" % (len(part), part))
        at += size
    return b"".join(parts) + b"0\r\nTrailer: x\r\n\r\n"


LENGTH = b"Content-Length: %d\r\n\r\n" % len(BODY)
FRAMINGS = {
    "length": (HEAD + LENGTH + BODY,),
    "length, byte by byte": (
        *(bytes([byte]) for byte in HEAD + LENGTH + BODY[:40]),
        BODY[40:],
    ),
    "chunks": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(1, 7, 30),),
    "chunks, cut anywhere": (
        HEAD + b"Transfer-Encoding: chu",
        b"nked\r\n\r\n" + chunked(9)[:3],
        chunked(9)[3:25],
        chunked(9)[25:],
    ),
    "until the end": (HEAD + b"\r\n" + BODY,),
    "HTTP/1.0": (HEAD.replace(b"1.1", b"1.0") + LENGTH + BODY,),
    "after 100 Continue": (b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + LENGTH + BODY,),
}


@pytest.mark.parametrize("framing", FRAMINGS)
def test_every_framing_is_read(framing: str, make: Any) -> None:
    parts = FRAMINGS[framing]
    with (
        raw_server(answering(*parts, pause_s=0.001)) as url,
        make(url, max_retries=0) as client,
    ):
        assert ask(client).shape == (1, 1, 1)


BROKEN = {
    "no answer": ((), "headers did; if the server speaks TLS, its address"),
    "not HTTP": ((b"SSH-2.0-OpenSSH\r\n\r\n",), "expected an answer of HTTP/1.1"),
    "no colon": ((b"HTTP/1.1 200 OK\r\nodd\r\n\r\n",), "expected a header, got b'odd'"),
    "endless headers": ((b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 15_000,), "headers are over"),
    "short": ((HEAD + LENGTH + BODY[:-1],), "broke off after"),
    "a chunk of no size": ((HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",), "size is b'zz'"),
    "a long chunk": ((HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n",), "longer than"),
    "a cut chunk": ((HEAD + b"Transfer-Encoding: chunked\r\n\r\n9\r\nabc",), "body did"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_no_answer_is_a_failed_connection(kind: str, make: Any) -> None:
    parts, sentence = BROKEN[kind]
    with (
        raw_server(answering(*parts)) as url,
        make(url, max_retries=0) as client,
        pytest.raises(ConnectionFailed, match=sentence) as caught,
    ):
        ask(client)
    assert caught.value.request_id is not None


def test_an_answer_that_announces_too_much_is_refused(make: Any) -> None:
    endless = HEAD + b"Content-Length: %d\r\n\r\n" % 10**17
    with (
        raw_server(answering(endless)) as url,
        make(url, max_retries=0) as client,
        pytest.raises(InvalidAnswer, match="more than fit in memory"),
    ):
        ask(client)


def test_a_connection_is_used_again_and_its_request_is_well_formed(make: Any) -> None:
    heads = []

    def handle(connection: socket.socket) -> None:
        for _ in range(3):
            heads.append(read_request(connection))
            connection.sendall(HEAD + LENGTH + BODY)

    with (
        raw_server(handle) as url,
        make(url + "/grad/", headers={"Authorization": "Bearer key"}) as client,
    ):
        for _ in range(3):
            ask(client)
    lines = heads[0].decode().split("\r\n")
    assert lines[0] == "POST /grad/conv_fwd HTTP/1.1"
    assert f"Host: {url.removeprefix('http://')}" in lines
    assert "authorization: Bearer key" in lines
    assert f"content-type: {SAFETENSORS}" in lines


def test_a_connection_that_the_server_gave_up_is_replaced_without_a_retry(make: Any) -> None:
    one = answering(HEAD + LENGTH + BODY)  # which then closes
    with raw_server(one, one, one) as url, make(url, max_retries=0) as client:
        for _ in range(3):
            ask(client)

    def closes_when_asked_again(connection: socket.socket) -> None:
        answering(HEAD + LENGTH + BODY)(connection)
        read_request(connection)

    with (
        raw_server(closes_when_asked_again, one) as url,
        make(url, max_retries=0) as client,
    ):
        ask(client)
        ask(client)


def test_connection_close_is_honoured(make: Any) -> None:
    closing = answering(HEAD + b"Connection: close\r\n" + LENGTH + BODY, pause_s=0.05)
    with raw_server(closing, closing) as url, make(url, max_retries=0) as client:
        ask(client)
        ask(client)


def test_a_refusal_is_read_although_the_body_was_not(make: Any) -> None:
    refusal = problem("payload-too-large", "too much")
    head = (
        b"HTTP/1.1 413 Too Large\r\nContent-Type: application/problem+json\r\n"
        b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(refusal.content)
    )

    def refuse(connection: socket.socket) -> None:
        connection.recv(1000)
        connection.sendall(head + refusal.content)
        time.sleep(0.3)  # the client must not wait for this end to stop sending

    with (
        raw_server(refuse) as url,
        make(url, max_retries=0) as client,
        pytest.raises(convgrad.PayloadTooLarge, match="too much"),
    ):
        ask(client, 16 * MIB)


@pytest.mark.parametrize("size", [1, 16 * MIB])
def test_a_server_that_neither_reads_nor_answers_is_a_timeout(size: int, make: Any) -> None:
    done = threading.Event()
    with raw_server(lambda connection: done.wait(60) and None) as url:
        client = make(url, timeout=0.2, max_retries=0)
        started = time.monotonic()
        with client, pytest.raises(ClientTimeout, match=r"within 0\.2 s"):
            ask(client, size)
        assert time.monotonic() - started >= 0.2
        done.set()


def test_a_server_that_trickles_is_a_timeout(make: Any) -> None:
    def trickle(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(HEAD + LENGTH)
        try:
            while True:
                connection.sendall(b"x")
                time.sleep(0.01)
        except OSError:
            pass

    # It trickles until the client has left.
    with (
        raw_server(trickle) as url,
        make(url, timeout=0.2, max_retries=0) as client,
        pytest.raises(ClientTimeout),
    ):
        ask(client)


def test_threads_share_a_client() -> None:
    fake = FakeServer([GOOD])
    with listening(fake) as url, convgrad.Client(url) as client, ThreadPoolExecutor(8) as pool:
        shapes = {result.shape for result in pool.map(lambda _: ask(client), range(100))}
    assert shapes == {(1, 1, 1)}
    assert len(fake.requests) == 100


def test_a_header_that_http_cannot_carry_is_not_sent(make: Any) -> None:
    client = make("http://127.0.0.1:9", headers={"X-Key": "a\r\nX-Other: b"})
    with client, pytest.raises(convgrad.errors.ClientError, match="x-key"):
        ask(client)


def test_what_needs_more_than_a_socket_goes_through_httpx(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert is_direct("http://server:8000/grad")
    assert not is_direct("https://server")
    assert not is_direct("http://name:password@server")
    with convgrad.Client("https://server") as client:
        assert isinstance(client._transport, HttpxTransport)
    with convgrad.Client() as client:
        assert isinstance(client._transport, DirectTransport)
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    assert not is_direct("http://server")


def test_a_large_body_arrives_whole(make: Any) -> None:
    fake = FakeServer([GOOD])
    x = np.random.default_rng(0).standard_normal((1, 1, 3 * MIB + 17)).astype(np.float32)
    with listening(fake) as url, make(url) as client:
        client.call(calls.conv_fwd(x, ones(1, 1, 1)))
    sent, _ = fake.sent()
    np.testing.assert_array_equal(sent["input"], x)
