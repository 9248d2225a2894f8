"""An HTTP/2 client that does what a test tells it to, right or wrong."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import hpack
from tritonclient.grpc import service_pb2

from convgrad_service.grpc_api.http2.frames import (
    PREFACE,
    Kind,
    frame,
    header_block,
    settings,
    unpacked_header,
)
from tests.support.oip_server import OipServer

__all__ = [
    "CALL_HEADERS",
    "INFER",
    "Http2Client",
    "connected",
    "grpc_message",
    "pool_request",
    "served",
    "wait_until_idle",
]

INFER = b"/inference.GRPCInferenceService/ModelInfer"
CALL_HEADERS = (
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/inference.GRPCInferenceService/ServerLive"),
    (b":authority", b"localhost"),
    (b"content-type", b"application/grpc"),
    (b"te", b"trailers"),
)


def grpc_message(body: bytes, *, compressed: bool = False) -> bytes:
    """A message with its prefix."""
    return bytes([compressed]) + len(body).to_bytes(4, "big") + body


class Http2Client:
    """One connection; frames in and out."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._read = b""
        self._decoder = hpack.Decoder()

    def send(self, data: bytes) -> None:
        """Send, unless the server has closed: what it said before that is there to be read."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(data)

    def open(
        self, stream: int, path: bytes | None = None, data: bytes = b"", *, last: bool = False
    ) -> None:
        """Begin a call, with its first data in the same packet where there is any."""
        headers = [
            (name, path if path is not None and name == b":path" else value)
            for name, value in CALL_HEADERS
        ]
        first = frame(Kind.DATA, 0, stream, data) if data else b""
        self.send(header_block(stream, headers, 16_384, last=last) + first)

    def data(self, stream: int, data: bytes, *, last: bool = False) -> None:
        self.send(frame(Kind.DATA, int(last), stream, data))

    def frames(self) -> Iterator[tuple[int, int, int, bytes]]:
        """Kind, flags, stream and payload of every frame until the server closes."""
        while True:
            header = self._take(9)
            if header is None:
                return
            length, kind, flags, stream = unpacked_header(header)
            payload = self._take(length)
            if payload is None:
                return
            yield kind, flags, stream, payload

    def answer(self, stream: int) -> tuple[dict[str, str], bytes]:
        """All headers and trailers of a stream's answer, and its data."""
        headers: dict[str, str] = {}
        data = b""
        for kind, flags, number, payload in self.frames():
            if kind == Kind.HEADERS:
                found = self._decoder.decode(payload)
                if number == stream:
                    headers |= {str(name): str(value) for name, value in found}
                    if flags & 1:
                        return headers, data
            elif kind == Kind.DATA and number == stream:
                data += payload
            elif kind == Kind.GOAWAY:
                raise ConnectionError(payload)
        raise ConnectionError("closed")

    def goaway(self) -> tuple[int, str]:
        """Why the server ends the connection."""
        for kind, _, _, payload in self.frames():
            if kind == Kind.GOAWAY:
                return struct.unpack(">L", payload[4:8])[0], payload[8:].decode()
        raise ConnectionError("closed without GOAWAY")

    def reset(self, stream: int) -> int:
        """Why the server resets a stream."""
        for kind, _, number, payload in self.frames():
            if kind == Kind.RST_STREAM and number == stream:
                return int.from_bytes(payload, "big")
        raise ConnectionError("closed without RST_STREAM")

    def closed(self) -> bool:
        """Whether the server closes the connection; waits for it."""
        for _ in self.frames():
            pass
        return True

    def _take(self, size: int) -> bytes | None:
        while len(self._read) < size:
            try:
                part = self._socket.recv(65536)
            except ConnectionResetError:
                return None
            if not part:
                return None
            self._read += part
        taken, self._read = self._read[:size], self._read[size:]
        return taken


@contextmanager
def connected(address: str, *, greet: bool = True) -> Iterator[Http2Client]:
    """A connection to a server, past the preface unless told otherwise."""
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), 60) as connection:
        client = Http2Client(connection)
        if greet:
            client.send(PREFACE + settings([]))
        yield client


def pool_request(elements: int = 16) -> bytes:
    """A ModelInferRequest whose tensor has ``elements`` times 4 bytes."""
    made = service_pb2.ModelInferRequest(model_name="maxpool2d_fwd")
    made.inputs.add(name="input", datatype="FP32", shape=[1, 1, 4, elements // 4])
    made.parameters["kernel_size"].int64_param = 1
    made.raw_input_contents.append(bytes(4 * elements))
    body: bytes = made.SerializeToString()
    return body


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
    hub: Any = server.pipeline.engine
    until = time.monotonic() + 60
    while hub.memory.used_bytes:
        assert time.monotonic() < until
        time.sleep(0.01)
