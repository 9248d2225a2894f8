"""Sequences of HTTP/2 frames, right and wrong, cut and spoilt: 200 here, 10,000 by `make fuzz`.

After all of them the gRPC server serves, holds no memory and has logged no failure of its own.
"""

from __future__ import annotations

import contextlib
import random
import socket
import time

import pytest

from convgrad_service.grpc_api.http2.frames import (
    PREFACE,
    Error,
    Kind,
    frame,
    header_block,
    rst_stream,
    settings,
    window_update,
)
from tests.support.fake_backends import Zeros
from tests.support.http2_client import (
    CALL_HEADERS,
    INFER,
    grpc_message,
    pool_request,
    served,
    wait_until_idle,
)
from tests.support.oip_server import serving_oip

_MESSAGES = [grpc_message(pool_request()), grpc_message(pool_request(2**15))]


def conversation(rng: random.Random) -> bytes:
    """What one client sends: mostly calls, some of them broken in some way."""
    sent, stream = PREFACE + settings([]), 1
    for _ in range(rng.randint(1, 12)):
        match rng.choice(("headers", "data", "data", "data", "any", "window", "reset", "next")):
            case "headers":
                path = INFER if rng.random() < 0.7 else b"/nowhere"
                headers = [(name, path if name == b":path" else it) for name, it in CALL_HEADERS]
                sent += header_block(stream, headers, rng.choice((30, 16_384)))
            case "data":
                message = rng.choice(_MESSAGES)
                start = rng.randrange(len(message)) if rng.random() < 0.3 else 0
                part = message[start:][: rng.choice((5, 100, 16_384, 70_000))]
                sent += frame(Kind.DATA, rng.choice((0, 0, 1, 8, 9)), stream, part)
            case "any":
                payload = rng.randbytes(rng.choice((0, 4, 5, 6, 8, 30)))
                number = rng.choice((0, stream, stream + 2))
                sent += frame(rng.choice(list(Kind)), rng.randrange(256), number, payload)
            case "window":
                sent += window_update(rng.choice((0, stream)), rng.choice((1, 1000, 10**6)))
            case "reset":
                sent += rst_stream(stream, Error.CANCEL)
            case "next":
                stream += 2
    if rng.random() < 0.3:
        spoilt = bytearray(sent)
        for _ in range(rng.randint(1, 5)):
            spoilt[rng.randrange(len(spoilt))] = rng.randrange(256)
        sent = bytes(spoilt)
    return sent


def test_no_frames_do_harm(
    request: pytest.FixtureRequest, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    examples = request.config.getoption("--fuzz-examples", default=200)
    rng = random.Random(seed)
    with serving_oip(Zeros(), body_idle_timeout_s=0.3, header_timeout_s=0.3) as server:
        host, port = server.grpc.split(":")
        for _ in range(examples):
            with (
                contextlib.suppress(ConnectionError, TimeoutError),
                socket.create_connection((host, int(port)), 60) as client,
            ):
                client.sendall(conversation(rng))
                if rng.random() < 0.8:  # the others leave without a word
                    client.shutdown(socket.SHUT_WR)
                    while client.recv(65_536):
                        pass
        until = time.monotonic() + 60
        while not served(server):
            assert time.monotonic() < until, f"seed {seed}"
        wait_until_idle(server)
    failures = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert not failures, f"seed {seed}: {failures[:3]}"
