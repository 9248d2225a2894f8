"""uvicorn's HTTP protocol, with the limits that it lacks.

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
from collections.abc import Sequence
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from convgrad.errors import MalformedRequest, Overloaded, RequestTimeout, ServiceError
from convgrad.wire.sentences import shown
from convgrad_service.engine.options import MAX_TRANSFER_S
from convgrad_service.http_api.problem_details import problem_details
from convgrad_service.server.settings import Settings

__all__ = ["HeadRefused", "LimitedProtocol", "check_head"]

_HOST = re.compile(rb"[A-Za-z0-9\-._~!$&'()*+,;=:%\[\]]*")


class HeadRefused(MalformedRequest):
    """A head that must be refused with a given status."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


def check_head(version: str, headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Refuse heads that RFC 9112 forbids; header names are in lower case.

    Raises
    ------
    HeadRefused
        The version is not HTTP/1.0 or 1.1; Host is missing, repeated or invalid; the body has a
        transfer coding other than chunked, or any in HTTP/1.0.
    """
    if version not in ("1.0", "1.1"):
        raise HeadRefused(505, f"the request is in HTTP/{version}; expected HTTP/1.1")
    hosts, transfer_encodings = [], []
    for name, value in headers:
        if name == b"host":
            hosts.append(value)
        elif name == b"transfer-encoding":
            transfer_encodings.append(value)
    if len(hosts) != 1 and (hosts or version == "1.1"):
        raise HeadRefused(400, f"the request has {len(hosts)} Host headers; expected one")
    if hosts and not _HOST.fullmatch(hosts[0]):
        raise HeadRefused(400, f"Host is {shown(hosts[0].decode('latin-1'))}, not a valid host")
    listed = b",".join(transfer_encodings)
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


class LimitedProtocol(HttpToolsProtocol):
    """One connection, within the limits of ``settings``."""

    settings: ClassVar[Settings]

    _head_timer: TimerHandle | None = None
    _write_timer: TimerHandle | None = None
    _in_head = True
    _head_bytes = 0
    _body_bytes = 0
    """Bytes that were read after the head, with what frames the body."""
    _refusal: ServiceError | None = None
    _slow: tuple[RequestResponseCycle, int, float] | None = None
    """A paused answer, the bytes that were left of it, and when."""
    _unsent: tuple[int, float] | None = None
    """While closing: the bytes left to send, and the time since which there are that many."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.settings.max_connections:
            self._close_with(
                Overloaded(
                    f"{self.settings.max_connections} connections are open, the maximum",
                    retry_after_s=1.0,
                )
            )
            return
        self._expect_rest_of_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        _stop(self._write_timer)
        super().connection_lost(exc)

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
        """Answer an unparsable request with ``_refusal``, or with a 400 that says ``msg``."""
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request
        if cycle is not None and cycle.response_started and not cycle.response_complete:
            # The answer cannot be completed, and closing would wait until it is read.
            self.transport.abort()
        elif self.pipeline:
            # Other answers are due first, and this one would be taken for one of them.
            self.transport.close()
        else:
            self._close_with(self._refusal or MalformedRequest(msg))

    def _begin_head(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        self._stop_head_timer()

    def _end_head(self) -> None:
        self._in_head = False
        self._body_bytes = 0
        self._stop_head_timer()

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
            self._close_with(
                RequestTimeout(
                    "the request line and headers were not complete after "
                    f"{self.settings.header_timeout_s:g} s"
                )
            )

    def _close_with(self, error: ServiceError) -> None:
        status = error.status if isinstance(error, HeadRefused) else None
        status, headers, body = problem_details(error, request_id := uuid.uuid4().hex, status)
        headers += [
            (b"x-request-id", request_id.encode()),
            (b"server-timing", b"total;dur=0"),
            (b"connection", b"close"),
        ]
        lines = b"".join(b"%s: %s\r\n" % header for header in headers)
        self.transport.write(STATUS_LINE[status] + lines + b"\r\n" + body)
        self.transport.close()


def _stop(timer: TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
