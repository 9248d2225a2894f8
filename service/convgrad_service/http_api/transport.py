"""The endpoints that compute: a request's headers, its body, disconnects, and the answer.

A body is a head, which is decoded to the request's fields, and the tensors' data: behind the head,
or as text within it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import pybase64
from starlette.types import Receive, Scope, Send

from convgrad.contract import Operation
from convgrad.errors import MalformedRequest
from convgrad_service.engine.admission import Deadline
from convgrad_service.engine.execution import Execution, Source
from convgrad_service.engine.memory.arena import Lease
from convgrad_service.engine.pipeline import Pipeline, Transport
from convgrad_service.engine.request import SMALL_BYTES, ComputeRequest
from convgrad_service.http_api.body import Body, WholeBody
from convgrad_service.http_api.connection import CONNECTION, Connection, connection_of
from convgrad_service.http_api.content_types import refuse_encoded
from convgrad_service.http_api.middleware import context_of
from convgrad_service.http_api.problem_details import Headers
from convgrad_service.server.settings import Settings

T = TypeVar("T")
HeadBytes = Callable[[Body], Awaitable[int]]
"""Finds out where a body's head ends."""

# Size of one write: large enough to be efficient, small enough that the protocol soon notices a
# client that stops reading.
_SEND_BYTES = 2**20
# Requests with longer heads are not cached.
_MAX_KEY_BYTES = 4096


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
            await transport.run()
        finally:
            transport.close()


@dataclass(frozen=True, slots=True)
class Content:
    """Where the tensors' data is: `Decoded.transport_data` of `HttpTransport`.

    ``sources`` are those within the head. ``spans`` are the names and sizes in bytes of those
    behind it, in their order. ``request`` is for subclasses.
    """

    sources: Mapping[str, Source] = field(default_factory=dict)
    spans: Sequence[tuple[str, int]] = ()
    request: Any = None


class HttpTransport(Transport):
    """One exchange. Subclasses decode the head and encode the answer."""

    enforces_deadline = reads_query = False

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
        self._awaiting_disconnect: asyncio.Task[None] | None = None
        self.body: Body | None = None  # until `receive`
        self.text = WholeBody(memoryview(b""))
        self.data_bytes: int | None = 0
        """Bytes behind the head; None if not known yet."""
        length = headers.get(b"content-length")
        context.operation = operation.name
        if b"content-encoding" in headers:
            refuse_encoded(headers[b"content-encoding"])
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

    async def run(self) -> None:
        """Answer the request; raises as `Pipeline.run`."""
        await self.pipeline.run(self.request, self)

    async def receive(self, head_bytes: HeadBytes | None) -> Body:
        """Receive the body's head and nothing behind it; without ``head_bytes``, all of it."""
        settings, engine = self._settings, self.pipeline.engine
        most = settings.max_json_bytes if head_bytes is None else settings.max_body_bytes
        body = self.body = Body(self._scope, self._receive, settings, most, engine)
        if head_bytes is None:
            self.text = await body.read_all(engine)
            return body
        size = await head_bytes(body)
        self.text = WholeBody(memoryview(await body.peek(size))[:size])
        length = body.content_length
        self.data_bytes = None if length is None else length - size
        return body

    def key(self) -> tuple[bytes, int] | None:
        """Return a key of the head and the size of what is behind it; None if not to be cached."""
        if self.data_bytes is None or len(self.text.data) > _MAX_KEY_BYTES:
            return None
        return bytes(self.text.data), self.data_bytes

    @property
    def body_lease(self) -> Lease | None:
        return self.text.lease

    @property
    def decodes_inline(self) -> bool:
        return len(self.text.data) <= SMALL_BYTES

    def refuse_over_limit(self, content: Content) -> None:
        """Raise PayloadTooLarge if a body whose length was not known is to be too long."""
        if self.body is not None:
            behind = sum(size for _, size in content.spans)
            self.body.refuse_over_limit(len(self.text.data) + behind)

    async def fill(self, execution: Execution) -> None:
        content: Content = execution.transport_data
        body, timings = self.body, self.request.timings
        if content.sources:
            timings.enter("decode")
            await execution.fill(content.sources, body_lease=self.text.lease)
        if body is not None and (content.spans or not body.ended):
            timings.enter("receive")
            views = execution.input_views()
            targets = [views.get(name, size_bytes) for name, size_bytes in content.spans]
            await body.read_into(targets, skip=len(self.text.data))
        self.text.release()

    def watch(self, on_disconnect: Callable[[], None] | None) -> None:
        """See `Transport.watch`."""
        if self._connection is not None:
            self._connection.watch(on_disconnect)
        elif on_disconnect is not None and self.body is not None and self.body.ended:
            self._awaiting_disconnect = asyncio.ensure_future(self._await_disconnect(on_disconnect))
        elif self._awaiting_disconnect is not None:
            self._awaiting_disconnect.cancel()

    def encode(self, execution: Execution) -> tuple[Headers, Sequence[Chunk]]:
        """Return the answer's headers and body, which may refer to the outputs' memory."""
        raise NotImplementedError

    async def send(self, execution: Execution) -> None:
        self.request.timings.enter("encode")
        headers, chunks = await self.pipeline.in_thread(
            lambda: self.encode(execution),
            execution.lease,
            inline=execution.layout.output_bytes <= SMALL_BYTES,
        )
        self.request.timings.enter(None)
        await self.respond(headers, chunks)

    async def respond(self, headers: Headers, chunks: Sequence[Chunk]) -> None:
        """Send a 200 with these headers and the chunks as its body."""
        await send_chunks(self._scope, self._send, headers, chunks, self.pipeline.in_thread)

    def close(self) -> None:
        """Release the request's memory."""
        self.text.release()

    async def _await_disconnect(self, on_disconnect: Callable[[], None]) -> None:
        # After the whole body, the only message left is the disconnect.
        with contextlib.suppress(asyncio.CancelledError):
            await self._receive()
            on_disconnect()


