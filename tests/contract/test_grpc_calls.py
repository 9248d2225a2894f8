"""Calls as no client of gRPC makes them: by h2, a frame at a time, right and wrong."""

from __future__ import annotations

import asyncio
import gc
import gzip
import socket
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as client_module
from tritonclient.grpc import service_pb2

from convgrad_service.security import keys
from convgrad_service.security.keys import hash_of, new_key
from tests.support.fake_backends import Blocking, Zeros
from tests.support.h2_client import (
    CHECK,
    INFER,
    LIVE,
    STREAM_INFER,
    WATCH,
    H2Client,
    connected,
    grpc_message,
    pool_request,
    served,
    wait_until_idle,
)
from tests.support.oip_server import OipServer, serving_oip
from tests.support.tree_server import until

INVALID_ARGUMENT, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED = "3", "4", "8"
UNIMPLEMENTED, UNAVAILABLE, UNAUTHENTICATED = "12", "14", "16"


@pytest.fixture(scope="module")
def server() -> Iterator[OipServer]:
    with serving_oip(Zeros(), grpc_max_message_bytes="8MiB", max_header_bytes="16KiB") as running:
        yield running
        assert served(running)
        wait_until_idle(running)


@pytest.fixture
def client(server: OipServer) -> Iterator[H2Client]:
    with connected(server.grpc) as opened:
        yield opened


def test_a_call_by_hand(client: H2Client) -> None:
    found = client.answer(client.open(LIVE, grpc_message(b""), last=True))
    assert found.headers["content-type"] == "application/grpc"
    assert found.status == "0"
    assert found.data == grpc_message(b"\x08\x01")


def test_a_large_message_in_small_frames(client: H2Client) -> None:
    message = grpc_message(pool_request(2**20))
    stream = client.open(INFER)
    for at in range(0, len(message), 10_000):
        client.data(stream, message[at : at + 10_000], last=at + 10_000 >= len(message))
    found = client.answer(stream)
    assert found.status == "0"
    assert len(found.data) > 2**22


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_compressed_messages(server: OipServer, encoding: str) -> None:
    array = np.ones((1, 1, 64, 64), np.float32)
    tensor = client_module.InferInput("input", array.shape, "FP32").set_data_from_numpy(array)
    with client_module.InferenceServerClient(server.grpc) as opened:
        result = opened.infer(
            "maxpool2d_fwd",
            [tensor],
            parameters={"kernel_size": 2},
            compression_algorithm=encoding,
        )
    assert result.as_numpy("output").shape == (1, 1, 32, 32)


@pytest.mark.parametrize("path", [INFER, STREAM_INFER])
@pytest.mark.parametrize(
    ("encoding", "body", "status"),
    [
        ("gzip", b"not gzip", INVALID_ARGUMENT),
        ("deflate", zlib.compress(bytes(1000))[:-4], INVALID_ARGUMENT),
        ("gzip", gzip.compress(b"") + b"more", INVALID_ARGUMENT),
        ("gzip", gzip.compress(b"")[:2] + b"\xff" * 20, INVALID_ARGUMENT),
        # What it would become is over the limit: it is not inflated further than that.
        ("deflate", zlib.compress(bytes(64 * 2**20)), RESOURCE_EXHAUSTED),
    ],
)
def test_compressed_messages_that_cannot_be_read(
    client: H2Client, path: str, encoding: str, body: bytes, status: str
) -> None:
    message = grpc_message(body, compressed=True)
    stream = client.open(path, message, last=True, more=[("grpc-encoding", encoding)])
    found = client.answer(stream)
    if path == STREAM_INFER:
        codes = {
            INVALID_ARGUMENT: b"(malformed-request)",
            RESOURCE_EXHAUSTED: b"(payload-too-large)",
        }
        assert found.status == "0"
        assert codes[status] in found.data
    else:
        assert found.status == status, found.headers


