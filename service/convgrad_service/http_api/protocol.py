"""The HTTP/1.1 protocol of a connection: uvicorn's, with the limits that it lacks.

uvicorn limits idle keep-alive connections. It does not limit the time and size of headers, the
number of connections, or the time that a client leaves its answer unread; with each of these one
client could hold memory or block the event loop forever. Nor does it refuse all the heads that
RFC 9112 forbids.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from asyncio.events import TimerHandle
from collections.abc import Callable, Sequence
from typing import ClassVar

import httptools
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from convgrad.errors import MalformedRequest, Overloaded, RequestTimeout, ServiceError
from convgrad.wire.sentences import shown
from convgrad_service.engine.options import MAX_TRANSFER_S
from convgrad_service.http_api.connection import (
    CONNECTION,
    CoalescedWriter,
    Connection,
    ReadInParts,
)
from convgrad_service.http_api.problem_details import HeadRefused, problem_details
from convgrad_service.server.settings import Settings

# A body of more parts than this is refused if they are smaller than this on average: it would take
# a call of the parser for every byte or two.
_MANY_PARTS, _SMALL_PART_BYTES = 4096, 64
_MAX_PIPELINED = 16
_HOST = re.compile(rb"[A-Za-z0-9\-._~!$&'()*+,;=:%\[\]]*")


class GuardedProtocol(HttpToolsProtocol):
    """One connection. ``settings`` is set by `guarded_protocol`."""

    settings: ClassVar[Settings]
    _head_timer: TimerHandle | None = None
    _write_timer: TimerHandle | None = None
    _in_head = True
    has_asked = False
    """Whether a request has begun."""
    _read_bytes = 0
    """Bytes that were read of the head, or after it, with what frames the body."""
    _refusal: ServiceError | None = None
    _refused: ServiceError | None = None
    """The answer to an unparsable request, due after those before it."""
    _slow: tuple[RequestResponseCycle, int, float] | None = None
    """A paused answer, the bytes that were left of it, and when."""
    _unsent: tuple[int, float] | None = None
    """While closing: the bytes left to send, and the time since which there are that many."""
    _reader: asyncio.BaseProtocol
    """The object that passes received data on to this protocol."""
    _repeating_head = False
    _parts = parts_bytes = 0
    on_disconnect: Callable[[], None] | None = None
    """Called when the client has gone; set by the endpoint that computes."""
    watching: RequestResponseCycle | None = None
    """The exchange that set ``on_disconnect``. Later requests may have been received already."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._reader = self  # TLS reads records of 16 KiB anyway
        if self.scheme != "https":
            self._reader = ReadInParts(self)
            # A write waits until the one before has been sent, whose memory is then used again.
            transport.set_write_buffer_limits(high=0)
        if len(self.connections) > self.settings.max_connections:
            what = f"{self.settings.max_connections} connections are open, the maximum"
            self._close_with(Overloaded(what, retry_after_s=1.0))
        else:
            self._expect_rest_of_head()
        transport.set_protocol(self._reader)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.on_disconnect is not None:
            if self.watching is not None:
                self.watching.disconnected = True
            self.on_disconnect()
        self._stop_head_timer()
        _stop(self._write_timer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing() or self._refused is not None:
            return  # pipelined after a refused request
        # Before parsing: the parser concatenates an endless header piece by piece. The framing of
        # chunks of a fair size is far smaller than their contents.
        most = self.settings.max_header_bytes + (0 if self._in_head else 2 * self.parts_bytes)
        if self._read_bytes > most:
            self._refusal = self._too_large()
            if not self._in_head:
                framed = f"{self._read_bytes:,} bytes framed {self.parts_bytes:,} bytes of body"
                self._refusal = MalformedRequest(framed)
            self.send_400_response(self._refusal.detail)
            return
        self._read_bytes += len(data)
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
            if str(error) in ("Invalid HTTP version", "Pause on PRI/Upgrade"):  # PRI: of HTTP/2
                detail = "expected HTTP/1.1; only gRPC uses HTTP/2, on a port of its own"
                self._refusal = HeadRefused(505, detail)
            reason = error.__context__ or error  # of the callback that refused it
            self.send_400_response(f"this is not a valid HTTP/1.1 request: {reason}")
        self._expect_rest_of_head()

    def _ignore_upgrade(self) -> None:
        """Ignore an upgrade and stay with HTTP/1.1 (RFC 9110, 7.8).

        The parser would take the body for the other protocol's. Java's client offers HTTP/2 with
        every request, so a new parser takes over for the body.
        """
        names = (b"content-length", b"transfer-encoding")
        framing = [b"%s: %s\r\n" % each for each in self.scope["headers"] if each[0] in names]
        self.parser = httptools.HttpRequestParser(self)
        self._repeating_head = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(framing) + b"\r\n")
        self._repeating_head = False

    def on_message_begin(self) -> None:
        if self._repeating_head:
            return
        super().on_message_begin()
        self._in_head = self.has_asked = True
        self._read_bytes = self._parts = self.parts_bytes = 0
        self._stop_head_timer()

    def on_headers_complete(self) -> None:
        if self._repeating_head:
            return
        self._in_head, self._read_bytes = False, 0
        self._stop_head_timer()
        version = self.parser.get_http_version()
        try:
            self._check_head_size()
            check_head(version, self.headers)
        except HeadRefused as error:
            self._refusal = error
            raise
        exchange = self.scope[CONNECTION] = Connection(self)  # type: ignore[literal-required]
        if len(self.pipeline) >= _MAX_PIPELINED:
            # One read may hold ten thousand tiny requests, all of which would be prepared here.
            detail = f"{_MAX_PIPELINED} requests wait on this connection, the maximum"
            self._refusal = Overloaded(detail, retry_after_s=1.0)
            raise self._refusal
        if version == "1.0":
            self.expect_100_continue = False  # which RFC 9110, 10.1.1, requires
        super().on_headers_complete()
        # Trailers follow, if anything. They must not become headers: a proxy would have checked
        # other headers than we read.
        self.headers = []
        exchange.cycle = self.cycle
        if self.scope["method"] != "HEAD":  # whose answer has no body
            self.cycle.transport = CoalescedWriter(self.transport)  # type: ignore[assignment]

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
            super().on_message_complete()

    def restart_parser(self) -> None:
        """Start parsing a new request, with a new parser that has not seen the last body."""
        self.parser = httptools.HttpRequestParser(self)
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

    @property
    def client_host(self) -> str:
        """The client's address, "" if it has none."""
        return self.client[0] if self.client else ""

    @property
    def asking_since_s(self) -> float | None:
        """When the head began that has not arrived completely, if no request is being answered."""
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request
        if self._head_timer is None or not (cycle is None or cycle.response_complete):
            return None
        return self._head_timer.when() - self.settings.header_timeout_s

    @property
    def waiting_since_s(self) -> float | None:
        """When the client had its answer, or connected, if nothing has come from it since."""
        if self.transport.is_closing():
            return None
        if (timer := self.timeout_keep_alive_task) is not None:
            return timer.when() - self.timeout_keep_alive
        return None if self.has_asked else self.asking_since_s

    def pause_writing(self) -> None:
        super().pause_writing()
        # abort, because close would wait until the answer has been read.
        self._write_timer = self.loop.call_later(
            self.settings.answer_idle_timeout_s, self.transport.abort
        )

    def resume_writing(self) -> None:
        _stop(self._write_timer)
        super().resume_writing()

    def abort_if_stuck(self, now_s: float, *, short_of_memory: bool) -> None:
        """Abort a connection whose client does not read its answer; to be called periodically.

        That is a closing one whose rest is not read: it may be too small to pause writing. And,
        while others wait for memory, one whose rest would take over `MAX_TRANSFER_S`.
        """
        if not self.transport.is_closing():
            if short_of_memory and self.flow.write_paused:
                self._abort_if_slow(now_s)
            return
        left_bytes = self.transport.get_write_buffer_size()
        if self._unsent is None or left_bytes < self._unsent[0]:
            self._unsent = left_bytes, now_s
        elif now_s - self._unsent[1] > self.settings.answer_idle_timeout_s:
            self.transport.abort()

    def _abort_if_slow(self, now_s: float) -> None:
        cycle = self.cycle
        left_bytes = cycle.expected_content_length + self.transport.get_write_buffer_size()
        if self._slow is None or self._slow[0] is not cycle:
            self._slow = cycle, left_bytes, now_s
        _, before_bytes, since_s = self._slow
        took_s = now_s - since_s
        late = left_bytes * took_s > (before_bytes - left_bytes) * MAX_TRANSFER_S
        if late and took_s > self.settings.max_memory_wait_s:
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Answer an unparsable request with ``_refusal``, or with a 400 that says ``msg``.

        Answers to requests before it are sent first, if there are any.
        """
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request
        refusal = self._refusal or MalformedRequest(msg)
        if cycle is None or cycle.response_complete:
            self._close_with(refusal)
        elif self.pipeline or not cycle.more_body:
            if cycle.more_body:
                self.pipeline.popleft()  # whose body is what cannot be parsed
            self._refused = refusal
        elif cycle.response_started:
            self.transport.abort()  # the answer cannot be completed; closing would wait for readers
        else:
            self._close_with(refusal)

    def on_response_complete(self) -> None:
        if self._refused is not None and not self.pipeline and not self.transport.is_closing():
            self._close_with(self._refused)
        super().on_response_complete()

    def eof_received(self) -> None:
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None or cycle.response_started or self.pipeline or self.transport.is_closing():
            return
        what = "the client closed its half of the connection before the answer, and counts as gone"
        self._close_with(MalformedRequest(what))

    def _expect_rest_of_head(self) -> None:
        """Limit the time until the head is complete, unless it came in one read, as most do."""
        if self._in_head and self._head_timer is None:
            timeout_s = self.settings.header_timeout_s
            self._head_timer = self.loop.call_later(timeout_s, self._head_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _check_head_size(self) -> None:
        """Refuse a head that is too long: a read may hold all of it, and a body too."""
        size = len(self.url) + sum([len(name) + len(value) + 4 for name, value in self.headers])
        if size > self.settings.max_header_bytes:
            raise self._too_large()

    def _too_large(self) -> HeadRefused:
        return HeadRefused(
            431, f"the request line and headers are over {self.settings.max_header_bytes:,} bytes"
        )

    def _head_late(self) -> None:
        if self.transport.is_closing():
            return
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request
        if cycle is not None and not cycle.response_complete:
            # A pipelined request, whose head is not read while the previous one is answered.
            self._head_timer = self.loop.call_later(self.settings.header_timeout_s, self._head_late)
        else:
            timeout_s = self.settings.header_timeout_s
            detail = f"the request line and headers were not complete after {timeout_s:g} s"
            self._close_with(RequestTimeout(detail))

    def _close_with(self, error: ServiceError) -> None:
        status, headers, body = problem_details(error, request_id := uuid.uuid4().hex)
        headers += [
            (b"x-request-id", request_id.encode()),
            (b"server-timing", b"total;dur=0"),
            (b"connection", b"close"),
        ]
        lines = b"".join(b"%s: %s\r\n" % header for header in headers)
        self.transport.write(STATUS_LINE[status] + lines + b"\r\n" + body)
        self.transport.close()


def guarded_protocol(settings: Settings) -> type[GuardedProtocol]:
    """Return a protocol class with these settings, which uvicorn instantiates per connection."""
    return type("GuardedProtocol", (GuardedProtocol,), {"settings": settings})


def _stop(timer: TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


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
        raise HeadRefused(400, f"expected one Host header, got {len(hosts)}")
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