def _headers(pairs: Iterable[tuple[bytes, bytes]]) -> dict[bytes, str]:
    headers: dict[bytes, str] = {}
    for name, value in pairs:
        text = value.decode("latin-1")
        headers[name] = f"{headers[name]},{text}" if name in headers else text
    return headers


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


class LazyBase64:
    """The base64 of some bytes, encoded when it is sent."""

    def __init__(self, part: memoryview) -> None:
        self._part = part

    def __len__(self) -> int:
        return -(-len(self._part) // 3) * 4

    def encoded(self) -> bytes:
        """The text."""
        return pybase64.b64encode(self._part)


Chunk = bytes | memoryview | LazyBase64
"""A part of an answer, of one byte an item; base64 is encoded when it is its turn."""


async def send_chunks(
    scope: Scope,
    send: Send,
    headers: Headers,
    chunks: Sequence[Chunk],
    in_thread: Callable[[Callable[[], bytes]], Awaitable[bytes]],
) -> None:
    """Send a 200 with these headers, Content-Length, and the chunks as its body.

    When it returns, nothing refers to the chunks' memory any longer: they have been sent, or copied
    behind a server without a `Connection`. ``in_thread`` runs deferred encoding.
    """
    length = sum(map(len, chunks))
    headers = [*headers, (b"content-length", str(length).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    if length <= SMALL_BYTES:
        body = b"".join(
            [chunk.encoded() if isinstance(chunk, LazyBase64) else chunk for chunk in chunks]
        )
        await send({"type": "http.response.body", "body": body, "more_body": False})
        return
    copies = connection_of(scope) is None
    for chunk in chunks:
        encoded = await in_thread(chunk.encoded) if isinstance(chunk, LazyBase64) else chunk
        data = memoryview(encoded).cast("B")
        for at in range(0, len(data), _SEND_BYTES):
            part: bytes | memoryview = data[at : at + _SEND_BYTES]
            if copies:
                part = bytes(part)
            await send({"type": "http.response.body", "body": part, "more_body": True})
    # Where a write waits until the one before has been sent, this waits for the last.
    await send({"type": "http.response.body", "body": b"", "more_body": False})