@pytest.mark.parametrize("path", [INFER, STREAM_INFER, CHECK])
def test_unknown_encodings_are_refused(client: H2Client, path: str) -> None:
    message = grpc_message(b"", compressed=True)
    stream = client.open(path, message, last=True, more=[("grpc-encoding", "snappy")])
    # The specification wants UNIMPLEMENTED; grpcio 1.85 says INTERNAL.
    assert client.answer(stream).status in (UNIMPLEMENTED, "13")


def test_a_compressed_health_check_is_small(client: H2Client) -> None:
    for size, status in ((0, "0"), (2**20, RESOURCE_EXHAUSTED)):
        message = grpc_message(gzip.compress(bytes(size)), compressed=True)
        stream = client.open(CHECK, message, last=True, more=[("grpc-encoding", "gzip")])
        assert client.answer(stream).status == status


@pytest.mark.parametrize("path", [INFER, STREAM_INFER, CHECK])
def test_a_message_over_the_limit_is_refused_before_it_comes(client: H2Client, path: str) -> None:
    stream = client.open(path, b"\0" + (2**32 - 1).to_bytes(4, "big"))
    found = client.answer(stream)
    assert found.status == RESOURCE_EXHAUSTED
    assert "larger than max (4294967295 vs. 8388608)" in found.headers["grpc-message"]


@pytest.mark.parametrize("path", [INFER, CHECK])
@pytest.mark.parametrize("last", [True, False])
def test_a_second_message_of_a_unary_call_is_not_read(
    client: H2Client, path: str, last: bool
) -> None:
    body = pool_request() if path == INFER else b""
    stream = client.open(path, 2 * grpc_message(body), last=last)
    assert client.answer(stream).status == "0"


@pytest.mark.parametrize("body", [b"\n", b"\n\x01", b"\n\xff", b"\n\x80", b"\x1a", b"\x0a\x05ab"])
def test_requests_cut_off_anywhere(server: OipServer, body: bytes) -> None:
    with grpc.insecure_channel(server.grpc) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(INFER)(body)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        (answer,) = channel.stream_stream(STREAM_INFER)(iter([body]))
        response = service_pb2.ModelStreamInferResponse.FromString(answer)
        assert "(malformed-request)" in response.error_message


CUT = [b"\0\0", b"\0\0\0\0\x09", grpc_message(pool_request(2**16))[:9000]]


@pytest.mark.parametrize("cut", CUT)
def test_a_call_that_ends_within_its_message(client: H2Client, cut: bytes) -> None:
    found = client.answer(client.open(INFER, cut, last=True))
    assert found.status == INVALID_ARGUMENT
    assert found.headers["convgrad-code"] == "malformed-request"


@pytest.mark.parametrize("cut", CUT)
def test_a_stream_that_ends_within_a_message(client: H2Client, cut: bytes) -> None:
    """To grpcio it ends there: what came whole is answered, and the rest is nothing."""
    whole = grpc_message(pool_request())
    found = client.answer(client.open(STREAM_INFER, whole + cut, last=True))
    assert found.status == "0"
    assert len(found.data) == 5 + int.from_bytes(found.data[1:5], "big")


def test_a_call_without_a_message(client: H2Client) -> None:
    found = client.answer(client.open(INFER, last=True))
    assert found.status == INVALID_ARGUMENT
    assert found.headers["convgrad-code"] == "malformed-request"


@pytest.mark.parametrize("path", [WATCH, INFER, STREAM_INFER])
def test_a_deadline_ends_every_method(client: H2Client, path: str) -> None:
    message = grpc_message(b"") if path == WATCH else b""
    stream = client.open(path, message, last=path == WATCH, more=[("grpc-timeout", "300m")])
    began_s = time.monotonic()
    found = client.answer(stream)
    assert time.monotonic() - began_s > 0.25
    assert found.status == DEADLINE_EXCEEDED or found.reset is not None


def test_a_stream_may_be_silent_between_its_messages() -> None:
    with (
        serving_oip(Zeros(), body_idle_timeout_s=0.2, grpc_message_permits=1) as server,
        connected(server.grpc) as client,
    ):
        stream = client.open(STREAM_INFER, grpc_message(pool_request()))
        time.sleep(0.7)
        client.data(stream, grpc_message(pool_request()), last=True)
        found = client.answer(stream)
        assert found.status == "0"
        assert len(found.data) == 2 * (5 + int.from_bytes(found.data[1:5], "big"))


