"""The base of all HTTP endpoints that compute: body, disconnects, response."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Coroutine, Hashable, Iterable, Sequence
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from convgrad.contract import Operation
from convgrad_service.engine.deadline import CancelScope, Deadline
from convgrad_service.engine.memory.lease import Lease
from convgrad_service.engine.pipeline import Pipeline
from convgrad_service.engine.request import ClientGone, ComputeRequest
from convgrad_service.http_api.body import Body, BodyLimits
from convgrad_service.http_api.connection import CONNECTION, Connection, connection_of
from convgrad_service.http_api.context import context_of
from convgrad_service.http_api.problem_details import Headers as HeaderList
from convgrad_service.http_api.response import (
    Chunk,
    refuse_encoded,
    requested_timeout_s,
    send_chunks,
)
from convgrad_service.server.settings import Settings

__all__ = ["HttpTransport"]

T = TypeVar("T")


class HttpTransport:
    """One exchange; see `Transport`. Subclasses decode the body and encode the answer."""

    streams = enforces_deadline = False
    key: Hashable | None = None
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
        allowed_s = requested_timeout_s(headers.get(b"x-request-timeout"))
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
        self._received = Body.of(self._scope, self._receive, limits, self.request.body_bytes)
        return self._received

    def watch(self, gone: Callable[[], None] | None) -> None:
        """See `Transport.watch`."""
        if self._connection is not None:
            self._connection.watch(gone)
        elif gone is not None and self._received is not None and self._received.ended:
            self._leaving = asyncio.ensure_future(self._left(gone))
        elif self._leaving is not None:
            self._leaving.cancel()

    async def respond(self, headers: HeaderList, chunks: Sequence[Chunk]) -> None:
        """Send a 200 with these headers and the chunks as its body."""
        await send_chunks(
            self._send,
            headers,
            chunks,
            connection=connection_of(self._scope),
            in_thread=self.pipeline.in_thread,
            waiting=self._unless_gone,
        )

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
