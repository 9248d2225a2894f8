"""Frames of HTTP/2: many of a kind, and those that the standard forbids."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from hyperframe.frame import (
    AltSvcFrame,
    ContinuationFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    PushPromiseFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from tests.attack.served import MIB, Served, attacked, processes
from tests.support.h2_client import INFER, LIVE, WATCH, H2Client, connected, grpc_message

LARGEST_WINDOW = 2**31 - 1
LARGEST_STREAM = 2**31 - 1
TABLE_SIZE, INITIAL_WINDOW, LARGEST_FRAME = 1, 4, 5
FRAME_BYTES = 16384

Flood = Callable[[H2Client], bytes]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    limits = {"max_inflight_bytes": "256MiB", "answer_idle_timeout_s": "2"}
    with processes(tmp_path_factory.mktemp("floods"), **limits) as serving:
        yield serving


def frames(*each: Frame) -> bytes:
    return b"".join(frame.serialize() for frame in each)


def raw(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """A frame of any kind, right or wrong."""
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big")
    return head + payload


def call_headers(client: H2Client, path: str = INFER) -> bytes:
    """A call's headers, without the table of those that were sent before."""
    fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "x"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ]
    return bytes(client.h2.encoder.encode(fields))


def new_streams(client: H2Client, count: int) -> range:
    """The next streams of a connection."""
    first = client.open(WATCH) + 2
    return range(first, first + 2 * count, 2)


def calls(client: H2Client, count: int) -> list[tuple[int, bytes]]:
    """So many new streams, each with the frame that opens a call."""
    return [
        (stream, frames(HeadersFrame(stream, call_headers(client), flags=["END_HEADERS"])))
        for stream in new_streams(client, count)
    ]


def rapid_reset(client: H2Client) -> bytes:
    """Calls that are cancelled as soon as they are begun."""
    reset = 8
    return b"".join(
        opened + frames(RstStreamFrame(stream, error_code=reset))
        for stream, opened in calls(client, 20_000)
    )


def continuations(client: H2Client) -> bytes:
    """A head without an end."""
    (stream,) = new_streams(client, 1)
    more = frames(ContinuationFrame(stream, b"\0\1a\1b" * 2000))
    return frames(HeadersFrame(stream, b"\0\1a\1b")) + more * 500


def empty_continuations(client: H2Client) -> bytes:
    """A head without an end, in frames without a byte."""
    (stream,) = new_streams(client, 1)
    return frames(HeadersFrame(stream, b"\0\1a\1b")) + frames(ContinuationFrame(stream)) * 200_000


def header_bomb(client: H2Client) -> bytes:
    """One large field in the table of names, which is then named many thousand times by a byte."""
    (stream,) = new_streams(client, 1)
    large = b"\x40\x01a\x7f\x81\x1e" + b"x" * 4000
    many = frames(ContinuationFrame(stream, b"\xbe" * 16_000))
    return frames(HeadersFrame(stream, large)) + many * 50


def streams_at_once(client: H2Client) -> bytes:
    return b"".join(opened for _, opened in calls(client, 30_000))


def data_behind_the_end(client: H2Client) -> bytes:
    stream = client.open(LIVE, grpc_message(b""), last=True)
    client.answer(stream)
    return frames(DataFrame(stream, b"x" * 100)) * 50_000


def trailers_again(client: H2Client) -> bytes:
    """Trailers that do not end their stream."""
    stream = client.open(INFER)
    return frames(HeadersFrame(stream, b"\0\1a\1b", flags=["END_HEADERS"])) * 50_000


def noise(_: H2Client) -> bytes:
    return random.Random(1).randbytes(2 * MIB)


def noise_in_frames(_: H2Client) -> bytes:
    """Frames of the right lengths with anything in them."""
    any_of = random.Random(2)
    return b"".join(
        raw(
            any_of.randrange(12),
            any_of.randrange(256),
            any_of.randrange(1000),
            any_of.randbytes(any_of.randrange(64)),
        )
        for _ in range(20_000)
    )


def repeated(count: int, *each: Frame) -> Flood:
    return lambda _: frames(*each) * count


def on_a_stream(count: int, make: Callable[[int], Frame], path: str = INFER) -> Flood:
    """One frame of an open stream again and again."""
    return lambda client: frames(make(client.open(path))) * count


QUICK: dict[str, Flood] = {
    "settings": repeated(
        50_000,
        SettingsFrame(settings={INITIAL_WINDOW: 0}),
        SettingsFrame(settings={INITIAL_WINDOW: 2**30}),
    ),
    "pings": repeated(100_000, PingFrame(opaque_data=bytes(8))),
    "unknown frames": lambda _: raw(0x77, 0, 1, b"abc") * 100_000,
    "empty data": on_a_stream(100_000, DataFrame),
    "rapid reset": rapid_reset,
    "continuations": continuations,
    "header bomb": header_bomb,
}

