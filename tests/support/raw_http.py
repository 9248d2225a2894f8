"""HTTP/1.1 requests and answers as bytes on a socket."""

from __future__ import annotations

import json
import socket

import numpy as np
import pytest

from convgrad.wire import safetensors
from tests.support.http_server import JSON, SAFETENSORS

KiB = 1024
MIB = 2**20


def post_head(
    length: int | None,
    *,
    path: str = "/conv_bwd_data",
    content_type: str = JSON,
    more: str = "",
) -> bytes:
    """A request's head; chunked where no length is given."""
    framing = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    return (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {content_type}\r\n"
        f"{framing}\r\n{more}\r\n"
    ).encode()


def read_all(connection: socket.socket) -> bytes:
    """Read until the server closes."""
    received = b""
    while part := connection.recv(65536):
        received += part
    return received


def read_one(connection: socket.socket) -> bytes:
    """Read one answer that has a length, and nothing after it."""
    with connection.makefile("rb", buffering=0) as reader:
        received = b""
        while not received.endswith(b"\r\n\r\n"):
            received += reader.readline() or pytest.fail(f"closed after {received!r}")
        lines = [line.lower().partition(b":") for line in received.splitlines()]
        length = next(int(value) for name, _, value in lines if name == b"content-length")
        end = len(received) + length
        while len(received) < end:
            received += reader.read(end - len(received)) or pytest.fail(f"closed: {received!r}")
    return received


def body_and_sum(seed: int, elements: int = 3 * MIB) -> tuple[bytes, float]:
    """A body for /conv_bwd_data that also holds a tensor it ignores, and the sum of the others."""
    rng = np.random.default_rng(seed)
    tensors = {
        "grad_output": rng.integers(0, 3, (1, 1, elements // 1024, 1024)).astype(np.float32),
        "accumulate": np.ones((1, 1, elements // 1024, 1024), np.float32),
        "weight": rng.integers(0, 3, (1, 1, 1, 1)).astype(np.float32),
    }
    body = b"".join(safetensors.encode(tensors, {"parameters": json.dumps({"beta": 0})}))
    return body, float(tensors["grad_output"].sum() + tensors["weight"].sum())


def safetensors_request(body: bytes, more: str = "") -> bytes:
    """A whole request for /conv_bwd_data."""
    return post_head(len(body), content_type=SAFETENSORS, more=more) + body


# A tiny body that asks for 23 MB of answer, more than any socket's buffers take.
BODY = (
    b'{"input": {"values": [[[[0]]]], "dtype": "float32"}, '
    b'"weight": {"values": [[[[0]]]], "dtype": "float32"}, "padding": 1200}'
)
FOR_A_LARGE_ANSWER = (
    b"POST /conv_fwd HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Accept: %s\r\nContent-Length: %d\r\n\r\n%s" % (SAFETENSORS.encode(), len(BODY), BODY)
)
