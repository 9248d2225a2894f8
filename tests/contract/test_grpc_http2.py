"""HTTP/2 under the gRPC server: what a client may not do, byte by byte, and what it may."""

from __future__ import annotations

import time
import zlib
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as client_module
from tritonclient.grpc import service_pb2

from convgrad_service.grpc_api.http2.frames import (
    Error,
    Kind,
    frame,
    header_block,
    window_update,
)
from tests.support.http2_client import (
    CALL_HEADERS,
    INFER,
    Http2Client,
    connected,
    grpc_message,
    pool_request,
    wait_until_idle,
)
from tests.support.oip_server import OipServer


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
def test_compressed_messages(http2_server: OipServer, encoding: str) -> None:
    array = np.ones((1, 1, 64, 64), np.float32)
    tensor = client_module.InferInput("input", array.shape, "FP32").set_data_from_numpy(array)
    with client_module.InferenceServerClient(http2_server.grpc) as client:
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
def test_a_client_that_pauses_is_cut_off(impatient: OipServer, sent: int) -> None:
    message = grpc_message(pool_request(2**19))
    with connected(impatient.grpc) as raw:
        raw.open(1, INFER)
        for at in range(0, sent, 16_384):
            raw.data(1, message[at : min(at + 16_384, sent)])
        headers, _ = raw.answer(1)
    assert headers["convgrad-code"] == "request-timeout"
    assert headers["grpc-status"] == "14"
    assert "0.4 s" in headers["grpc-message"]


def test_a_stream_may_be_silent_between_its_messages(impatient: OipServer) -> None:
    with connected(impatient.grpc) as raw:
        path = INFER.replace(b"ModelInfer", b"ModelStreamInfer")
        raw.open(1, path, grpc_message(pool_request()))
        time.sleep(0.7)  # longer than a pause within a message may last
        raw.data(1, grpc_message(pool_request()), last=True)
        headers, data = raw.answer(1)
    assert headers["grpc-status"] == "0"
    assert len(data) == 2 * (5 + int.from_bytes(data[1:5], "big"))


def test_a_client_that_vanishes_frees_the_memory(http2_server: OipServer) -> None:
    message = grpc_message(pool_request(2**19))
    with connected(http2_server.grpc) as raw:
        raw.open(1, INFER)
        for at in range(0, 2**17, 2**14):
            raw.data(1, message[at : at + 2**14])
        hub: Any = http2_server.pipeline.engine
        until = time.monotonic() + 60
        while not hub.memory.used_bytes:
            assert time.monotonic() < until
            time.sleep(0.005)
    wait_until_idle(http2_server)


def test_a_client_that_takes_no_answer_is_cut_off(impatient: OipServer) -> None:
    message = grpc_message(pool_request(2**20))
    with connected(impatient.grpc) as raw:
        raw.open(1, INFER)
        for at in range(0, len(message), 2**14):
            raw.data(1, message[at : at + 2**14], last=at + 2**14 >= len(message))
        # No window is ever opened for the 4 MiB of the answer.
        assert raw.closed()
    wait_until_idle(impatient)


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