SLOW: dict[str, Flood] = {
    "windows of the connection": repeated(200_000, WindowUpdateFrame(0, window_increment=1)),
    "windows of a stream": on_a_stream(
        200_000, lambda stream: WindowUpdateFrame(stream, window_increment=1)
    ),
    "windows that are too large": repeated(
        1000, WindowUpdateFrame(0, window_increment=LARGEST_WINDOW)
    ),
    "windows of idle streams": repeated(
        100_000, WindowUpdateFrame(LARGEST_STREAM, window_increment=1)
    ),
    "priorities": lambda _: frames(
        *(PriorityFrame(stream, depends_on=stream + 2) for stream in range(1001, 81_001, 2))
    ),
    "priorities that depend on themselves": on_a_stream(
        100_000, lambda stream: PriorityFrame(stream, depends_on=stream)
    ),
    "goaway": repeated(100_000, GoAwayFrame()),
    "goaway with text": repeated(1000, GoAwayFrame(additional_data=bytes(16_000))),
    "push promises": on_a_stream(
        50_000, lambda stream: PushPromiseFrame(stream, 2, b"\x82", flags=["END_HEADERS"])
    ),
    "resets of idle streams": repeated(100_000, RstStreamFrame(LARGEST_STREAM)),
    "resets of a closed stream": on_a_stream(100_000, RstStreamFrame),
    "streams at once": streams_at_once,
    "empty settings": repeated(100_000, SettingsFrame()),
    "acknowledgements of settings": repeated(100_000, SettingsFrame(flags=["ACK"])),
    "long settings": lambda _: raw(4, 0, 0, b"\xff\0\0\0\0\0" * 2700) * 500,
    "table sizes": repeated(
        50_000,
        SettingsFrame(settings={TABLE_SIZE: 0}),
        SettingsFrame(settings={TABLE_SIZE: 4096}),
    ),
    "frame sizes": repeated(
        50_000,
        SettingsFrame(settings={LARGEST_FRAME: FRAME_BYTES}),
        SettingsFrame(settings={LARGEST_FRAME: 2**24 - 1}),
    ),
    "data behind the end": data_behind_the_end,
    "data of idle streams": repeated(50_000, DataFrame(LARGEST_STREAM, b"x" * 100)),
    "padding": on_a_stream(
        50_000, lambda stream: DataFrame(stream, b"", flags=["PADDED"], pad_length=255)
    ),
    "a frame of 16 MiB": lambda client: raw(0, 0, client.open(INFER), bytes(2**24 - 1)),
    "trailers again": trailers_again,
    "empty continuations": empty_continuations,
    "other services": repeated(100_000, AltSvcFrame(0, origin=b"x", field=b"y")),
    "acknowledgements of pings": repeated(100_000, PingFrame(flags=["ACK"])),
    "noise": noise,
    "noise in frames": noise_in_frames,
}


@pytest.mark.parametrize(
    "flood",
    [
        *(pytest.param(flood, id=name) for name, flood in QUICK.items()),
        *(pytest.param(flood, id=name, marks=pytest.mark.slow) for name, flood in SLOW.items()),
    ],
)
def test_a_flood_keeps_nobody_waiting(server: Served, flood: Flood) -> None:
    with attacked(server, p99_s=5.0, more_bytes=200 * MIB), connected(server.grpc) as client:
        for _ in range(200):
            client.open(WATCH, grpc_message(b""), last=True)
        sending = threading.Thread(target=_send, args=(client.socket, flood(client)))
        sending.start()
        sending.join(2)
        with suppress(OSError):
            client.socket.shutdown(socket.SHUT_RDWR)
        sending.join()


def _send(connection: socket.socket, data: bytes) -> None:
    with suppress(OSError):  # the server may close, and so does the test
        connection.sendall(data)


def next_stream(client: H2Client, then: Callable[[int, bytes], bytes]) -> bytes:
    """Frames of a stream that is not open yet, and the headers of a call."""
    (stream,) = new_streams(client, 1)
    return then(stream, call_headers(client))


DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY = range(8)
WINDOW_UPDATE, CONTINUATION, UNKNOWN = 8, 9, 0x77
ACK, END_HEADERS, PADDED, WITH_PRIORITY = 1, 4, 8, 32

