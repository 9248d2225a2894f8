"""The base of all HTTP endpoints that compute: headers, disconnects, and sending of answers."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import pybase64
from starlette.types import Receive, Scope, Send

from convgrad.contract import Operation
from convgrad.errors import MalformedRequest, NotAcceptable, ServiceError, UnsupportedMediaType
from convgrad_service.engine.admission import CancelScope, ClientGone, Deadline
from convgrad_service.engine.memory.arena import Lease
from convgrad_service.engine.pipeline import Pipeline, Transport
from convgrad_service.engine.request import SMALL_BYTES, ComputeRequest
from convgrad_service.http_api.body import CONNECTION, Body, BodyLimits, Connection, connection_of
from convgrad_service.http_api.middleware import context_of
from convgrad_service.http_api.problem_details import Headers
from convgrad_service.server.settings import Settings

T = TypeVar("T")
Wait = Callable[[Coroutine[Any, Any, int]], Awaitable[int]]
# Size of one write: large enough to be efficient, small enough that the protocol soon notices a
# client that stops reading.
_SEND_BYTES = 2**20
_NAME = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_MEDIA_RANGE = re.compile(rf"\s*({_NAME})/({_NAME})\s*")
_PARAMETER = re.compile(rf';\s*(?:({_NAME})\s*=\s*({_NAME}|"(?:[^"\\]|\\.)*"))?\s*')
_MAX_RANGES = 64  # more than any client sends


class Endpoint:
    """An ASGI application that computes an operation; each request gets its own ``transport``."""

    def __init__(
        self,
        transport: type[HttpTransport],
        operation: Operation,
        pipeline: Pipeline,
        settings: Settings,
    ) -> None:
        self._transport, self._operation = transport, operation
        self._pipeline, self._settings = pipeline, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        transport = self._transport(
            self._operation, self._pipeline, self._settings, scope, receive, send
        )
        try:
            await self._pipeline.run(transport.request, transport)
        except ServiceError as error:
            await transport.fail(error)
        finally:
            transport.close()


class HttpTransport(Transport):
    """One exchange. Subclasses decode the body and encode the answer."""

    streams = enforces_deadline = reads_query = False
    body_lease: Lease | None = None
    decodes_inline = True

    def __init__(
        self,
        operation: Operation,
        pipeline: Pipeline,
        settings: Settings,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        self.pipeline = pipeline
        # Repeated headers are joined by commas.
        self.headers = headers = _headers(scope["headers"])
        self._settings = settings
        self._scope, self._receive, self._send = scope, receive, send
        self._context = context = context_of(scope)
        self._connection: Connection | None = scope.get(CONNECTION)
        self._leaving: asyncio.Task[None] | None = None
        self._received: Body | None = None
        length = headers.get(b"content-length")
        context.operation = operation.name
        refuse_encoded(headers.get(b"content-encoding"))
        if scope["query_string"] and not self.reads_query:
            _refuse_parameters(scope["query_string"], operation)
        allowed_s = seconds_in(headers.get(b"x-request-timeout"), "X-Request-Timeout")
        self.request = ComputeRequest(
            operation,
            Deadline.after(min(allowed_s or math.inf, settings.max_timeout_s)),
            context.timings,
            context.caller,
            # Sending the body counts only towards a deadline that the client set itself.
            counts_receiving=allowed_s is not None,
            body_bytes=None if length is None else int(length),
        )
        self.operation, self.owner = operation, context.owner

    def body(self, max_bytes: int) -> Body:
        """Return the request's body, of at most ``max_bytes``."""
        limits = BodyLimits.of(self._settings, max_bytes, self.pipeline.engine)
        length, connection = self.request.body_bytes, connection_of(self._scope)
        self._received = Body(self._receive, length, limits, connection, self._context)
        return self._received

    def watch(self, gone: Callable[[], None] | None) -> None:
        """See `Transport.watch`."""
        if self._connection is not None:
            self._connection.watch(gone)
        elif gone is not None and self._received is not None and self._received.ended:
            self._leaving = asyncio.ensure_future(self._left(gone))
        elif self._leaving is not None:
            self._leaving.cancel()

    async def respond(self, headers: Headers, chunks: Sequence[Chunk]) -> None:
        """Send a 200 with these headers and the chunks as its body."""
        await send_chunks(
            self._send,
            headers,
            chunks,
            connection=connection_of(self._scope),
            in_thread=self.pipeline.in_thread,
            waiting=self._unless_gone,
        )

    async def fail(self, error: ServiceError) -> None:
        """Report an error to the client: raise it, unless the answer has begun."""
        raise error

    def close(self) -> None:
        """Release the request's memory."""

    async def _left(self, gone: Callable[[], None]) -> None:
        # After the whole body, the only message left is the disconnect.
        with contextlib.suppress(asyncio.CancelledError):
            await self._receive()
            gone()

    async def _unless_gone(self, coming: Coroutine[Any, Any, T]) -> T:
        """Await ``coming``; raise ClientGone if the client leaves first."""
        with CancelScope() as scope:
            self.watch(lambda: scope.cancel(ClientGone()))
            try:
                return await coming
            finally:
                self.watch(None)


