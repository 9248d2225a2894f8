"""HTTP/2 under the gRPC server: what a client may not do, byte by byte, and what it may."""

from __future__ import annotations

import asyncio
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as client_module
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

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
from tests.contract.http2_client import CALL_HEADERS, Http2Client, connected, grpc_message
from tests.contract.oip_server import OipServer, serving_oip
from tests.fake_backends import Blocking, Zeros

INFER = b"/inference.GRPCInferenceService/ModelInfer"


@pytest.fixture(scope="module")
def server() -> Iterator[OipServer]:
    with serving_oip(
        Zeros(),
        max_body_bytes="8MiB",
        body_idle_timeout_s=0.4,
        answer_idle_timeout_s=0.5,
        header_timeout_s=0.4,
        max_header_bytes="16KiB",
        max_connections=40,
    ) as running:
        yield running


@pytest.fixture
def raw(server: OipServer) -> Iterator[Http2Client]:
    with connected(server.grpc) as client:
        yield client
    assert served(server)
    wait_until_idle(server)


def alive(server: OipServer) -> bool:
    with client_module.InferenceServerClient(server.grpc) as client:
        return bool(client.is_server_live(client_timeout=5))


def served(server: OipServer) -> bool:
    """Whether a new connection is."""
    with connected(server.grpc) as raw:
        raw.open(1)
        raw.data(1, grpc_message(b""), last=True)
        try:
            return raw.answer(1)[0]["grpc-status"] == "0"
        except ConnectionError:
            return False


def wait_until_idle(server: OipServer) -> None:
    hub: Any = server.dataplane.engine
    until = time.monotonic() + 5
    while hub.memory.used_bytes:
        assert time.monotonic() < until
        time.sleep(0.01)


