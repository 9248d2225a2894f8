"""The HTTP protocol of a connection: caches parsed heads, and receives bodies in place.

Its limits are in `protocol_limits`.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, cast

import httptools
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from convgrad.errors import MalformedRequest
from convgrad_service.http_api.connection_io import CoalescedWriter, ReadInParts
from convgrad_service.http_api.context import CONNECTION, Connection
from convgrad_service.http_api.protocol_limits import HeadRefused, LimitedProtocol, check_head
from convgrad_service.server.settings import Settings

__all__ = ["GuardedProtocol", "RequestHead", "RequestHeadCache", "guarded_protocol"]

# A body of more parts than this is refused if they are smaller than this on average: it would take
# a call of the parser for every byte or two.
_MANY_PARTS, _SMALL_PART_BYTES = 4096, 64

# Limit of pipelined requests.
_MAX_SENT_AHEAD = 16

# Of the cache of heads. The id is as the client SDK writes it.
_END = b"\r\n\r\n"
_ID = re.compile(rb"\r\n[Xx]-[Rr]equest-[Ii]d: ([0-9A-Za-z-]{1,128})\r\n")
_MAX_HEAD_BYTES, _MOST = 2048, 256
_ID_NAME = b"x-request-id"
_UNUSUAL = frozenset({b"expect", b"transfer-encoding", b"upgrade", b"connection"})


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


class GuardedProtocol(LimitedProtocol):
    """One connection. ``settings`` and ``heads`` are set by `guarded_protocol`."""

    heads: ClassVar[RequestHeadCache]

    _reader: asyncio.BaseProtocol
    """The object that passes received data on to this protocol."""
    _between = True
    """Whether the parser has seen the end of a request, and nothing of the next."""
    _first = b""
    """The data of the last read, if a request began with it whose head is yet to be parsed."""
    _repeating_head = False
    _parts = 0
    parts_bytes = 0
    gone: Callable[[], None] | None = None
    """Called when the client has gone; set by the endpoint that computes."""
    watching: RequestResponseCycle | None = None
    """The exchange that set ``gone``. Later requests may have been received already."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # TLS reads records of 16 KiB anyway.
        self._reader = self if self.scheme == "https" else ReadInParts(self)
        transport.set_protocol(self._reader)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.gone is not None:
            if self.watching is not None:
                self.watching.disconnected = True
            self.gone()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return  # pipelined after a refused request
        if self._between and self._receive_known(data):
            return
        self._first = data if self._between else b""
        # Before parsing: the parser concatenates an endless header line piece by piece.
        if self._in_head:
            if self._head_bytes > self.settings.max_header_bytes:
                self._refusal = self._too_large()
                self.send_400_response(self._refusal.detail)
                return
            self._head_bytes += len(data)
        else:
            # The same holds for an endless trailer. The framing of chunks of a fair size is far
            # smaller than their contents.
            if self._body_bytes > self.settings.max_header_bytes + 2 * self.parts_bytes:
                self._refusal = MalformedRequest(
                    f"{self._body_bytes:,} bytes framed {self.parts_bytes:,} bytes of body"
                )
                self.send_400_response(self._refusal.detail)
                return
            self._body_bytes += len(data)
        self._unset_keepalive_if_required()
        left = memoryview(data)
        try:
            while left:
                try:
                    self.parser.feed_data(left)
                    break
                except httptools.HttpParserUpgrade as upgrade:
                    left = left[upgrade.args[0] :]
                    self._ignore_upgrade()
        except httptools.HttpParserError as error:
            if str(error) == "Invalid HTTP version":
                self._refusal = HeadRefused(505, "the version of HTTP is unknown; expected 1.1")
            self.send_400_response(f"this is not a valid HTTP/1.1 request: {error}")
        self._expect_rest_of_head()

    def _receive_known(self, data: bytes) -> bool:
        """Handle a whole request whose head is cached, without the parser; return whether it is."""
        before: RequestResponseCycle | None = self.cycle  # None before the first request
        if self.pipeline or (before is not None and not before.response_complete):
            return False
        found = self.heads.find(data)
        if found is None or len(data) - found[2] != found[0].body_bytes:
            return False
        known, request_id, body_at = found
        self._unset_keepalive_if_required()
        self._end_head()
        self.parts_bytes = known.body_bytes
        exchange = Connection(self)
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "root_path": self.root_path,
            "state": self.app_state.copy(),
            CONNECTION: exchange,
            **known.scope(request_id),
        }
        self.scope = cast(Any, scope)
        cycle = self.cycle = exchange.cycle = RequestResponseCycle(
            scope=self.scope,
            transport=cast(asyncio.Transport, CoalescedWriter(self.transport)),
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=False,
            keep_alive=True,
            on_response=self.on_response_complete,
        )
        cycle.body += memoryview(data)[body_at:]
        cycle.more_body = False
        cycle.message_event.set()
        self._start_asgi_task(cycle, self.app)
        return True

    def _ignore_upgrade(self) -> None:
        """Ignore an upgrade and stay with HTTP/1.1 (RFC 9110, 7.8).

        The parser would take the body for the other protocol's. Java's client offers HTTP/2 with
        every request, so a new parser takes over for the body.
        """
        names = (b"content-length", b"transfer-encoding")
        headers = self.scope["headers"]
        framing = [b"%s: %s\r\n" % header for header in headers if header[0] in names]
        self.parser = httptools.HttpRequestParser(self)
        self._repeating_head = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(framing) + b"\r\n")
        self._repeating_head = False

    def on_message_begin(self) -> None:
        if self._repeating_head:
            return
        self._between = False
        super().on_message_begin()
        self._begin_head()
        self._parts = self.parts_bytes = 0

    def on_headers_complete(self) -> None:
        if self._repeating_head:
            return
        self._end_head()
        version = self.parser.get_http_version()
        try:
            self._check_head_size()
            check_head(version, self.headers)
        except HeadRefused as error:
            self._refusal = error
            raise
        # Extensions of ASGI; see `Connection`.
        exchange = cast(dict[str, Any], self.scope)[CONNECTION] = Connection(self)
        if len(self.pipeline) >= _MAX_SENT_AHEAD:
            # One read may hold ten thousand tiny requests, all of which would be prepared here.
            raise ValueError("too many requests sent ahead")
        if version == "1.0":
            self.expect_100_continue = False  # which RFC 9110, 10.1.1, requires
        super().on_headers_complete()
        # Trailers follow, if anything. They must not become headers: a proxy would have checked
        # other headers than we read.
        self.headers = []
        exchange.cycle = self.cycle
        if self._first:
            self._learn_head(self._first)
        if self.scope["method"] != "HEAD":  # whose answer has no body
            self.cycle.transport = cast(asyncio.Transport, CoalescedWriter(self.transport))

    def _learn_head(self, first: bytes) -> None:
        self._first = b""
        scope = cast(dict[str, Any], self.scope)
        plain = scope["method"] == "POST" and scope["http_version"] == "1.1"
        if plain and self.cycle.keep_alive and not self.parser.should_upgrade():
            self.heads.learn(
                first, scope["raw_path"], scope["path"], scope["query_string"], scope["headers"]
            )

    def on_body(self, body: bytes) -> None:
        self._parts += 1
        self.parts_bytes += len(body)
        if self._parts > _MANY_PARTS and self.parts_bytes < self._parts * _SMALL_PART_BYTES:
            self._refusal = MalformedRequest(
                f"the body arrived in {self._parts:,} parts of "
                f"{self.parts_bytes / self._parts:.0f} bytes on average; expected at least "
                f"{_SMALL_PART_BYTES}"
            )
            raise ValueError(self._refusal.detail)
        super().on_body(body)

    def on_message_complete(self) -> None:
        # For an upgrade this is only the end of the head; the new parser reports the body's end.
        if not self.parser.should_upgrade():
            self._between = True
            super().on_message_complete()

    def restart_parser(self) -> None:
        """Start parsing a new request, with a new parser that has not seen the last body."""
        self.parser = httptools.HttpRequestParser(self)
        self._between = True
        self.cycle.more_body = False
        self.cycle.message_event.set()
        self.switch_protocol(self._reader)

    def switch_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Pass what the connection receives to another protocol."""
        if self.transport.is_closing():
            return
        # The transport checks for a BufferedProtocol only when reading starts.
        self.transport.pause_reading()
        self.transport.set_protocol(protocol)
        self.transport.resume_reading()
        self.flow.read_paused = False


def guarded_protocol(settings: Settings) -> type[GuardedProtocol]:
    """Return a protocol class with these settings, which uvicorn instantiates per connection."""
    own = {"settings": settings, "heads": RequestHeadCache()}
    return type("GuardedProtocol", (GuardedProtocol,), own)
