"""One connection, below ASGI: heads that were parsed before, reads and writes past all buffers.

Data is read in parts for the parser, or the rest of a body straight to its destination: its length
is known from the head. An answer's head and the start of its body are sent in one write, thus in
one packet. `Connection` is our extension of ASGI for that; behind any other ASGI server it is
missing, and bodies and answers are copied part by part.
"""

from __future__ import annotations

import asyncio
import re
import time
from asyncio import Transport
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from convgrad.errors import MalformedRequest
from convgrad.wire.sentences import shown

__all__ = [
    "CONNECTION",
    "CoalescedWriter",
    "Connection",
    "HeadRefused",
    "ReadInParts",
    "ReceiveInto",
    "RequestHead",
    "RequestHeadCache",
    "check_head",
    "connection_of",
]

# Size of one read: more than a socket's buffer gains nothing, and would delay the event loop.
_READ_BYTES = 2**20
# Longer parts are not copied.
_JOINED_BYTES = 64 * 1024
_INTERIM = b"HTTP/1.1 1"  # 100 Continue: nothing follows until the client sends its body
CONNECTION = "convgrad.connection"
"""The key of an ASGI scope under which our protocol offers the exchange's `Connection`."""

# Of the cache of heads. The id is as the client SDK writes it.
_END = b"\r\n\r\n"
_ID = re.compile(rb"\r\n[Xx]-[Rr]equest-[Ii]d: ([0-9A-Za-z-]{1,128})\r\n")
_MAX_HEAD_BYTES, _MOST = 2048, 256
_ID_NAME = b"x-request-id"
_UNUSUAL = frozenset({b"expect", b"transfer-encoding", b"upgrade", b"connection"})
_HOST = re.compile(rb"[A-Za-z0-9\-._~!$&'()*+,;=:%\[\]]*")


class _Forwarding(asyncio.BufferedProtocol):
    """Passes all events but received data to ``behind``, the connection's own protocol."""

    def __init__(self, behind: asyncio.Protocol) -> None:
        self._behind = behind

    def eof_received(self) -> bool | None:
        return self._behind.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._behind.connection_lost(exc)

    def pause_writing(self) -> None:
        self._behind.pause_writing()

    def resume_writing(self) -> None:
        self._behind.resume_writing()


class ReadInParts(_Forwarding):
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
        self.left_bytes = sum(size_of_target(target) for target in targets)
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


def size_of_target(target: memoryview | int) -> int:
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


class Connection:
    """One exchange's use of a connection, whose ``protocol`` is a `protocol.GuardedProtocol`."""

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
        receiving = self._receiving = ReceiveInto(targets, protocol, protocol.restart_parser)
        ahead, cycle.body = cycle.body, bytearray()
        protocol.switch_protocol(receiving)
        receiving.take(ahead)
        return receiving

    def stop_receiving(self) -> None:
        """Stop writing to the targets of `receive_into`: drop the rest of the body."""
        assert self._receiving is not None  # noqa: S101
        # Not to the parser, which has not seen what was received in place.
        protocol, left_bytes = self._protocol, self._receiving.left_bytes
        protocol.switch_protocol(ReceiveInto([left_bytes], protocol, protocol.restart_parser))

    def whole_body(self) -> bytearray | None:
        """Return the body if it is complete and no part has been delivered yet; else None."""
        cycle = self.cycle
        if cycle is None or self._protocol.cycle is not cycle or cycle.more_body:
            return None
        return None if cycle.disconnected or cycle.waiting_for_100_continue else cycle.body

    def watch(self, gone: Callable[[], None] | None) -> None:
        """Have ``gone`` called if the client closes the connection, until called with None."""
        self._protocol.gone, self._protocol.watching = gone, self.cycle
        if gone is not None and self._protocol.transport.is_closing():
            gone()

    @contextmanager
    def unbuffered(self) -> Iterator[None]:
        """Have writes within the block wait until their bytes have been sent."""
        transport = self._protocol.transport
        if not transport.is_closing():
            transport.set_write_buffer_limits(high=0)
        try:
            yield
        finally:
            if not transport.is_closing():
                transport.set_write_buffer_limits()


def connection_of(scope: Scope) -> Connection | None:
    """Return the connection of an exchange if the server offers one and TLS is off."""
    return None if scope.get("scheme") == "https" else scope.get(CONNECTION)


