"""Small messages between two processes of a server, in order, over a pair of sockets.

Messages are pickled: both ends run the same code, and nothing that a client sends is ever read as
one. Bodies never travel here; they lie in the arena.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import threading
from collections.abc import Callable
from typing import Any, cast

__all__ = ["Channel", "Kinds", "Pipe"]

_LENGTH_BYTES = 4
_READ_BYTES = 64 * 1024


def _framed(message: Any) -> bytes:
    text = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


class Kinds:
    """Named tuples by number: a class's name in every message takes longer than the message."""

    def __init__(self, *kinds: type[tuple[Any, ...]]) -> None:
        self._kinds = kinds
        self._numbers = {kind: number for number, kind in enumerate(kinds)}

    def plain(self, message: Any) -> Any:
        """What is sent for a message."""
        number = self._numbers.get(type(message))
        return message if number is None else (number, *message)

    def message(self, plain: Any) -> Any:
        """The message that this was sent for."""
        if self._kinds and type(plain) is tuple:
            return self._kinds[plain[0]](*plain[1:])
        return plain


class Channel(asyncio.Protocol):
    """One end on an event loop: ``received`` is called for each message, ``lost`` once."""

    def __init__(
        self, received: Callable[[Any], None], lost: Callable[[], None], kinds: Kinds
    ) -> None:
        self._received, self._lost, self._kinds = received, lost, kinds
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._bytes = b""
        self._to_send: list[bytes] = []
        self._behind: list[bytes] = []
        self._to_send_soon = False

    @classmethod
    async def open(
        cls,
        end: socket.socket,
        received: Callable[[Any], None],
        lost: Callable[[], None],
        kinds: Kinds | None = None,
    ) -> Channel:
        """The channel on a socket, which it closes in the end."""
        loop = asyncio.get_running_loop()
        known = kinds or Kinds()
        _, channel = await loop.create_unix_connection(lambda: cls(received, lost, known), sock=end)
        return channel

    def tell(self, message: Any, *, soon: bool = True) -> None:
        """Send a message; it is dropped if the other end has gone, which ``lost`` says.

        What is told in one turn of the loop leaves in one write: each wakes the other process. A
        message that is not for ``soon`` waits for one that is, and leaves behind it.
        """
        framed = _framed(self._kinds.plain(message))
        if not soon:
            self._behind.append(framed)
            return
        if not self._to_send_soon:
            self._to_send_soon = True
            self._loop.call_soon(self.flush)
        self._to_send.append(framed)

    def tell_now(self, message: Any) -> None:
        """The same for a message that somebody waits for, in a write of its own."""
        self._to_send.append(_framed(self._kinds.plain(message)))
        self.flush()

    def close(self) -> None:
        """Close it once what was sent has left."""
        if self._transport is not None:
            self.flush()
            self._transport.close()

    def flush(self) -> None:
        """Send what waits to be sent."""
        self._to_send_soon = False
        frames = self._to_send + self._behind
        self._to_send, self._behind = [], []
        if frames and self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(frames))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        data = self._bytes + data if self._bytes else data
        at = 0
        while len(data) - at >= _LENGTH_BYTES:
            end = at + _LENGTH_BYTES + int.from_bytes(data[at : at + _LENGTH_BYTES], "little")
            if end > len(data):
                break
            message = pickle.loads(memoryview(data)[at + _LENGTH_BYTES : end])  # noqa: S301
            at = end
            self._received(self._kinds.message(message))
        self._bytes = data[at:]

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._lost()


class Pipe:
    """One end for threads that wait: any number may send, one at a time receives."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._read = b""  # of messages that have come in part
        self._sending = threading.Lock()

    def send(self, message: Any) -> None:
        """Send a message; raises OSError if the other end has gone."""
        framed = _framed(message)
        with self._sending:
            self._socket.sendall(framed)

    def receive(self) -> Any:
        """The next message; raises EOFError once the other end has gone."""
        while True:
            end = _LENGTH_BYTES + int.from_bytes(self._read[:_LENGTH_BYTES], "little")
            if len(self._read) >= max(end, _LENGTH_BYTES + 1):
                text, self._read = self._read[_LENGTH_BYTES:end], self._read[end:]
                return pickle.loads(text)  # noqa: S301 - from one of our own processes
            try:
                data = self._socket.recv(_READ_BYTES)
            except OSError as error:
                raise EOFError from error
            if not data:
                raise EOFError
            self._read += data

    def close(self) -> None:
        """Close this end."""
        self._socket.close()
