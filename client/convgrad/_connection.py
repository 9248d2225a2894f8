"""One HTTP/1.1 connection: a request from the caller's own buffers, an answer into its last place.

A general client spends 0.3 ms of interpreter on a request, which is what a whole call of a small
problem may take, and copies a large body on its way. Here the kernel reads the arrays where they
are and writes the answer where it stays.
"""

from __future__ import annotations

import select
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from convgrad._reply import Receiver
from convgrad.errors import ClientError

__all__ = ["AVAILABLE", "Connection", "Http1Error", "Waiting"]

AVAILABLE = hasattr(socket.socket, "sendmsg") and hasattr(select, "poll")
"""Whether this system has what a `Connection` needs; Windows does not."""

# Seconds that are left for the request, or None; raises once there are none.
Waiting = Callable[[], "float | None"]

# Pieces of this size fill a loopback connection some 15 % faster than one write of everything.
_SEND_BYTES = 1 << 20
_SEND_BUFFERS = 64  # well under every system's IOV_MAX
_READ_BYTES = 1 << 16
_MAX_HEAD_BYTES = 1 << 16
_END_OF_HEAD = b"\r\n\r\n"


class Http1Error(ClientError):
    """What came is not HTTP/1.1, or it ended too early."""


@dataclass(frozen=True)
class _Head:
    status: int
    headers: Mapping[str, str]
    keep_alive: bool