def _headers(pairs: Iterable[tuple[bytes, bytes]]) -> dict[bytes, str]:
    headers: dict[bytes, str] = {}
    for name, value in pairs:
        text = value.decode("latin-1")
        headers[name] = f"{headers[name]},{text}" if name in headers else text
    return headers


@dataclass(frozen=True, slots=True)
class Arriving:
    """A part of an answer that is still being computed.

    ``until`` waits for a number of final bytes, and returns how many there are.
    """

    data: memoryview
    until: Callable[[int], Coroutine[Any, Any, int]]

    def __len__(self) -> int:
        return len(self.data)


class EncodedLater:
    """The base64 of some bytes, encoded when it is sent."""

    def __init__(self, part: memoryview) -> None:
        self._part = part

    def __len__(self) -> int:
        return -(-len(self._part) // 3) * 4

    def encoded(self) -> bytes:
        """The text."""
        return pybase64.b64encode(self._part)


Chunk = bytes | memoryview | EncodedLater | Arriving
"""A part of an answer, of one byte an item; the last two kinds are made when it is their turn."""


async def send_chunks(
    send: Send,
    headers: Headers,
    chunks: Sequence[Chunk],
    *,
    connection: Connection | None = None,
    in_thread: Callable[[Callable[[], bytes]], Awaitable[bytes]] | None = None,
    waiting: Wait | None = None,
) -> None:
    """Send a 200 with these headers, Content-Length, and the chunks as its body.

    When it returns, nothing refers to the chunks' memory any longer: they have been sent, or copied
    if the server offers no ``connection`` that reports completion. ``in_thread`` runs deferred
    encoding. ``waiting`` awaits what is still being computed.
    """
    length = sum(len(chunk) for chunk in chunks)
    headers = [*headers, (b"content-length", str(length).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    if length <= SMALL_BYTES:
        body = b"".join(_made(chunk) for chunk in chunks)
        await send({"type": "http.response.body", "body": body, "more_body": False})
        return
    with contextlib.nullcontext() if connection is None else connection.unbuffered():
        for chunk in chunks:
            if isinstance(chunk, EncodedLater):
                made = chunk.encoded() if in_thread is None else await in_thread(chunk.encoded)
                await send({"type": "http.response.body", "body": made, "more_body": True})
                continue
            data = chunk.data if isinstance(chunk, Arriving) else memoryview(chunk).cast("B")
            at = 0
            while at < len(data):
                end = len(data)
                if isinstance(chunk, Arriving):
                    coming = chunk.until(at + 1)
                    end = await (coming if waiting is None else waiting(coming))
                for part in _parts(data[at:end]):
                    sent = bytes(part) if connection is None else part
                    await send({"type": "http.response.body", "body": sent, "more_body": True})
                at = end
        # Unbuffered, so this waits until everything before it has been sent.
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _made(chunk: Chunk) -> bytes | memoryview:
    if isinstance(chunk, Arriving):
        raise TypeError("nothing small is sent before it is computed")
    return chunk.encoded() if isinstance(chunk, EncodedLater) else chunk


def _parts(view: memoryview) -> Iterable[memoryview]:
    return (view[at : at + _SEND_BYTES] for at in range(0, len(view), _SEND_BYTES))


def match_content_type(header: str | None, known: Sequence[str]) -> str:
    """Return the one of ``known`` that a Content-Type names.

    Parameters are ignored, but for a charset: text is read as UTF-8 and in no other encoding.

    Raises
    ------
    UnsupportedMediaType
        It names none, or is missing.
    """
    expected = " or ".join(known)
    if header is None:
        raise UnsupportedMediaType(f"the request has no Content-Type; expected {expected}")
    parsed = _parse(header)
    if parsed is None or parsed[0] not in known:
        raise UnsupportedMediaType(f"the Content-Type is {header[:200]!r}; expected {expected}")
    media_type, parameters = parsed
    charset = parameters.get("charset", "utf-8").lower()
    if charset not in ("utf-8", "utf8"):
        raise UnsupportedMediaType(f"the charset is {charset[:64]!r}; expected utf-8")
    return media_type


def content_type_parameters(header: str) -> dict[str, str]:
    """Return a Content-Type's parameters by lower-case name; none if it cannot be parsed."""
    parsed = _parse(header)
    return {} if parsed is None else parsed[1]


def choose_accepted(header: str | None, known: Sequence[str], preferred: str) -> str:
    """Return the one of ``known`` that an Accept header prefers; ``preferred`` wins a tie.

    Each type gets the q of the most specific range that covers it (RFC 9110, 12.5.1); ranges that
    cannot be read are skipped.

    Raises
    ------
    NotAcceptable
        None of them has a q above zero.
    """
    if header is None or not header.strip():
        return preferred
    ranges = [parsed for item in _split(header)[:_MAX_RANGES] if (parsed := _range(item))]
    order = [preferred, *(media_type for media_type in known if media_type != preferred)]
    # max() returns the first of equals, so the order decides ties.
    best = max(order, key=lambda media_type: _quality(media_type, ranges))
    if _quality(best, ranges) <= 0:
        raise NotAcceptable(
            f"Accept is {header[:200]!r}; this server answers with {' or '.join(known)}"
        )
    return best


def refuse_encoded(content_encoding: str | None) -> None:
    """Raise UnsupportedMediaType if the body has a Content-Encoding."""
    encoding = (content_encoding or "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedMediaType(
            f"the Content-Encoding is {encoding[:64]!r}; expected the body as it is (identity)"
        )


def _refuse_parameters(query: bytes, operation: Operation) -> None:
    """Raise MalformedRequest if a query has a parameter that is read only from the body."""
    names = {name for name, _ in parse_qsl(query.decode("latin-1"), keep_blank_values=True)}
    if misplaced := names & operation.request.model_fields.keys():
        raise MalformedRequest(
            f'the query has "{min(misplaced)}"; {operation.name} reads its parameters from the body'
        )


def seconds_in(value: str | None, header: str) -> float | None:
    """Return the seconds in the value of ``header``; raises MalformedRequest if it is invalid."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise MalformedRequest(
            f"{header} is {value[:64]!r}; expected a number of seconds above zero"
        )
    return seconds


def _quality(media_type: str, ranges: Sequence[tuple[str, float]]) -> float:
    candidates = (media_type, f"{media_type.partition('/')[0]}/*", "*/*")
    for candidate in candidates:
        qualities = [quality for name, quality in ranges if name == candidate]
        if qualities:
            return max(qualities)
    return 0.0


def _range(item: str) -> tuple[str, float] | None:
    parsed = _parse(item)
    if parsed is None:
        return None
    name, parameters = parsed
    try:
        quality = float(parameters.get("q", "1"))
    except ValueError:
        return None
    return (name, quality) if 0 <= quality <= 1 else None


def _parse(text: str) -> tuple[str, dict[str, str]] | None:
    head = _MEDIA_RANGE.match(text)
    if head is None:
        return None
    parameters = {}
    at = head.end()
    while at < len(text):
        parameter = _PARAMETER.match(text, at)
        if parameter is None:
            return None
        at = parameter.end()
        if parameter[1]:
            parameters[parameter[1].lower()] = _unquoted(parameter[2])
    return f"{head[1]}/{head[2]}".lower(), parameters


def _unquoted(value: str) -> str:
    return re.sub(r"\\(.)", r"\1", value[1:-1]) if value.startswith('"') else value


def _split(header: str) -> list[str]:
    # Split at commas outside of quoted strings.
    return [item for item in re.findall(r'(?:[^,"]|"(?:[^"\\]|\\.)*")+', header) if item.strip()]
