"""Around every exchange: its id and timings on the answer, errors as problem+json, log, metrics.

A pure ASGI middleware, outside of routing, so that 404s, the docs and failures get the same. It
also ends connections whose request body nobody read: told so by ``Connection: close``, and with
what is still arriving read and dropped for a moment, because closing a socket with unread bytes
makes the kernel reset it, and the client would see that in place of the answer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from convgrad.errors import ServiceError
from convgrad_service.engine.pipeline import Pipeline
from convgrad_service.engine.request import ClientGone
from convgrad_service.engine.telemetry.access_log import access as _access
from convgrad_service.engine.telemetry.access_log import log_exchange
from convgrad_service.engine.telemetry.request_context import TRACE_HEADERS
from convgrad_service.engine.telemetry.tracing import Traces
from convgrad_service.http_api.connection import CONNECTION, Connection, connection_of
from convgrad_service.http_api.context import RequestContext, begin_context, told_headers
from convgrad_service.http_api.problem_details import internal, problem_details
from convgrad_service.http_api.receive_into import ReceiveInto
from convgrad_service.http_api.response import WHOLE
from convgrad_service.http_api.span import client_of, http_span
from convgrad_service.security.keys import KEY_REFUSALS, KeyRing
from convgrad_service.security.scopes import require_path

__all__ = ["ExchangeMiddleware"]

_log = logging.getLogger("convgrad.http")

# A body that nobody wanted has usually arrived already, if it is not a large one: then the
# connection can be kept. A new one for every refusal would cost a server in overload too much.
_MODEST_BODY_BYTES, _MODEST_BODY_WAIT_S = 4 * 2**20, 0.05
_LINGER_S = 2.0

# What a platform asks has no key, and what a browser opens cannot have one: the description of the
# API and the page's files, which are the same on every server.
_OPEN_PATHS = ("/v2/health/live", "/v2/health/ready", "/", "/docs", "/openapi.json", "/ui")
_OPEN_FOLDERS = ("/docs/assets/", "/ui/")
_QUIET_PATHS = ("/v2/health/", "/metrics")  # asked every few seconds, by machines


Endpoints = Mapping[str, tuple[ASGIApp, Mapping[str, str]]]
"""By a whole path what answers a POST to it, and the parameters that a route finds in the path."""


class ExchangeMiddleware:
    """Wraps the application in the exchange's bookkeeping.

    A POST to one of the paths in ``endpoints`` goes straight there. The application has routes for
    them as well, which describe them and refuse other methods; but it asks some forty routes one
    after another, within middleware of its own. ``wrapped`` says that other middleware is around
    this one, so that whole answers must not go past it to the connection.
    """

    def __init__(
        self,
        app: ASGIApp,
        pipeline: Pipeline,
        keys: KeyRing | None = None,
        traces: Traces | None = None,
        endpoints: Endpoints = MappingProxyType({}),
        *,
        wrapped: bool = False,
    ) -> None:
        self.app = app
        self.pipeline = pipeline
        self.keys = keys
        self.traces = traces
        self.endpoints = endpoints
        self.wrapped = wrapped

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            # What GET would answer; the server below, which keeps its own scope, sends no body.
            scope = {**scope, "method": "GET"}
        context = begin_context(scope)
        if self.traces is not None:
            context.trace = _trace(scope)
            self.traces.begin(context)
        try:
            await self._run(scope, receive, send, context)
        finally:
            self._record(scope, context)

    async def _run(
        self, scope: Scope, receive: Receive, send: Send, context: RequestContext
    ) -> None:
        exchange = _Exchange(scope, receive, send, context, wrapped=self.wrapped)
        try:
            if self.keys is not None and not _is_open(scope["path"]):
                context.caller = self.keys.caller(_authorization(scope))
                require_path(context.caller, scope["method"], scope["path"])
            found = self.endpoints.get(scope["path"]) if scope["method"] == "POST" else None
            if found is None or scope.get("root_path"):
                await self.app(scope, exchange.receive, exchange.send)
            else:
                endpoint, scope["path_params"] = found
                await endpoint(scope, exchange.receive, exchange.send)
        except ClientGone:
            context.code = "client-gone"
        except ServiceError as error:
            await exchange.refuse(error)
        except asyncio.CancelledError:
            context.code = "cancelled"
            raise
        # Whatever went wrong, the caller gets an id and the log gets the rest.
        except Exception:
            _log.exception("request_id=%s %s failed", context.request_id, scope["path"])
            if exchange.started:
                # The headers have left: only a broken connection can still say "failed".
                context.code = "internal"
                raise
            await exchange.refuse(internal(context.request_id))

    def _record(self, scope: Scope, context: RequestContext) -> None:
        # Whose key does not let it in is refused before it is known what for.
        if context.operation is not None or context.code in KEY_REFUSALS:
            self.pipeline.observe(
                context.operation or "",
                "http",
                context.code,
                context.timings,
                received_bytes=context.received_bytes,
                sent_bytes=context.sent_bytes,
                key=context.owner,
            )
        if self.traces is not None:
            name, attributes = http_span(scope, context)
            self.traces.end(context, name, attributes, failed=context.status >= 500)
        quiet = context.status < 400 and scope["path"].startswith(_QUIET_PATHS)
        level = logging.DEBUG if quiet else logging.INFO
        if not _access.isEnabledFor(level):
            return
        if self.traces is None:
            context.trace = _trace(scope)
        context.client = client_of(scope)
        path = scope["path"][:200]
        log_exchange(
            level, context, {"method": scope["method"], "path": path, "status": context.status}
        )


def _trace(scope: Scope) -> dict[str, str]:
    named = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
    return {name: value for name, value in named if name in TRACE_HEADERS}


def _is_open(path: str) -> bool:
    return path in _OPEN_PATHS or path.startswith(_OPEN_FOLDERS)


def _authorization(scope: Scope) -> str | None:
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    return values[0].decode("latin-1") if values else None


class _Exchange:
    """``receive`` and ``send`` of one exchange, with its bookkeeping."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        context: RequestContext,
        *,
        wrapped: bool,
    ) -> None:
        self.started = False
        self._wrapped = wrapped
        self._scope = scope
        self._receive, self._send, self._context = receive, send, context
        headers: dict[bytes, bytes] = dict(scope["headers"])
        length = headers.get(b"content-length", b"0")
        self._declared_bytes = int(length) if length.isdigit() else 0
        self._body_unread = self._declared_bytes > 0 or b"transfer-encoding" in headers
        # A client that waits for "100 Continue" has sent nothing until we first receive.
        self._body_withheld = headers.get(b"expect", b"").lower() == b"100-continue"
        self._linger = False
        self._connection = connection_of(scope)
        self._dropping: ReceiveInto | None = None
        self._dropped_bytes = 0

    async def receive(self) -> Message:
        self._body_withheld = False
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._body_unread = False
        else:
            self._context.received_bytes += len(message.get("body", b""))
            self._body_unread = message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == WHOLE:
            await self._send_whole(message)
            return
        if message["type"] == "http.response.start":
            message = await self._with_headers(message)
            self.started = True
        elif message["type"] == "http.response.body":
            self._context.sent_bytes += len(message.get("body", b""))
            if self._linger and not message.get("more_body", False):
                await self._send({**message, "more_body": True})
                await self._drop_body(_LINGER_S)
                message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._send(message)

    async def _send_whole(self, message: Message) -> None:
        context, parts = self._context, message["parts"]
        if self._wrapped:
            # Whoever wraps us sees the messages of ASGI alone, and adds headers of its own.
            body = b"".join(parts)
            headers = [*message["headers"], (b"content-length", b"%d" % len(body))]
            await self.send({"type": "http.response.start", "status": 200, "headers": headers})
            await self.send({"type": "http.response.body", "body": body})
            return
        connection: Connection = self._scope[CONNECTION]
        context.status, context.sent_bytes = 200, sum(map(len, parts))
        headers = [
            *message["headers"],
            *told_headers(context),
            (b"content-length", b"%d" % context.sent_bytes),
        ]
        self.started = True
        await connection.answer(b"".join([b"%s: %s\r\n" % header for header in headers]), parts)

    async def refuse(self, error: ServiceError) -> None:
        """Answer with ``error``; once headers have left, break the connection by raising it."""
        self._context.code = error.code
        if self.started:
            raise error
        status, headers, body = problem_details(error, self._context.request_id)
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})

    async def _with_headers(self, message: Message) -> Message:
        if self._body_unread and not self._body_withheld:
            if 0 < self._declared_bytes <= _MODEST_BODY_BYTES:
                await self._drop_body(_MODEST_BODY_WAIT_S)
            # After a 408 nothing is on its way.
            self._linger = message["status"] != 408 and self._body_unread
        headers: list[Any] = list(message.get("headers", []))
        headers += told_headers(self._context)
        if self._body_unread:
            headers.append((b"connection", b"close"))
        self._context.status = message["status"]
        return {**message, "headers": headers}

    async def _drop_body(self, patience_s: float) -> None:
        until_s = time.monotonic() + patience_s
        try:
            if not await self._dropped_unparsed(patience_s):
                return
            while self._body_unread:
                async with asyncio.timeout(max(until_s - time.monotonic(), 0)):
                    await self.receive()
                # The timeout strikes only where receive() waits, which in a flood it never does.
                if time.monotonic() > until_s:
                    return
        except TimeoutError:
            return

    async def _dropped_unparsed(self, patience_s: float) -> bool:
        """Receive the rest of the body to nowhere, past the parser, where that can be done.

        Whether none is left that comes so: what then is, `receive` gets.
        """
        if self._dropping is None:
            connection = self._connection
            if connection is None or connection.body_left_bytes(self._declared_bytes) <= 0:
                return True
            self._dropping = connection.land([self._declared_bytes - self._context.received_bytes])
        landing = self._dropping
        await asyncio.wait([landing.landed], timeout=patience_s)
        self._context.received_bytes += landing.received_bytes - self._dropped_bytes
        self._dropped_bytes = landing.received_bytes
        return landing.landed.done()