def pool_request(elements: int = 16) -> bytes:
    """A ModelInferRequest whose tensor has ``elements`` times 4 bytes."""
    made = service_pb2.ModelInferRequest(model_name="maxpool2d_fwd")
    made.inputs.add(name="input", datatype="FP32", shape=[1, 1, 4, elements // 4])
    made.parameters["kernel_size"].int64_param = 1
    made.raw_input_contents.append(bytes(4 * elements))
    body: bytes = made.SerializeToString()
    return body


def test_a_call_by_hand(raw: Http2Client) -> None:
    raw.open(1)
    raw.data(1, grpc_message(b""), last=True)
    headers, data = raw.answer(1)
    assert headers[":status"] == "200"
    assert headers["content-type"] == "application/grpc"
    assert headers["grpc-status"] == "0"
    assert data == grpc_message(b"\x08\x01")


def test_bytes_one_at_a_time(raw: Http2Client) -> None:
    """Frames may be cut anywhere, and padded, and continued."""
    block = header_block(1, CALL_HEADERS, 40)  # in pieces of 40 bytes
    padded = frame(Kind.DATA, 0x8, 1, b"\x03" + grpc_message(b"")[:2] + b"\0\0\0")
    rest = frame(Kind.DATA, 0x9, 1, b"\x00" + grpc_message(b"")[2:])
    for byte in block + padded + rest:
        raw.send(bytes([byte]))
    assert raw.answer(1)[0]["grpc-status"] == "0"


def test_large_messages_in_small_frames(raw: Http2Client) -> None:
    message = grpc_message(pool_request(2**20))
    raw.open(1, INFER)
    for at in range(0, len(message), 16_384):
        raw.data(1, message[at : at + 16_384], last=at + 16_384 >= len(message))
        if at == 0:
            grants = raw.frames()
            while next(grants)[0] != Kind.WINDOW_UPDATE:
                pass
            while (update := next(grants))[:3:2] != (Kind.WINDOW_UPDATE, 1):
                pass
            assert int.from_bytes(update[3], "big") > 2**21
    # The answer needs more than the windows that a client begins with.
    answered = 0
    for kind, flags, number, payload in raw.frames():
        if kind == Kind.DATA:
            answered += len(payload)
            raw.send(window_update(0, len(payload)) + window_update(1, len(payload)))
        if kind == Kind.HEADERS and number == 1 and flags & 1:
            break
    assert answered > 2**22


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_compressed_messages(server: OipServer, encoding: str) -> None:
    array = np.ones((1, 1, 64, 64), np.float32)
    tensor = client_module.InferInput("input", array.shape, "FP32").set_data_from_numpy(array)
    with client_module.InferenceServerClient(server.grpc) as client:
        result = client.infer(
            "maxpool2d_fwd",
            [tensor],
            parameters={"kernel_size": 2},
            compression_algorithm=encoding,
        )
    assert result.as_numpy("output").shape == (1, 1, 32, 32)


def compressed_call(raw: Http2Client, encoding: bytes, body: bytes) -> dict[str, str]:
    headers = [*CALL_HEADERS, (b"grpc-encoding", encoding)]
    raw.send(header_block(1, headers, 16_384))
    raw.data(1, grpc_message(body, compressed=True), last=True)
    return raw.answer(1)[0]


def test_compressed_messages_that_are_not(raw: Http2Client) -> None:
    assert compressed_call(raw, b"gzip", b"not gzip")["convgrad-code"] == "malformed-request"


def test_compressed_messages_that_are_cut_short(raw: Http2Client) -> None:
    cut = zlib.compress(bytes(1000))[:-4]
    assert compressed_call(raw, b"deflate", cut)["convgrad-code"] == "malformed-request"


def test_compressions_that_are_unknown(raw: Http2Client) -> None:
    headers = compressed_call(raw, b"snappy", b"")
    assert headers["convgrad-code"] == "unsupported-media-type"
    assert "identity" in headers["grpc-accept-encoding"]


def test_a_bomb_is_not_inflated(raw: Http2Client) -> None:
    headers = compressed_call(raw, b"deflate", zlib.compress(bytes(64 * 2**20)))
    assert headers["convgrad-code"] == "payload-too-large"
    assert headers["grpc-status"] == "8"


def test_a_message_over_the_limit_is_refused_before_it_comes(raw: Http2Client) -> None:
    raw.open(1, INFER)
    raw.data(1, b"\0" + (2**32 - 1).to_bytes(4, "big"))
    headers, _ = raw.answer(1)
    assert headers["convgrad-code"] == "payload-too-large"
    assert "4,294,967,295 bytes; this server takes at most 8,388,608" in headers["grpc-message"]
    assert raw.reset(1) == Error.NO_ERROR  # the rest is not wanted


@pytest.mark.parametrize("sent", [0, 3, 100, 2000, 300_000])
def test_a_client_that_pauses_is_cut_off(raw: Http2Client, sent: int) -> None:
    message = grpc_message(pool_request(2**19))
    raw.open(1, INFER)
    for at in range(0, sent, 16_384):
        raw.data(1, message[at : min(at + 16_384, sent)])
    headers, _ = raw.answer(1)
    assert headers["convgrad-code"] == "request-timeout"
    assert headers["grpc-status"] == "14"
    assert "0.4 s" in headers["grpc-message"]


def test_a_stream_may_be_silent_between_its_messages(raw: Http2Client) -> None:
    raw.open(1, INFER.replace(b"ModelInfer", b"ModelStreamInfer"))
    raw.data(1, grpc_message(pool_request()))
    time.sleep(0.7)  # longer than a pause within a message may last
    raw.data(1, grpc_message(pool_request()), last=True)
    headers, data = raw.answer(1)
    assert headers["grpc-status"] == "0"
    assert len(data) == 2 * (5 + int.from_bytes(data[1:5], "big"))


def test_a_client_that_vanishes_frees_the_memory(server: OipServer) -> None:
    message = grpc_message(pool_request(2**19))
    with connected(server.grpc) as raw:
        raw.open(1, INFER)
        for at in range(0, 2**17, 2**14):
            raw.data(1, message[at : at + 2**14])
        hub: Any = server.dataplane.engine
        until = time.monotonic() + 5
        while not hub.memory.used_bytes:
            assert time.monotonic() < until
            time.sleep(0.005)
    wait_until_idle(server)


def test_a_client_that_takes_no_answer_is_cut_off(server: OipServer) -> None:
    message = grpc_message(pool_request(2**20))
    with connected(server.grpc) as raw:
        raw.open(1, INFER)
        for at in range(0, len(message), 2**14):
            raw.data(1, message[at : at + 2**14], last=at + 2**14 >= len(message))
        # No window is ever opened for the 4 MiB of the answer.
        assert raw.closed()
    wait_until_idle(server)


@pytest.mark.parametrize(
    "cut", [b"", b"\0\0", b"\0\0\0\0\x09", grpc_message(pool_request(2**16))[:9000]]
)
def test_calls_that_end_too_soon(raw: Http2Client, cut: bytes) -> None:
    raw.open(1, INFER)
    raw.data(1, cut, last=True)
    headers, _ = raw.answer(1)
    assert headers["convgrad-code"] == "malformed-request"
    assert "ended" in headers["grpc-message"]


def large(**changed: Any) -> bytes:
    """A large request of two tensors, spoilt."""
    made = service_pb2.ModelInferRequest(model_name="conv_bwd_data")
    made.inputs.add(name="grad_output", datatype="FP32", shape=[1, 1, 200, 200])
    made.inputs.add(name="weight", datatype="FP32", shape=[1, 1, 2, 2])
    sizes = changed.get("raw", [160_000, 16])
    made.raw_input_contents.extend(bytes(size) for size in sizes)
    body: bytes = changed.get("before", b"") + made.SerializeToString() + changed.get("after", b"")
    return body


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (large(raw=[160_004, 16]), "grad_output: its shape and datatype take 160,000 bytes"),
        (large(raw=[160_000, 20]), "weight: its shape and datatype take 16 bytes, got 20"),
        (large(raw=[160_000]), "weight: no data in raw_input_contents"),
        (large(raw=[160_000, 16, 4]), "follow the 2 inputs' raw_input_contents"),
        (large(after=b"\x1a\x01x"), "expected those to end the message"),
        (large(before=b"\x0b"), "wire type 3"),
        (large(before=b"\x12\x01\x37"), "no version"),
        (large(before=b"\x08\x01" * 5000), "more than 4096 fields"),
    ],
)
def test_large_messages_that_are_wrong(raw: Http2Client, body: bytes, sentence: str) -> None:
    message = grpc_message(body)
    raw.open(1, INFER)
    for at in range(0, len(message), 2**14):
        raw.data(1, message[at : at + 2**14], last=at + 2**14 >= len(message))
    headers, _ = raw.answer(1)
    assert headers["convgrad-code"] in ("malformed-request", "not-found")
    assert sentence in headers["grpc-message"].replace("%22", '"')


