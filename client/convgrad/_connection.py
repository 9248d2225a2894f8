"""HTTP/1.1 over one connection, without copying request or answer bodies.

A general-purpose client spends half a millisecond of interpreter time on a request, longer than a
small problem takes to compute, and copies large bodies. Here the operating system reads the arrays
in place and writes the answer into its final buffer. Nothing here blocks: the methods are
generators that yield what they wait for, so that `Client` can poll and `AsyncClient` can await.
"""

from __future__ import annotations

import select
import socket
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from convgrad._http_errors import GRPC_PORT, MAYBE_TLS
from convgrad._reply import Receiver
from convgrad.errors import ClientError

__all__ = ["AVAILABLE", "READ", "WRITE", "Connection", "Http1Error", "Steps"]

AVAILABLE = hasattr(socket.socket, "sendmsg") and hasattr(select, "poll")
"""Whether this system provides what a `Connection` needs; Windows does not."""

READ = 1
WRITE = 2
T = TypeVar("T")
Steps: TypeAlias = "Generator[int | Receiver, int, T]"
"""Yields READ or READ | WRITE and is sent the events that are ready; or yields the answer's
`Receiver` whenever more data has arrived, and finally when the answer is complete."""

# Pieces of this size are some 15 % faster over loopback than one write of everything.
_SEND_BYTES = 1 << 20
_SEND_BUFFERS = 64  # well under every system's IOV_MAX
_READ_BYTES = 1 << 16
_MAX_HEAD_BYTES = 1 << 16
_END_OF_HEAD = b"\r\n\r\n"


class Http1Error(ClientError):
    """The answer is not HTTP/1.1, or it ended prematurely."""


@dataclass(frozen=True)
class _Head:
    status: int
    headers: Mapping[str, str]
    keep_alive: bool


class Connection:
    """A connected socket and any data read from it beyond the last answer.

    Not thread-safe. After an exception the connection must be closed.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connected
        self._unread = b""
        self.answering = False
        """Whether any byte of the current answer has arrived."""
        self.reusable = False
        """Whether the connection can be used for another request."""
        self.sent_bytes = 0
        """Bytes of the current request's body sent so far."""

    def close(self) -> None:
        self.socket.close()

    def is_stale(self) -> bool:
        """Return whether data arrived while idle, which usually means the connection closed."""
        try:
            return bool(self._unread) or self.socket.recv(1, socket.MSG_PEEK) is not None
        except BlockingIOError:
            return False
        except OSError:
            return True

    def request(
        self,
        head: bytes,
        body: Iterable[memoryview],
        request_id: str,
        check_deadline: Callable[[], object],
    ) -> Steps[None]:
        """Send a request and receive its answer.

        If the server answers before it has the whole body, the rest is not sent.
        ``check_deadline`` is called whenever data has arrived; what it raises propagates.

        Raises
        ------
        OSError, Http1Error
            The connection failed, or the answer is not valid HTTP/1.1.
        """
        self.answering = self.reusable = False
        sent_all, broken = False, None
        self.sent_bytes = -len(head)
        try:
            sent_all = yield from self._send(_Outgoing(head, body))
        except OSError as error:
            # An answer that gives the reason may have arrived before the connection broke.
            broken = error
        try:
            answer = yield from self._read_head()
        except (OSError, Http1Error):
            if broken is not None:
                raise broken from None
            raise
        receiver = Receiver(answer.status, answer.headers, request_id)
        whole = yield from self._read_body(answer, receiver, check_deadline)
        self.reusable = sent_all and whole and answer.keep_alive
        yield receiver

    def _send(self, outgoing: _Outgoing) -> Steps[bool]:
        while piece := outgoing.piece():
            try:
                sent = self.socket.sendmsg(piece)
                outgoing.drop(sent)
                self.sent_bytes += sent
            except BlockingIOError:
                if (yield READ | WRITE) & READ:
                    return False
        return True

    def _read_head(self) -> Steps[_Head]:
        data = self._unread
        if not data:
            yield READ  # the server cannot have answered yet, so do not try to read
        while True:
            head, found, rest = data.partition(_END_OF_HEAD)
            if found:
                parsed = _parse_head(head)
                if parsed.status >= 200:
                    self._unread = rest
                    return parsed
                data = rest  # a 1xx answer, such as 100 Continue: another head follows
                continue
            if data.startswith(b"\0"):  # the length field of an HTTP/2 frame
                raise Http1Error(f"expected an answer of HTTP/1.1, got HTTP/2; {GRPC_PORT}")
            if len(data) > _MAX_HEAD_BYTES:
                raise Http1Error(f"the answer's headers are over {_MAX_HEAD_BYTES:,} bytes")
            data += yield from self._read_some("headers")

    def _read_body(
        self, answer: _Head, receiver: Receiver, check_deadline: Callable[[], object]
    ) -> Steps[bool]:
        """Read the body; return whether the connection is positioned at the next answer."""
        if "transfer-encoding" in answer.headers:
            return (yield from self._read_chunks(receiver, check_deadline))
        if answer.status in (204, 304):
            return True
        if receiver.announced_bytes is None:
            yield from self._read_to_end(receiver, check_deadline)
            return False
        yield from self._read_announced(receiver, check_deadline)
        return not receiver.missing_bytes

    def _read_announced(
        self, receiver: Receiver, check_deadline: Callable[[], object]
    ) -> Steps[None]:
        early = self._unread[: receiver.announced_bytes]
        self._unread = self._unread[receiver.announced_bytes :]
        receiver.add(early)
        while receiver.missing_bytes and not receiver.has_enough:
            yield receiver
            space = receiver.space()
            if space is None:
                receiver.add((yield from self._read_some("body", receiver.missing_bytes)))
                continue
            try:
                size = self.socket.recv_into(space)
            except BlockingIOError:
                yield READ
                continue
            if not size:
                return  # the receiver reports the missing bytes
            receiver.filled(size)
            check_deadline()

    def _read_to_end(self, receiver: Receiver, check_deadline: Callable[[], object]) -> Steps[None]:
        part, self._unread = self._unread, b""
        while True:
            receiver.add(part)
            check_deadline()
            if receiver.has_enough:
                return
            try:
                part = yield from self._read_some("body")
            except Http1Error:
                return

    def _read_chunks(self, receiver: Receiver, check_deadline: Callable[[], object]) -> Steps[bool]:
        while True:
            line = yield from self._read_line()
            size_text = line.partition(b";")[0].strip()
            try:
                size = int(size_text, 16)
            except ValueError:
                raise Http1Error(f"a chunk's size is {size_text[:32]!r}") from None
            if size == 0:
                while (yield from self._read_line()):
                    pass  # trailers
                return True
            while size:
                part = self._unread[:size]
                self._unread = self._unread[size:]
                if not part:
                    part = yield from self._read_some("body", size)
                receiver.add(part)
                check_deadline()
                size -= len(part)
                if receiver.has_enough:
                    return False
            if (yield from self._read_line()):
                raise Http1Error("a chunk is longer than it says")

    def _read_line(self) -> Steps[bytes]:
        while True:
            line, found, rest = self._unread.partition(b"\r\n")
            if found:
                self._unread = rest
                return line
            if len(self._unread) > _MAX_HEAD_BYTES:
                raise Http1Error("a chunk's size is not followed by the end of its line")
            self._unread += yield from self._read_some("body")

    def _read_some(self, what: str, most: int = _READ_BYTES) -> Steps[bytes]:
        while True:
            try:
                data = self.socket.recv(min(most, _READ_BYTES))
            except BlockingIOError:
                yield READ
                continue
            if not data:
                hint = "" if self.answering else f"; {MAYBE_TLS}"
                raise Http1Error(f"the connection ended before the answer's {what} did{hint}")
            self.answering = True
            return data


