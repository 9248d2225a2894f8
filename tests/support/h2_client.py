"""A gRPC client by h2, frame by frame, which does what a test wants, right or wrong."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings
from tritonclient.grpc import service_pb2

from tests.support.oip_server import OipServer

__all__ = [
    "CHECK",
    "INFER",
    "LIVE",
    "STREAM_INFER",
    "WATCH",
    "Answer",
    "H2Client",
    "connected",
    "grpc_message",
    "large_answer",
    "pool_request",
    "served",
    "wait_until_idle",
]

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"
LIVE = "/inference.GRPCInferenceService/ServerLive"
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
Headers = Sequence[tuple[str, str]]


def grpc_message(body: bytes, *, compressed: bool = False) -> bytes:
    """A message with its prefix."""
    return bytes([compressed]) + len(body).to_bytes(4, "big") + body


@dataclass
class Answer:
    """What was received on a stream: headers and trailers together, data, and how it ended."""

    headers: dict[str, str] = field(default_factory=dict)
    data: bytearray = field(default_factory=bytearray)
    ended: bool = False
    reset: int | None = None

    @property
    def status(self) -> str:
        """The call's status; "" as long as there is none."""
        return self.headers.get("grpc-status", "")


class H2Client:
    """One connection. Answers are read while something is waited for, and not before."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self.answers: dict[int, Answer] = {}
        self.gone = False
        # Whether what is read is granted again.
        self.grants = True

    def greet(self, **settings: int) -> None:
        """Send the preface and these settings, by their names in `h2.settings.SettingCodes`."""
        codes = {h2.settings.SettingCodes[name]: value for name, value in settings.items()}
        self.h2.local_settings.update(codes)
        self.h2.initiate_connection()
        self.flush()

    def flush(self) -> None:
        """Send, unless the server has closed: what it said before that is there to be read."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(self.h2.data_to_send())

    def open(self, path: str, data: bytes = b"", *, last: bool = False, more: Headers = ()) -> int:
        """Begin a call, with its first data in the same packet where there is any; its stream."""
        stream = self.h2.get_next_available_stream_id()
        headers = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", "localhost"),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
            *more,
        ]
        self.answers[stream] = Answer()
        self.h2.send_headers(stream, headers, end_stream=last and not data)
        if data:
            self.data(stream, data, last=last)
        self.flush()
        return stream

    def data(self, stream: int, data: bytes, *, last: bool = False) -> None:
        """Send data as far as the windows allow, and go on as they open."""
        view = memoryview(data)
        while view and not self.answers[stream].ended:
            size = min(
                len(view),
                self.h2.local_flow_control_window(stream),
                self.h2.max_outbound_frame_size,
                2**20,
            )
            if size == 0:
                self.flush()
                if not self.receive():
                    return
                continue
            self.h2.send_data(stream, bytes(view[:size]))
            view = view[size:]
            self.flush()
        if last and not self.answers[stream].ended:
            self.h2.end_stream(stream)
            self.flush()

    def receive(self) -> bool:
        """Read what there is, waiting for some; whether the connection is still there."""
        try:
            part = self.socket.recv(2**20)
        except ConnectionResetError:
            part = b""
        if not part:
            self.gone = True
            return False
        for event in self.h2.receive_data(part):
            self._take(event)
        self.flush()
        return True

    def answer(self, stream: int) -> Answer:
        """All of a stream's answer; waits for its end, or the connection's."""
        found = self.answers[stream]
        while not found.ended and self.receive():
            pass
        return found

    def until(self, condition: Callable[[], bool]) -> None:
        """Read until it is true."""
        while not condition():
            assert self.receive(), "the server has closed"

    def closed(self) -> bool:
        """Whether the server closes the connection; waits for it."""
        while self.receive():
            pass
        return True

    def _take(self, event: Any) -> None:
        found = self.answers.get(getattr(event, "stream_id", None) or 0, Answer())
        if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
            found.headers |= dict(event.headers or ())
        elif isinstance(event, h2.events.DataReceived):
            found.data += event.data or b""
            if self.grants and event.flow_controlled_length:
                with suppress(h2.exceptions.StreamClosedError):
                    self.h2.acknowledge_received_data(
                        event.flow_controlled_length, event.stream_id or 0
                    )
        elif isinstance(event, h2.events.StreamReset):
            found.reset, found.ended = int(event.error_code or 0), True
        elif isinstance(event, h2.events.StreamEnded):
            found.ended = True


@contextmanager
def connected(address: str, *, source: str | None = None, **settings: int) -> Iterator[H2Client]:
    """A connection to a server, past the preface; from this address of ours."""
    host, port = address.split(":")
    own = None if source is None else (source, 0)
    with socket.create_connection((host, int(port)), 60, own) as connection:
        client = H2Client(connection)
        client.greet(**settings)
        yield client


def pool_request(elements: int = 16) -> bytes:
    """A ModelInferRequest whose tensor has ``elements`` times 4 bytes; its answer has as many."""
    made = service_pb2.ModelInferRequest(model_name="maxpool2d_fwd")
    made.inputs.add(name="input", datatype="FP32", shape=[1, 1, 4, elements // 4])
    made.parameters["kernel_size"].int64_param = 1
    made.raw_input_contents.append(bytes(4 * elements))
    body: bytes = made.SerializeToString()
    return body


def large_answer() -> bytes:
    """A request of some bytes whose answer has 23 MB."""
    made = service_pb2.ModelInferRequest(model_name="conv_fwd")
    for name in ("input", "weight"):
        made.inputs.add(name=name, datatype="FP32", shape=[1, 1, 1, 1])
        made.raw_input_contents.append(bytes(4))
    made.parameters["padding"].int64_param = 1200
    body: bytes = made.SerializeToString()
    return body


def served(server: OipServer) -> bool:
    """Whether a new connection is."""
    with connected(server.grpc) as client:
        return client.answer(client.open(LIVE, grpc_message(b""), last=True)).status == "0"


def wait_until_idle(server: OipServer) -> None:
    """Until no request holds memory of the arena."""
    hub: Any = server.pipeline.engine
    until = time.monotonic() + 60
    while hub.memory.used_bytes:
        assert time.monotonic() < until
        time.sleep(0.01)