ENDS: dict[str, Flood] = {
    "headers that cannot be decoded": lambda c: next_stream(
        c, lambda stream, _: raw(HEADERS, END_HEADERS, stream, b"\xff" * 9)
    ),
    "a table that is too large": lambda c: next_stream(
        c, lambda stream, fields: raw(HEADERS, END_HEADERS, stream, b"\x3f\xff\xff\x7f" + fields)
    ),
    "data within headers": lambda c: next_stream(
        c, lambda stream, fields: raw(HEADERS, 0, stream, fields) + raw(DATA, 0, stream - 2, b"x")
    ),
    "the rest of the headers on another stream": lambda c: next_stream(
        c,
        lambda stream, fields: (
            raw(HEADERS, 0, stream, fields) + raw(CONTINUATION, END_HEADERS, stream + 2, b"")
        ),
    ),
    "the rest of no headers": lambda c: raw(CONTINUATION, END_HEADERS, c.open(WATCH), b""),
    "a reset of 3 bytes": lambda c: raw(RST_STREAM, 0, c.open(WATCH), bytes(3)),
    "settings of a stream": lambda c: raw(SETTINGS, 0, c.open(WATCH), b""),
    "settings of 5 bytes": lambda _: raw(SETTINGS, 0, 0, bytes(5)),
    "an acknowledgement with settings": lambda _: raw(SETTINGS, ACK, 0, bytes(6)),
    "a window of 2^31": lambda _: raw(SETTINGS, 0, 0, b"\0\4\x80\0\0\0"),
    "frames of no bytes": lambda _: raw(SETTINGS, 0, 0, b"\0\5\0\0\0\0"),
    "push that is neither on nor off": lambda _: raw(SETTINGS, 0, 0, b"\0\2\0\0\0\2"),
    "a ping of 7 bytes": lambda _: raw(PING, 0, 0, bytes(7)),
    "a goaway of 7 bytes": lambda _: raw(GOAWAY, 0, 0, bytes(7)),
    "a window update of 3 bytes": lambda _: raw(WINDOW_UPDATE, 0, 0, bytes(3)),
    "a window update by 0": lambda _: raw(WINDOW_UPDATE, 0, 0, bytes(4)),
    "a stream's window update by 0": lambda c: raw(WINDOW_UPDATE, 0, c.open(WATCH), bytes(4)),
    "a frame that is a byte too long": lambda c: raw(DATA, 0, c.open(INFER), bytes(16385)),
    "a frame of 16 MiB": lambda c: raw(DATA, 0, c.open(INFER), bytes(2**24 - 1)),
    "the preface again": lambda _: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/1.1": lambda _: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
}
# Some of these are connection errors by RFC 9113; grpcio ignores them.
IGNORED: dict[str, Flood] = {
    "data of stream 0": lambda _: raw(DATA, 0, 0, b"x"),
    "data of an idle stream": lambda _: raw(DATA, 0, LARGEST_STREAM, b"x"),
    "data of a stream of the server's": lambda _: raw(DATA, 0, 2, b"x"),
    "padding longer than its frame": lambda c: raw(
        DATA, PADDED, c.open(INFER), b"\xff" + bytes(10)
    ),
    "headers of stream 0": lambda c: raw(HEADERS, END_HEADERS, 0, call_headers(c)),
    "headers of a stream of the server's": lambda c: raw(HEADERS, END_HEADERS, 2, call_headers(c)),
    "headers that depend on themselves": lambda c: next_stream(
        c,
        lambda stream, fields: raw(
            HEADERS, END_HEADERS | WITH_PRIORITY, stream, stream.to_bytes(4, "big") + b"\0" + fields
        ),
    ),
    "a priority of 4 bytes": lambda c: raw(PRIORITY, 0, c.open(WATCH), bytes(4)),
    "a priority of stream 0": lambda _: raw(PRIORITY, 0, 0, bytes(5)),
    "a reset of stream 0": lambda _: raw(RST_STREAM, 0, 0, bytes(4)),
    "a reset of an idle stream": lambda _: raw(RST_STREAM, 0, LARGEST_STREAM, bytes(4)),
    "a push promise": lambda c: raw(PUSH_PROMISE, END_HEADERS, c.open(WATCH), b"\0\0\0\2\x82"),
    "a ping of a stream": lambda c: raw(PING, 0, c.open(WATCH), bytes(8)),
    "a goaway of a stream": lambda c: raw(GOAWAY, 0, c.open(WATCH), bytes(8)),
    "a window that becomes too large": lambda _: raw(WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff"),
    "a window of an idle stream": lambda _: raw(WINDOW_UPDATE, 0, LARGEST_STREAM, b"\0\0\0\1"),
    "the reserved bit": lambda _: raw(WINDOW_UPDATE, 0, 2**31, b"\0\0\0\1"),
    "an unknown setting": lambda _: raw(SETTINGS, 0, 0, b"\xff\0\0\0\0\1"),
    "an unknown frame": lambda _: raw(UNKNOWN, 0xFF, 5, b"abc"),
}
OUTCOMES = [
    *(pytest.param(frame, True, id=name) for name, frame in ENDS.items()),
    *(pytest.param(frame, False, id=name) for name, frame in IGNORED.items()),
]


@pytest.mark.parametrize(("frame", "ends"), OUTCOMES)
def test_a_frame_ends_its_connection_or_is_ignored(
    server: Served, frame: Flood, ends: bool
) -> None:
    """At once, and no other connection; what is ignored leaves a connection that works."""
    with connected(server.grpc) as other, connected(server.grpc) as client:
        client.socket.settimeout(20)
        _send(client.socket, frame(client) + raw(PING, 0, 0, b"answered"))
        received, pong = b"", raw(PING, ACK, 0, b"answered")
        with suppress(ConnectionResetError):
            while pong not in received and (part := client.socket.recv(65536)):
                received += part
        assert (pong not in received) == ends, received
        assert other.answer(other.open(LIVE, grpc_message(b""), last=True)).status == "0"