class RequestHead(NamedTuple):
    """A parsed head: a POST in HTTP/1.1 on a keep-alive connection."""

    raw_path: bytes
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body_bytes: int
    id_at: int | None
    """Which of the headers is the request's id, if there is one."""

    def scope(self, request_id: bytes) -> dict[str, Any]:
        """Return the fields of an ASGI scope for a request with this id."""
        headers = list(self.headers)
        if self.id_at is not None:
            headers[self.id_at] = _ID_NAME, request_id
        return {
            "http_version": "1.1",
            "method": "POST",
            "path": self.path,
            "raw_path": self.raw_path,
            "query_string": self.query,
            "headers": headers,
        }


class RequestHeadCache:
    """The latest heads, of all connections of a process, by their exact bytes.

    A client sends the same head with every request but for its id, and parsing it, with a callback
    into Python for each header, takes longer than computing a small problem.
    """

    def __init__(self) -> None:
        self._heads: OrderedDict[tuple[bytes, ...], RequestHead] = OrderedDict()

    def find(self, data: bytes) -> tuple[RequestHead, bytes, int] | None:
        """Return the cached head of ``data``, the request's id, and where the body begins."""
        split = _split(data)
        if split is None:
            return None
        key, request_id, end = split
        known = self._heads.get(key)
        if known is None:
            return None
        self._heads.move_to_end(key)
        return known, request_id, end

    def learn(
        self,
        data: bytes,
        raw_path: bytes,
        path: str,
        query: bytes,
        headers: list[tuple[bytes, bytes]],
    ) -> None:
        """Cache the parsed head that ``data`` begins with."""
        split = _split(data)
        if split is None:
            return
        key, request_id, end = split
        head = data[:end]
        names = [name for name, _ in headers]
        length = dict(headers).get(b"content-length", b"")
        # Exactly one line per header and one for the request: nothing folded or omitted.
        lines = head.count(b"\r\n")
        plain = lines == head.count(b"\n") == head.count(b"\r") == len(headers) + 2
        ids = [at for at, name in enumerate(names) if name == _ID_NAME]
        if (
            not plain
            or len(ids) != (1 if request_id else 0)
            or len(set(names)) != len(names)
            or not (length.isdigit() and len(length) < 10)
            or _UNUSUAL.intersection(names)
        ):
            return
        known = RequestHead(
            raw_path, path, query, tuple(headers), int(length), ids[0] if ids else None
        )
        self._heads[key] = known
        if len(self._heads) > _MOST:
            self._heads.popitem(last=False)


def _split(data: bytes) -> tuple[tuple[bytes, ...], bytes, int] | None:
    """Split a head into what surrounds its id, the id, and the head's end."""
    end = data.find(_END, 0, _MAX_HEAD_BYTES) + len(_END)
    if end < len(_END) or not data.startswith(b"POST "):
        return None
    found = _ID.search(data, 0, end)
    if found is None:
        return (data[:end],), b"", end
    return (data[: found.start()], data[found.end() : end]), found[1], end


class HeadRefused(MalformedRequest):
    """A head that must be refused with a given status."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


def check_head(version: str, headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Raise HeadRefused for heads that RFC 9112 forbids; header names are in lower case.

    That is another version than HTTP/1.0 or 1.1, a missing, repeated or invalid Host, and a
    transfer coding other than chunked, or any in HTTP/1.0.
    """
    if version not in ("1.0", "1.1"):
        raise HeadRefused(505, f"the request is in HTTP/{version}; expected HTTP/1.1")
    hosts = [value for name, value in headers if name == b"host"]
    listed = b",".join([value for name, value in headers if name == b"transfer-encoding"])
    if len(hosts) != 1 and (hosts or version == "1.1"):
        raise HeadRefused(400, f"the request has {len(hosts)} Host headers; expected one")
    if hosts and not _HOST.fullmatch(hosts[0]):
        raise HeadRefused(400, f"Host is {shown(hosts[0].decode('latin-1'))}, not a valid host")
    if listed and version == "1.0":
        raise HeadRefused(400, "HTTP/1.0 has no Transfer-Encoding")
    codings = [coding.strip().lower() for coding in listed.split(b",")] if listed else []
    if codings not in ([], [b"chunked"]):
        # Only chunked, as the last coding, delimits the body.
        framed = codings[-1] == b"chunked" and codings.count(b"chunked") == 1
        raise HeadRefused(
            501 if framed else 400,
            f"Transfer-Encoding is {shown(listed.decode('latin-1'))}; expected chunked alone",
        )