def test_a_revoked_key_ends_its_open_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "_LOOK_S", 0.0)
    file, key = tmp_path / "keys", new_key()
    file.write_text(f"ada:{hash_of(key)}\n")
    with (
        serving_oip(Zeros(), api_keys=file) as server,
        connected(server.grpc) as client,
    ):
        authorization = [("authorization", f"Bearer {key}")]
        stream = client.open(STREAM_INFER, grpc_message(pool_request()), more=authorization)
        client.until(lambda: bool(client.answers[stream].data))
        file.write_text("")
        client.data(stream, grpc_message(pool_request()))
        found = client.answer(stream)
        assert found.status == UNAUTHENTICATED
        assert found.headers["convgrad-code"] == "unauthenticated"
        answered = 5 + int.from_bytes(found.data[1:5], "big")
        assert len(found.data) == answered


def test_keys_and_limits_are_held_against_the_metadata_alone(tmp_path: Path) -> None:
    """The call is answered although its message never arrives."""
    file, key = tmp_path / "keys", new_key()
    file.write_text(f"ada:{hash_of(key)} max_inflight=1\n")
    backend = Blocking()
    with (
        serving_oip(backend, api_keys=file, max_queue=1) as server,
        connected(server.grpc) as client,
    ):
        assert client.answer(client.open(INFER)).status == UNAUTHENTICATED
        authorization = [("authorization", f"Bearer {key}")]
        first = client.open(INFER, grpc_message(pool_request()), last=True, more=authorization)
        assert backend.started.acquire(timeout=60)
        found = client.answer(client.open(INFER, more=authorization))
        assert found.status == UNAVAILABLE
        assert "has 1 requests in flight" in found.headers["grpc-message"]
        backend.release.set()
        assert client.answer(first).status == "0"


def test_a_client_that_vanishes_frees_the_memory() -> None:
    backend = Blocking()
    with serving_oip(backend, compute_slots=1) as server:
        with connected(server.grpc) as client:
            client.open(INFER, grpc_message(pool_request()), last=True)
            assert backend.started.acquire(timeout=60)
        assert backend.ended.acquire(timeout=60)
        assert backend.cancelled == 1
        wait_until_idle(server)


def test_callers_that_leave_while_they_are_answered_are_not_logged(
    server: OipServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Their answers cannot be written, of which asyncio would log a traceback each."""
    body = pool_request()
    with grpc.insecure_channel(server.grpc) as channel:
        stream = channel.stream_stream(STREAM_INFER)
        for _ in range(200):
            answers = stream(iter([body] * 3), timeout=60)
            next(answers)
            answers.cancel()
        channel.unary_unary(INFER)(body)
    gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio"]


def test_draining_finishes_what_is_served_and_refuses_what_is_new() -> None:
    backend = Blocking()
    with serving_oip(backend) as server, grpc.insecure_channel(server.grpc) as channel:
        infer = channel.unary_unary(INFER)
        running = infer.future(pool_request())
        assert backend.started.acquire(timeout=60)
        stopping = asyncio.run_coroutine_threadsafe(server.grpc_server.stop(60), server.loop)
        until(lambda: not _accepts(server.grpc))
        with pytest.raises(grpc.RpcError) as caught:
            infer(pool_request())
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert not running.done()
        backend.release.set()
        assert running.result(60)
        stopping.result(60)


def _accepts(address: str) -> bool:
    host, port = address.split(":")
    try:
        socket.create_connection((host, int(port)), 60).close()
    except ConnectionRefusedError:
        return False
    return True


def test_requests_that_are_no_calls(server: OipServer) -> None:
    with connected(server.grpc) as client:
        found = client.answer(client.open("/nowhere/Nothing", last=True))
        assert found.status == UNIMPLEMENTED
        assert found.headers["convgrad-code"] == "unsupported-problem"
    until(lambda: served(server))