class _Outgoing:
    """The data left to send. Buffers are requested as late as possible: some are made lazily."""

    def __init__(self, head: bytes, body: Iterable[memoryview]) -> None:
        self._pending = deque((memoryview(head),))
        self._bytes = len(head)
        self._rest = iter(body)

    def piece(self) -> list[memoryview]:
        """Return the next buffers to send, or an empty list at the end."""
        while self._bytes < _SEND_BYTES and len(self._pending) < _SEND_BUFFERS:
            view = next(self._rest, None)
            if view is None:
                break
            self._pending.append(view)
            self._bytes += len(view)
        left = _SEND_BYTES
        views = []
        for view in self._pending:
            views.append(view[:left])
            left -= len(views[-1])
            if not left:
                break
        return views

    def drop(self, sent: int) -> None:
        """Remove ``sent`` bytes that the socket has accepted."""
        self._bytes -= sent
        while self._pending and sent >= len(self._pending[0]):
            sent -= len(self._pending.popleft())
        if sent:
            self._pending[0] = self._pending[0][sent:]


def _parse_head(head: bytes) -> _Head:
    status_line, *lines = head.split(b"\r\n")
    version, _, rest = status_line.partition(b" ")
    status = rest[:3]
    if not (version in (b"HTTP/1.1", b"HTTP/1.0") and len(status) == 3 and status.isdigit()):
        raise Http1Error(f"expected an answer of HTTP/1.1, got {status_line[:64]!r}")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.decode("latin-1").partition(":")
        if not colon or not name or name != name.strip():
            raise Http1Error(f"expected a header, got {line[:64]!r}")
        name, value = name.lower(), value.strip()
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    connection = headers.get("connection", "").lower()
    keep_alive = "close" not in connection and (version == b"HTTP/1.1" or "keep-" in connection)
    return _Head(int(status), headers, keep_alive)