class Connection:
    """A connected socket and what was read from it beyond the last answer.

    Not for several threads at once. After any exception it is of no more use: close it.
    """

    def __init__(self, host: str, port: int, timeout_s: float | None) -> None:
        self._socket = socket.create_connection((host, port), timeout_s)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._unread = b""
        self.answering = False
        """Whether a byte of the present answer has come."""

    def close(self) -> None:
        self._socket.close()

    def is_stale(self) -> bool:
        """Whether something came while nothing was asked: the end, as a rule."""
        return bool(self._unread or self._poll.poll(0))

    def request(
        self, head: bytes, body: Iterable[memoryview], request_id: str, waiting: Waiting
    ) -> tuple[Receiver, bool]:
        """Send a request and receive its answer; whether another may follow on this connection.

        A server may answer before it has the whole body: then the rest is not sent.

        Raises
            OSError, Http1Error, and what ``waiting`` raises.
        """
        answer, sent_all = self._ask(head, body, waiting)
        receiver = Receiver(answer.status, answer.headers, request_id)
        whole = self._read_body(answer, receiver, waiting)
        return receiver, sent_all and whole and answer.keep_alive

    def arriving(
        self, head: bytes, body: Iterable[memoryview], request_id: str, waiting: Waiting
    ) -> Iterator[tuple[Receiver, bool]]:
        """As `request`, whenever more of the answer has come; the last time with all of it."""
        answer, sent_all = self._ask(head, body, waiting)
        receiver = Receiver(answer.status, answer.headers, request_id)
        reusable = False
        if "transfer-encoding" in answer.headers or receiver.memory is None:
            reusable = self._read_body(answer, receiver, waiting)
        else:
            for missing in self._read_announced(receiver, waiting):
                reusable = not missing
                if missing:
                    yield receiver, False
        yield receiver, sent_all and reusable and answer.keep_alive

    def _ask(self, head: bytes, body: Iterable[memoryview], waiting: Waiting) -> tuple[_Head, bool]:
        """Send a request and receive the head of its answer; whether all of it was sent."""
        self.answering = False
        try:
            sent_all = self._send(_Outgoing(head, body), waiting)
            broken = None
        except OSError as error:
            # The answer that says why may have come before the connection broke.
            sent_all, broken = False, error
        try:
            answer = self._read_head(waiting)
        except (OSError, Http1Error):
            if broken is not None:
                raise broken from None
            raise
        return answer, sent_all

    def _send(self, outgoing: _Outgoing, waiting: Waiting) -> bool:
        while piece := outgoing.piece():
            try:
                outgoing.drop(self._socket.sendmsg(piece))
            except BlockingIOError:
                self._poll.modify(self._socket, select.POLLIN | select.POLLOUT)
                try:
                    ready = self._wait(waiting)
                finally:
                    self._poll.modify(self._socket, select.POLLIN)
                if ready & select.POLLIN:
                    return False
        return True

    def _read_head(self, waiting: Waiting) -> _Head:
        data = self._unread
        if not data:
            self._wait(waiting)  # no server has answered yet: an attempt to read would be in vain
        while True:
            head, found, rest = data.partition(_END_OF_HEAD)
            if found:
                parsed = _parse_head(head)
                if parsed.status >= 200:
                    self._unread = rest
                    return parsed
                data = rest  # 100 Continue and its kin announce another head
                continue
            if len(data) > _MAX_HEAD_BYTES:
                raise Http1Error(f"the answer's headers are over {_MAX_HEAD_BYTES:,} bytes")
            data += self._read_some(waiting, "headers")

    def _read_body(self, answer: _Head, receiver: Receiver, waiting: Waiting) -> bool:
        """Whether the answer ended where the next may begin."""
        if "transfer-encoding" in answer.headers:
            return self._read_chunks(receiver, waiting)
        if answer.status in (204, 304):
            return True
        if receiver.announced_bytes is None:
            self._read_to_end(receiver, waiting)
            return False
        for _ in self._read_announced(receiver, waiting):
            pass
        return not receiver.missing_bytes

    def _read_announced(self, receiver: Receiver, waiting: Waiting) -> Iterator[int]:
        """Read a body of an announced length; yields how much is missing whenever more came."""
        early = self._unread[: receiver.announced_bytes]
        self._unread = self._unread[receiver.announced_bytes :]
        receiver.add(early)
        yield receiver.missing_bytes
        while receiver.missing_bytes and not receiver.has_enough:
            space = receiver.space()
            if space is None:
                receiver.add(self._read_some(waiting, "body", receiver.missing_bytes))
                continue
            try:
                size = self._socket.recv_into(space)
            except BlockingIOError:
                self._wait(waiting)
                continue
            if not size:
                return  # the receiver knows how much is missing, and says so
            receiver.filled(size)
            waiting()
            yield receiver.missing_bytes

    def _read_to_end(self, receiver: Receiver, waiting: Waiting) -> None:
        part, self._unread = self._unread, b""
        while True:
            receiver.add(part)
            if receiver.has_enough:
                return
            try:
                part = self._read_some(waiting, "body")
            except Http1Error:
                return

    def _read_chunks(self, receiver: Receiver, waiting: Waiting) -> bool:
        while True:
            line = self._read_line(waiting)
            size_text = line.partition(b";")[0].strip()
            try:
                size = int(size_text, 16)
            except ValueError:
                raise Http1Error(f"a chunk's size is {size_text[:32]!r}") from None
            if size == 0:
                while self._read_line(waiting):
                    pass  # trailers
                return True
            while size:
                part = self._unread[:size] or self._read_some(waiting, "body", size)
                self._unread = self._unread[size:] if self._unread else b""
                receiver.add(part)
                size -= len(part)
                if receiver.has_enough:
                    return False
            if self._read_line(waiting):
                raise Http1Error("a chunk is longer than it says")

    def _read_line(self, waiting: Waiting) -> bytes:
        while True:
            line, found, rest = self._unread.partition(b"\r\n")
            if found:
                self._unread = rest
                return line
            if len(self._unread) > _MAX_HEAD_BYTES:
                raise Http1Error("a chunk's size is not followed by the end of its line")
            self._unread += self._read_some(waiting, "body")

    def _read_some(self, waiting: Waiting, what: str, most: int = _READ_BYTES) -> bytes:
        while True:
            try:
                data = self._socket.recv(min(most, _READ_BYTES))
            except BlockingIOError:
                self._wait(waiting)
                continue
            if not data:
                raise Http1Error(f"the connection ended before the answer's {what} did")
            self.answering = True
            return data

    def _wait(self, waiting: Waiting) -> int:
        """The events that came; raises what ``waiting`` does when none comes in time."""
        while True:
            remaining_s = waiting()
            # A millisecond more, so that the time is up when poll says so.
            timeout_ms = None if remaining_s is None else remaining_s * 1e3 + 1
            for _, events in self._poll.poll(timeout_ms):
                return events


class _Outgoing:
    """What is left to send. Buffers are taken only when they are due: some are made on the way."""

    def __init__(self, head: bytes, body: Iterable[memoryview]) -> None:
        self._pending = deque((memoryview(head),))
        self._bytes = len(head)
        self._rest = iter(body)

    def piece(self) -> list[memoryview]:
        """What to send next; empty at the end."""
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
        """That many bytes are on their way."""
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