def test_requests_that_are_no_calls(raw: Http2Client) -> None:
    for stream, changed, status in (
        (1, {b":method": b"GET"}, "405"),
        (3, {b"content-type": b"application/json"}, "415"),
    ):
        headers = [(name, changed.get(name, value)) for name, value in CALL_HEADERS]
        raw.send(header_block(stream, headers, 16_384, last=True))
        assert raw.answer(stream)[0][":status"] == status
    raw.open(5, b"/nowhere/Nothing", last=True)
    assert raw.answer(5)[0]["grpc-status"] == "12"


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


def test_what_is_no_http2(server: OipServer) -> None:
    for greeting in (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", PREFACE[:-1] + b"x", bytes(100)):
        with connected(server.grpc, greet=False) as raw:
            raw.send(greeting)
            assert raw.goaway()[0] == Error.PROTOCOL_ERROR


def test_headers_that_never_end(server: OipServer) -> None:
    with connected(server.grpc, greet=False) as silent:
        assert silent.goaway()[0] == Error.SETTINGS_TIMEOUT
    with connected(server.grpc) as raw:
        raw.send(frame(Kind.HEADERS, 0, 1, b""))
        assert raw.goaway()[0] == Error.SETTINGS_TIMEOUT
        assert raw.closed()


def test_a_silent_connection_is_asked_and_let_go(server: OipServer) -> None:
    with connected(server.grpc) as raw:
        kinds = [kind for kind, flags, _, _ in raw.frames() if not flags]
        assert Kind.PING in kinds


def test_too_many_connections(server: OipServer) -> None:
    with ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(connected(server.grpc))
        refused = stack.enter_context(connected(server.grpc))
        assert refused.goaway() == (Error.ENHANCE_YOUR_CALM, "as many connections as there may be")
    until = time.monotonic() + 5
    while not served(server):
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
        assert backend.started.acquire(timeout=5)
        stopping = asyncio.run_coroutine_threadsafe(server.grpc_server.stop(5), server.loop)
        kind, _, _, payload = next(found for found in raw.frames() if found[0] == Kind.GOAWAY)
        assert (kind, payload) == (Kind.GOAWAY, struct.pack(">LL", 1, Error.NO_ERROR))
        raw.open(3, INFER)
        raw.data(3, grpc_message(pool_request()), last=True)
        backend.release.set()
        assert raw.answer(1)[0]["grpc-status"] == "0"
        assert raw.closed()
        stopping.result(5)


@given(st.binary(max_size=200), st.integers(0, 9), st.integers(0, 255), st.integers(0, 5))
@settings(max_examples=100, deadline=None)
def test_any_frame_is_survived(
    server: OipServer, payload: bytes, kind: int, flags: int, stream: int
) -> None:
    with connected(server.grpc) as raw:
        raw.send(frame(kind, flags, stream, payload))  # type: ignore[arg-type]
        raw.send(frame(Kind.PING, 0, 0, b"12345678"))
        for found, ack, _, answered in raw.frames():
            if found == Kind.GOAWAY or (found == Kind.PING and ack and answered == b"12345678"):
                break


def test_it_is_alive_after_all_that(server: OipServer) -> None:
    assert alive(server)
    wait_until_idle(server)
