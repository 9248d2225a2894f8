"""The base of all HTTP endpoints that compute, and the transport of every operation.

It covers bodies, disconnects and responses.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from convgrad.contract import Operation
from convgrad.errors import ServiceError
from convgrad_service.engine.execution import Execution, Result
from convgrad_service.engine.memory.arena import Lease
from convgrad_service.engine.pipeline import Pipeline, Transport
from convgrad_service.engine.request import (
    SMALL_BYTES,
    CancelScope,
    ClientGone,
    ComputeRequest,
    Deadline,
    Decoded,
)
from convgrad_service.http_api.body import Body, BodyLimits
from convgrad_service.http_api.codecs import (
    ANSWER_FORMS,
    BODY_FORMS,
    AnswerForm,
    Arriving,
    BodyForm,
    Chunk,
)
from convgrad_service.http_api.connection import CONNECTION, Connection, connection_of
from convgrad_service.http_api.json_forms import EncodedLater
from convgrad_service.http_api.middleware import context_of
from convgrad_service.http_api.negotiation import (
    choose_accepted,
    match_content_type,
    refuse_encoded,
    seconds_in,
)
from convgrad_service.http_api.problem_details import Headers
from convgrad_service.server.settings import Settings

__all__ = ["BodyTransport", "Endpoint", "HttpTransport", "OperationTransport", "send_chunks"]

T = TypeVar("T")
Wait = Callable[[Coroutine[Any, Any, int]], Awaitable[int]]

# Size of one write: large enough to be efficient, small enough that the protocol soon notices a
# client that stops reading.
_SEND_BYTES = 2**20


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

    streams = enforces_deadline = False
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
        self._received = Body(self._receive, self.request.body_bytes, limits, self._scope)
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


class BodyTransport(HttpTransport):
    """A request with a body of any `BodyForm`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        content_type = self.headers.get(b"content-type")
        self._form = self._choose_forms(content_type, self.headers.get(b"accept", ""))
        self._reader = self._form.reader(content_type or "")

    def _choose_forms(self, content_type: str | None, accept: str) -> BodyForm:
        """Return the form of the body; subclasses choose that of the answer too."""
        return BODY_FORMS[match_content_type(content_type, tuple(BODY_FORMS))]

    async def head(self) -> Hashable | None:
        self._body = self.body(getattr(self._settings, self._form.limit))
        return await self._reader.head(self._body, self.pipeline)

    @property
    def body_lease(self) -> Lease | None:  # type: ignore[override]
        return self._reader.body_lease

    @property
    def decodes_inline(self) -> bool:  # type: ignore[override]
        return self._reader.decodes_inline

    def decode(self) -> Decoded:
        fields, notes = self._reader.fields(self.operation)
        return Decoded(fields, notes=notes)

    async def fill(self, execution: Execution) -> None:
        await self._reader.fill(self._body, execution, self.request.timings)

    def close(self) -> None:
        self._reader.close()


def _headers(pairs: Iterable[tuple[bytes, bytes]]) -> dict[bytes, str]:
    headers: dict[bytes, str] = {}
    for name, value in pairs:
        text = value.decode("latin-1")
        headers[name] = f"{headers[name]},{text}" if name in headers else text
    return headers


class OperationTransport(BodyTransport):
    """A body of any `BodyForm`, and an answer of any `AnswerForm`."""

    def _choose_forms(self, content_type: str | None, accept: str) -> BodyForm:
        came_in, self._form_out = _forms(content_type, accept)
        self.streams = self._form_out.streams
        return came_in

    async def head(self) -> Hashable | None:
        key = await super().head()
        return None if key is None else (key, self._form_out.media_type)

    def decode(self) -> Decoded:
        return replace(super().decode(), refuse=self._form_out.refuse)

    async def send(self, execution: Execution, result: Result) -> None:
        form = self._form_out
        with self.request.timings.stage("encode"):
            small = sum(tensor.spec.size_bytes for tensor in execution.layout.outputs)
            chunks = await self.pipeline.in_thread(
                lambda: form.encode(execution, result),
                execution.lease,
                inline=small <= SMALL_BYTES,
            )
        await self.respond(form.headers(result), chunks)


@lru_cache(maxsize=256)
def _forms(content_type: str | None, accept: str) -> tuple[BodyForm, AnswerForm]:
    came_in = BODY_FORMS[match_content_type(content_type, tuple(BODY_FORMS))]
    return came_in, ANSWER_FORMS[choose_accepted(accept, tuple(ANSWER_FORMS), came_in.answered)]


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
