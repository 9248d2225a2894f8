"""What ends an HTTP/2 connection, and what does not: broken frames, floods, silence."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convgrad_service.grpc_api.http2.frames import (
    PREFACE,
    Error,
    Kind,
    Setting,
    frame,
    header_block,
    window_update,
)
from convgrad_service.grpc_api.http2.frames import settings as settings_frame
from tests.support.fake_backends import Blocking, Zeros
from tests.support.http2_client import (
    CALL_HEADERS,
    INFER,
    Http2Client,
    connected,
    grpc_message,
    pool_request,
    served,
    wait_until_idle,
)
from tests.support.oip_server import OipServer, serving_oip

CONNECTION_ERRORS: dict[str, tuple[bytes, Error]] = {
    "DATA on an idle stream": (frame(Kind.DATA, 0, 1, b"x"), Error.PROTOCOL_ERROR),
    "DATA on stream 0": (frame(Kind.DATA, 0, 0, b"x"), Error.PROTOCOL_ERROR),
    "an even stream": (header_block(2, CALL_HEADERS, 16_384), Error.PROTOCOL_ERROR),
    "a header block cut off": (
        frame(Kind.HEADERS, 0, 1, b"") + frame(Kind.PING, 0, 0, bytes(8)),
        Error.PROTOCOL_ERROR,
    ),
    "CONTINUATION of nothing": (frame(Kind.CONTINUATION, 4, 1, b""), Error.PROTOCOL_ERROR),
    "a header block that is none": (
        frame(Kind.HEADERS, 4, 1, b"\xff" * 9),
        Error.COMPRESSION_ERROR,
    ),
    "padding without end": (frame(Kind.HEADERS, 0xC, 1, b"\x09a"), Error.PROTOCOL_ERROR),
    "priority cut short": (frame(Kind.HEADERS, 0x24, 1, b"abc"), Error.FRAME_SIZE_ERROR),
    "PING of 7 bytes": (frame(Kind.PING, 0, 0, bytes(7)), Error.FRAME_SIZE_ERROR),
    "SETTINGS of 7 bytes": (frame(Kind.SETTINGS, 0, 0, bytes(7)), Error.FRAME_SIZE_ERROR),
    "RST_STREAM of an idle stream": (frame(Kind.RST_STREAM, 0, 1, bytes(4)), Error.PROTOCOL_ERROR),
    "WINDOW_UPDATE by nothing": (window_update(0, 0), Error.PROTOCOL_ERROR),
    "WINDOW_UPDATE without end": (window_update(0, 2**31 - 1), Error.FLOW_CONTROL_ERROR),
    "a window too large": (
        settings_frame([(Setting.INITIAL_WINDOW_SIZE, 2**31)]),
        Error.FLOW_CONTROL_ERROR,
    ),
    "a frame size too small": (
        settings_frame([(Setting.MAX_FRAME_SIZE, 100)]),
        Error.PROTOCOL_ERROR,
    ),
    "PUSH_PROMISE": (frame(Kind.PUSH_PROMISE, 4, 1, bytes(4)), Error.PROTOCOL_ERROR),
    "a frame too large": (b"\xff\xff\xff\x01\x04\0\0\0\x01", Error.FRAME_SIZE_ERROR),
    "headers over the limit": (
        header_block(1, [*CALL_HEADERS, (b"x", b"y" * 20_000)], 16_000),
        Error.ENHANCE_YOUR_CALM,
    ),
    "more headers than they look": (
        # One large header in the table, and a thousand references to it.
        frame(Kind.HEADERS, 4, 1, b"\x40\x01x\x7f\x81\x17" + b"y" * 3072 + b"\xbe" * 1000),
        Error.COMPRESSION_ERROR,
    ),
    "a flood of pings": (frame(Kind.PING, 0, 0, bytes(8)) * 3000, Error.ENHANCE_YOUR_CALM),
    "a flood of settings": (settings_frame([]) * 3000, Error.ENHANCE_YOUR_CALM),
    "a flood of empty frames": (
        header_block(1, CALL_HEADERS, 16_384) + frame(Kind.DATA, 0, 1) * 3000,
        Error.ENHANCE_YOUR_CALM,
    ),
    "a flood of resets": (
        b"".join(
            header_block(number, CALL_HEADERS, 16_384)
            + frame(Kind.RST_STREAM, 0, number, struct.pack(">L", 8))
            for number in range(1, 6001, 2)
        ),
        Error.ENHANCE_YOUR_CALM,
    ),
    "a flood of tiny frames": (
        header_block(1, CALL_HEADERS, 16_384) + frame(Kind.DATA, 0, 1, b"x") * 3000,
        Error.ENHANCE_YOUR_CALM,
    ),
    "a flood of windows": (window_update(0, 1) * 3000, Error.ENHANCE_YOUR_CALM),
    "more than a stream's window": (
        header_block(1, CALL_HEADERS, 16_384) + frame(Kind.DATA, 0, 1, bytes(2**19)),
        Error.FLOW_CONTROL_ERROR,
    ),
    "DATA after the end": (
        header_block(1, [*CALL_HEADERS[:2], (b":path", INFER), *CALL_HEADERS[3:]], 16_384)
        + frame(Kind.DATA, 1, 1, b"\0\0\0\0\x01")
        + frame(Kind.DATA, 1, 1, b"x"),
        Error.STREAM_CLOSED,
    ),
}


@pytest.mark.parametrize("name", CONNECTION_ERRORS)
def test_what_ends_a_connection(raw: Http2Client, name: str) -> None:
    sent, expected = CONNECTION_ERRORS[name]
    raw.send(sent)
    code, reason = raw.goaway()
    assert code == expected, reason


def test_what_is_no_http2(http2_server: OipServer) -> None:
    for greeting in (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", PREFACE[:-1] + b"x", bytes(100)):
        with connected(http2_server.grpc, greet=False) as raw:
            raw.send(greeting)
            assert raw.goaway()[0] == Error.PROTOCOL_ERROR


@pytest.fixture(scope="module")
def without_patience() -> Iterator[OipServer]:
    """A server that waits for nobody: whoever does not speak at once is let go."""
    with serving_oip(Zeros(), header_timeout_s=0.4) as running:
        yield running


def test_headers_that_never_end(without_patience: OipServer) -> None:
    with connected(without_patience.grpc, greet=False) as silent:
        assert silent.goaway()[0] == Error.SETTINGS_TIMEOUT
    with connected(without_patience.grpc) as raw:
        raw.send(frame(Kind.HEADERS, 0, 1, b""))
        assert raw.goaway()[0] == Error.SETTINGS_TIMEOUT
        assert raw.closed()


def test_a_silent_connection_is_asked_and_let_go() -> None:
    with serving_oip(Zeros(), body_idle_timeout_s=0.4, answer_idle_timeout_s=0.5) as server:
        with connected(server.grpc) as raw:
            kinds = [kind for kind, flags, _, _ in raw.frames() if not flags]
        assert Kind.PING in kinds


def test_too_many_connections(http2_server: OipServer) -> None:
    with ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(connected(http2_server.grpc))
        refused = stack.enter_context(connected(http2_server.grpc))
        assert refused.goaway() == (Error.ENHANCE_YOUR_CALM, "as many connections as there may be")
    until = time.monotonic() + 60
    while not served(http2_server):
        assert time.monotonic() < until


def test_unknown_frames_and_settings_are_ignored(raw: Http2Client) -> None:
    raw.send(b"\0\0\x03\x77\0\0\0\0\x01abc" + settings_frame([(77, 1)]))  # type: ignore[list-item]
    raw.send(frame(Kind.PRIORITY, 0, 9, bytes(5)) + frame(Kind.GOAWAY, 0, 0, bytes(8)))
    raw.open(1)
    raw.data(1, grpc_message(b""), last=True)
    assert raw.answer(1)[0]["grpc-status"] == "0"


def test_windows_that_change_under_an_answer(raw: Http2Client) -> None:
    """An answer waits for its window, and goes on when a setting or an update opens it."""
    raw.send(settings_frame([(Setting.INITIAL_WINDOW_SIZE, 10)]))
    raw.open(1, INFER)
    raw.data(1, grpc_message(pool_request(1024)), last=True)
    read = 0
    for kind, _, _, payload in raw.frames():
        if kind == Kind.DATA:
            read += len(payload)
            if read == 10:
                raw.send(settings_frame([(Setting.INITIAL_WINDOW_SIZE, 30)]))
            elif read == 30:
                raw.send(window_update(1, 100_000))
                break
    headers, data = raw.answer(1)
    assert headers["grpc-status"] == "0"
    assert 30 + len(data) > 4096


def test_draining_finishes_what_is_served_and_ignores_what_is_new() -> None:
    backend = Blocking()
    with serving_oip(backend) as server, connected(server.grpc) as raw:
        raw.open(1, INFER)
        raw.data(1, grpc_message(pool_request()), last=True)
        assert backend.started.acquire(timeout=60)
        stopping = asyncio.run_coroutine_threadsafe(server.grpc_server.stop(60), server.loop)
        kind, _, _, payload = next(found for found in raw.frames() if found[0] == Kind.GOAWAY)
        assert (kind, payload) == (Kind.GOAWAY, struct.pack(">LL", 1, Error.NO_ERROR))
        raw.open(3, INFER)
        raw.data(3, grpc_message(pool_request()), last=True)
        backend.release.set()
        assert raw.answer(1)[0]["grpc-status"] == "0"
        assert raw.closed()
        stopping.result(60)


@given(st.binary(max_size=200), st.integers(0, 9), st.integers(0, 255), st.integers(0, 5))
@settings(max_examples=100)
def test_any_frame_is_survived(
    http2_server: OipServer, payload: bytes, kind: int, flags: int, stream: int
) -> None:
    with connected(http2_server.grpc) as raw:
        raw.send(frame(kind, flags, stream, payload))  # type: ignore[arg-type]
        raw.send(frame(Kind.PING, 0, 0, b"12345678"))
        for found, ack, _, answered in raw.frames():
            if found == Kind.GOAWAY or (found == Kind.PING and ack and answered == b"12345678"):
                break


def test_it_is_alive_after_all_that(http2_server: OipServer) -> None:
    assert served(http2_server)
    wait_until_idle(http2_server)
