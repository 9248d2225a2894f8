"""Reads and writes of a connection that bypass uvicorn's buffers.

A request's use of its connection is a `Connection`, our extension of ASGI: the rest of a long body
is received where it belongs (`ReceiveInto`), and writes may wait until they have been sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

CONNECTION = "convgrad.connection"
"""The key of an ASGI scope under which our protocol offers the exchange's `Connection`."""

# Size of one read: more than a socket's buffer gains nothing, and would delay the event loop.
_READ_BYTES = 2**20
# Longer parts of an answer are not copied.
_JOINED_BYTES = 64 * 1024
_INTERIM = b"HTTP/1.1 1"  # 100 Continue: nothing follows until the client sends its body


class Connection:
    """One exchange's use of a connection, whose ``protocol`` is a `protocol.GuardedProtocol`.

    Behind any other ASGI server it is missing, and bodies and answers are copied part by part.
    """

    def __init__(self, protocol: Any) -> None:
        self._protocol = protocol
        self._receiving: ReceiveInto | None = None
        self.cycle: RequestResponseCycle | None = None

    def body_left_bytes(self, content_length: int) -> int:
        """Return how much of the body the parser has not seen and `receive_into` may receive."""
        # If the next request has begun, this one's body has been read. TLS copies the data when
        # decrypting it anyway.
        protocol, cycle = self._protocol, self.cycle
        if cycle is None or protocol.cycle is not cycle or protocol.scheme == "https":
            return 0
        if protocol.transport.is_closing():
            return 0  # nothing would arrive, nor would `receive_into` notice
        # After a whole body the parser may hold a part of the next head.
        is_parsed = cycle.more_body and self._receiving is None
        return content_length - int(protocol.parts_bytes) if is_parsed else 0

    def receive_into(self, targets: Sequence[memoryview | int]) -> ReceiveInto:
        """Receive the rest of the current body, whose length is known, into ``targets``."""
        protocol, cycle = self._protocol, self._protocol.cycle
        receiving = self._receiving = ReceiveInto(targets, protocol)
        ahead, cycle.body = cycle.body, bytearray()
        protocol.switch_protocol(receiving)
        receiving.take(ahead)
        return receiving

    def stop_receiving(self) -> None:
        """Stop writing to the targets of `receive_into`: drop the rest of the body."""
        assert self._receiving is not None  # noqa: S101
        # Not to the parser, which has not seen what was received in place.
        protocol, left_bytes = self._protocol, self._receiving.left_bytes
        protocol.switch_protocol(ReceiveInto([left_bytes], protocol))

    def watch(self, on_disconnect: Callable[[], None] | None) -> None:
        """Call ``on_disconnect`` if the client closes the connection; None stops that."""
        self._protocol.on_disconnect, self._protocol.watching = on_disconnect, self.cycle
        if on_disconnect is not None and self._protocol.transport.is_closing():
            on_disconnect()


def connection_of(scope: Scope) -> Connection | None:
    """Return the connection of an exchange if the server offers one and TLS is off."""
    return None if scope.get("scheme") == "https" else scope.get(CONNECTION)


class Forwarding(asyncio.BufferedProtocol):
    """Passes all events but received data to ``behind``, the connection's own protocol."""

    def __init__(self, behind: Any) -> None:
        self._behind = behind

    def eof_received(self) -> None:
        self._behind.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._behind.connection_lost(exc)

    def pause_writing(self) -> None:
        self._behind.pause_writing()

    def resume_writing(self) -> None:
        self._behind.resume_writing()


class ReadInParts(Forwarding):
    """Passes data on in parts of a limited size; uvloop alone would read up to 256 KB at a time.

    The part of a body that arrives together with the head is copied twice, and is held in memory
    while the request waits to be admitted.
    """

    # Shared by all connections: the data is copied before anything else is read.
    _shared = memoryview(bytearray(64 * 1024))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._shared

    def buffer_updated(self, nbytes: int) -> None:
        self._behind.data_received(bytes(self._shared[:nbytes]))


class ReceiveInto(Forwarding):
    """Fills ``targets`` in order; a number is a count of bytes to drop.

    ``filled`` becomes True once they are full, False if the connection ended before. ``behind`` is
    the connection's own protocol, which gets all other events, and its parser a new request.
    """

    def __init__(self, targets: Sequence[memoryview | int], behind: Any) -> None:
        self.filled: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.received_bytes = 0
        self.last_s = time.monotonic()
        self.left_bytes = sum(each if isinstance(each, int) else len(each) for each in targets)
        super().__init__(behind)
        self._rest = self._pieces(targets)
        self._piece = next(self._rest)
        self._at = 0

    def take(self, data: bytes | bytearray | memoryview) -> None:
        """Copy bytes that were received earlier to the targets."""
        view = memoryview(data)
        while view:
            place = self._piece[self._at :]
            part = view[: len(place)]
            place[: len(part)] = part
            self._advance(len(part))
            view = view[len(part) :]

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._piece[self._at : self._at + _READ_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        self.last_s = time.monotonic()
        self._advance(nbytes)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.filled.done():
            self.filled.set_result(False)
        super().connection_lost(exc)

    def _advance(self, size: int) -> None:
        self.received_bytes += size
        self.left_bytes -= size
        self._at += size
        if self.left_bytes == 0:
            self.filled.set_result(True)
            self._behind.restart_parser()
        elif self._at == len(self._piece):
            self._piece = next(self._rest)
            self._at = 0

    @staticmethod
    def _pieces(targets: Sequence[memoryview | int]) -> Iterator[memoryview]:
        for target in targets:
            if not isinstance(target, int):
                if target:
                    yield target
                continue
            scratch: Any = memoryview(bytearray(min(target, _READ_BYTES)))
            for start in range(0, target, _READ_BYTES):
                yield scratch[: target - start]


class CoalescedWriter:
    """The part of a transport that uvicorn's cycle of one answer uses."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head: bytes | None = None
        self._has_head = False

    def write(self, data: bytes | memoryview) -> None:
        """Write; hold an answer's head back until the next write."""
        if self._head is not None:
            head, self._head = self._head, None
            if len(data) <= _JOINED_BYTES:
                data = b"".join((head, data))
            else:
                self._transport.write(head)
        elif not self._has_head and bytes(data[: len(_INTERIM)]) != _INTERIM:
            self._has_head = True
            self._head = bytes(data)
            return
        self._transport.write(data)

    def close(self) -> None:
        """Close the transport, after flushing."""
        if self._head is not None:
            self._transport.write(self._head)
            self._head = None
        self._transport.close()

    def is_closing(self) -> bool:
        """See `asyncio.BaseTransport`."""
        return self._transport.is_closing()
