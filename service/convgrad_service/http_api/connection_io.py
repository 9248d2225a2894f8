"""Reads and writes of a connection, past the HTTP parser and all other buffers.

Data is read in parts for the parser, or the rest of a body straight to its destination: its length
is known from the head. An answer's head and the start of its body are sent in one write, thus in
one packet.
"""

from __future__ import annotations

import asyncio
import time
from asyncio import Transport
from collections.abc import Callable, Iterator, Sequence
from typing import Any

__all__ = ["CoalescedWriter", "ReadInParts", "ReceiveInto"]

# Size of one read: more than a socket's buffer gains nothing, and would delay the event loop.
_READ_BYTES = 2**20
# Longer parts are not copied.
_JOINED_BYTES = 64 * 1024
_INTERIM = b"HTTP/1.1 1"  # 100 Continue: nothing follows until the client sends its body


class _Forwarding(asyncio.BufferedProtocol):
    """Passes all events but received data to ``behind``, the connection's own protocol."""

    def __init__(self, behind: asyncio.Protocol) -> None:
        self._behind = behind

    def eof_received(self) -> bool | None:
        """See `asyncio.BufferedProtocol`."""
        return self._behind.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.BaseProtocol`."""
        self._behind.connection_lost(exc)

    def pause_writing(self) -> None:
        """See `asyncio.BaseProtocol`."""
        self._behind.pause_writing()

    def resume_writing(self) -> None:
        """See `asyncio.BaseProtocol`."""
        self._behind.resume_writing()


class ReadInParts(_Forwarding):
    """Passes data on in parts of a limited size; uvloop alone would read up to 256 KB at a time.

    The part of a body that arrives together with the head is copied twice, and is held in memory
    while the request waits to be admitted.
    """

    # Shared by all connections: the data is copied before anything else is read.
    _shared = memoryview(bytearray(64 * 1024))

    def get_buffer(self, sizehint: int) -> memoryview:
        """See `asyncio.BufferedProtocol`."""
        return self._shared

    def buffer_updated(self, nbytes: int) -> None:
        """See `asyncio.BufferedProtocol`."""
        self._behind.data_received(bytes(self._shared[:nbytes]))


class ReceiveInto(_Forwarding):
    """Fills ``targets`` in order; a number is a count of bytes to drop.

    ``filled`` becomes True once they are full, False if the connection ended before. ``behind`` is
    the connection's own protocol, which gets all other events; ``full`` is called to restore it.
    """

    def __init__(
        self,
        targets: Sequence[memoryview | int],
        behind: asyncio.Protocol,
        full: Callable[[], None],
    ) -> None:
        self.filled: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.received_bytes = 0
        self.last_s = time.monotonic()
        self.left_bytes = sum(_size(target) for target in targets)
        super().__init__(behind)
        self._full = full
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
        """See `asyncio.BufferedProtocol`."""
        return self._piece[self._at : self._at + _READ_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        """See `asyncio.BufferedProtocol`."""
        self.last_s = time.monotonic()
        self._advance(nbytes)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.BaseProtocol`."""
        if not self.filled.done():
            self.filled.set_result(False)
        super().connection_lost(exc)

    def _advance(self, size: int) -> None:
        self.received_bytes += size
        self.left_bytes -= size
        self._at += size
        if self.left_bytes == 0:
            self.filled.set_result(True)
            self._full()
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


def _size(target: memoryview | int) -> int:
    return target if isinstance(target, int) else len(target)


class CoalescedWriter:
    """The part of a transport that uvicorn's cycle of one answer uses."""

    def __init__(self, transport: Transport) -> None:
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
