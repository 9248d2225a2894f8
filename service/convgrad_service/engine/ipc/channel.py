"""Messages between two processes of a server, in order, over a socket pair; and those to workers.

Messages are pickled, which is safe because both ends run this code and client data is never
unpickled. Request bodies do not travel here; they are in the arena.
"""

from __future__ import annotations

import asyncio
import pickle
import select
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from convgrad.errors import ServiceError
from convgrad_service.engine.shm.registry import RegionSlice

_LENGTH_BYTES = 4
_READ_BYTES = 64 * 1024
MAX_INTERNED = 256
MAX_MISSED = 8
"""Pings in a row that a process may leave unanswered. They are counted, not timed: if this process
was the one that stalled, it reads the waiting answers before it sends the next ping."""

Interned = tuple[int, bytes | None]
"""The number of an interned text, and the text itself if the other end does not have it yet."""

NewRegion = tuple[int, bytes | None, int]
"""A region to be opened: its number, and what `RegionRegistry.extent` returns."""


def _frame(message: Any) -> bytes:
    text = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


class Channel(asyncio.Protocol):
    """An end on an event loop: ``received`` is called for each message, ``lost`` at the end."""

    def __init__(self, received: Callable[[Any], None], lost: Callable[[], None]) -> None:
        self._received, self._lost = received, lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._bytes = b""
        self._outgoing: list[bytes] = []
        self._lazy: list[bytes] = []
        self._flush_scheduled = False

    @classmethod
    async def open(
        cls, end: socket.socket, received: Callable[[Any], None], lost: Callable[[], None]
    ) -> Channel:
        """Open a channel on a socket, which the channel closes."""
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_unix_connection(lambda: cls(received, lost), sock=end)
        return channel

    def send(self, message: Any) -> None:
        """Send a message in one write with all others of this loop iteration.

        Each write wakes the other process. Messages are dropped if the other end is closed.
        """
        self._outgoing.append(_frame(message))
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self.flush)

    def send_lazily(self, message: Any) -> None:
        """Send a message with the next write, whenever that is."""
        self._lazy.append(_frame(message))

    def send_now(self, message: Any) -> None:
        """Send a message immediately."""
        self._outgoing.append(_frame(message))
        self.flush()

    def close(self) -> None:
        """Close the channel after sending what is queued."""
        if self._transport is not None:
            self.flush()
            self._transport.close()

    def flush(self) -> None:
        """Write all queued messages."""
        self._flush_scheduled = False
        frames = self._outgoing + self._lazy
        self._outgoing, self._lazy = [], []
        if frames and self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(frames))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it

    def data_received(self, data: bytes) -> None:
        data = self._bytes + data if self._bytes else data
        at = 0
        while len(data) - at >= _LENGTH_BYTES:
            end = at + _LENGTH_BYTES + int.from_bytes(data[at : at + _LENGTH_BYTES], "little")
            if end > len(data):
                break
            message = pickle.loads(memoryview(data)[at + _LENGTH_BYTES : end])  # noqa: S301
            at = end
            self._received(message)
        self._bytes = data[at:]

    def connection_lost(self, error: Exception | None) -> None:
        self._lost()


class Pipe:
    """A blocking end for threads: several may send, one at a time may receive."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._readable = select.poll()
        self._readable.register(self._socket, select.POLLIN)
        self._bytes = b""
        self._sending = threading.Lock()

    def send(self, message: Any) -> None:
        """Send a message; raises OSError if the other end is closed."""
        framed = _frame(message)
        with self._sending:
            self._socket.sendall(framed)

    def receive(self) -> Any:
        """Return the next message; raises EOFError if the other end is closed."""
        while True:
            end = _LENGTH_BYTES + int.from_bytes(self._bytes[:_LENGTH_BYTES], "little")
            if len(self._bytes) >= max(end, _LENGTH_BYTES + 1):
                text, self._bytes = self._bytes[_LENGTH_BYTES:end], self._bytes[end:]
                return pickle.loads(text)  # noqa: S301 - from one of our own processes
            try:
                # A thread in `recv` would also be woken whenever the other end has read a message.
                self._readable.poll()
                data = self._socket.recv(_READ_BYTES)
            except OSError as error:
                raise EOFError from error
            if not data:
                raise EOFError
            self._bytes += data

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


class InternTable:
    """The texts that the other end has: the `MAX_INTERNED` most recently used.

    The other end stores each text under its number until a new text replaces it. Messages arrive in
    order, so both ends always agree.
    """

    def __init__(self) -> None:
        self._numbers: OrderedDict[bytes, int] = OrderedDict()

    def intern(self, text: bytes) -> Interned:
        """Return how to send a text in the next message."""
        number = self._numbers.get(text)
        if number is not None:
            self._numbers.move_to_end(text)
            return number, None
        full = len(self._numbers) >= MAX_INTERNED
        number = self._numbers.popitem(last=False)[1] if full else len(self._numbers)
        self._numbers[text] = number
        return number, text


class Ping(NamedTuple):
    """To be answered with a `Pong` at once."""


class Pong(NamedTuple):
    """The process is alive; ``progress`` holds (job number, steps done) of running jobs."""

    progress: tuple[tuple[int, int], ...] = ()


class Heartbeat:
    """Counts the unanswered pings of one process."""

    def __init__(self) -> None:
        self._unanswered = 0

    def count_ping(self) -> bool:
        """Count a ping; return whether too many are unanswered."""
        self._unanswered += 1
        return self._unanswered > MAX_MISSED

    def answered(self) -> None:
        """Reset the count."""
        self._unanswered = 0


class Hello(NamedTuple):
    """The worker is ready to compute ``slots`` jobs at a time.

    ``devices`` is the number of devices of this backend. With ``pins`` the arena's pages are
    registered with the device and must not be returned to the system.
    """

    backend: str
    slots: int
    devices: int
    pins: bool


class RunTask(NamedTuple):
    """One task: a `Job` with its layout interned, or one ``part`` of it.

    It is sent as a plain tuple, and so is its `JobResult`: to find a class by its name would take
    the unpickler longer than the rest of the message.

    The files of ``new_regions`` have been sent before. A ``brief`` task is so short that the thread
    that receives it runs it before any other thread receives the next.
    """

    number: int
    interned: Interned
    base: int
    regions: tuple[RegionSlice, ...]
    part: int | None
    new_regions: Sequence[NewRegion]
    brief: bool


class Cancel(NamedTuple):
    """Stop a task."""

    number: int


class Forget(NamedTuple):
    """Close a region: no job uses it any longer."""

    region: int


class Probe(NamedTuple):
    """Check that a device memory handle can be opened."""

    number: int
    handle: bytes
    size_bytes: int


class ProbeResult(NamedTuple):
    """The reply to `Probe`."""

    number: int
    error: ServiceError | None


class Compiling(NamedTuple):
    """Sent instead of a task's result: its kernels are being compiled; `Compiled` follows."""


class Compiled(NamedTuple):
    """The kernels are compiled and the task can be sent again, or they cannot be compiled."""

    error: BaseException | None
