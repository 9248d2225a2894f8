"""The middleware around every exchange: request id, timings, problem+json errors, log, metrics.

It is pure ASGI and outside of routing, so that it covers 404s, the docs and failures too. It also
ends connections whose request body was not read: with ``Connection: close``, and after reading and
dropping for a moment what still arrives. Closing a socket with unread bytes makes the kernel send a
reset, which the client may see before the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping, MutableMapping
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from convgrad.errors import ServiceError
from convgrad_service.engine.admission import ClientDisconnected
from convgrad_service.engine.pipeline import Pipeline
from convgrad_service.engine.telemetry.record import (
    TRACE_HEADERS,
    ExchangeLine,
    RequestContext,
    access,
)
from convgrad_service.engine.telemetry.tracing import Traces
from convgrad_service.http_api.connection import ReceiveInto, connection_of
from convgrad_service.http_api.problem_details import internal, problem_details
from convgrad_service.security.keys import KEY_REFUSALS, KeyRing, require_path

_KEY = "convgrad.context"
_log = logging.getLogger("convgrad.http")
# Unless it is large, the body of a refused request has usually arrived already. Then the connection
# is kept: a new one for every refusal would cost an overloaded server too much.
_MODEST_BODY_BYTES, _MODEST_BODY_WAIT_S = 4 * 2**20, 0.05
_LINGER_S = 2.0
# Health checks need no key. Nor do the API's description and the page's files, for which a browser
# could not send one; they reveal only whether the server has keys.
_OPEN_PATHS = ("/v2/health/live", "/v2/health/ready", "/", "/docs", "/openapi.json", "/ui")
_OPEN_FOLDERS = ("/docs/assets/", "/ui/")
_QUIET_PATHS = ("/v2/health/", "/metrics")  # polled by machines, so logged at debug level
Endpoints = Mapping[str, ASGIApp]
"""The POST endpoint of each path."""


def context_of(scope: MutableMapping[str, Any]) -> RequestContext:
    """Return the context that the middleware stored in ``scope``."""
    context: RequestContext = scope[_KEY]
    return context


class ExchangeMiddleware:
    """Wraps the application.

    A POST to a path in ``endpoints`` bypasses the application, which would try some forty routes in
    turn within middleware of its own. It has routes for these paths too, for OpenAPI and to refuse
    other methods.
    """

    def __init__(
        self,
        app: ASGIApp,
        pipeline: Pipeline,
        keys: KeyRing | None = None,
        traces: Traces | None = None,
        endpoints: Endpoints = MappingProxyType({}),
    ) -> None:
        self.app = app
        self.pipeline = pipeline
        self.keys = keys
        self.traces = traces
        self.endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            # Answer as GET; the server, which has its own scope, omits the body.
            scope = {**scope, "method": "GET"}
        context = scope[_KEY] = RequestContext.begin(
            value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"
        )
        if self.traces is not None:
            context.trace = _trace(scope)
            self.traces.begin(context)
        exchange = _Exchange(scope, receive, send, context, self.pipeline)
        path = _route_path(scope)
        try:
            if self.keys is not None and not needs_no_key(path):
                context.caller = self.keys.caller(Headers(scope=scope).get("authorization"))
                require_path(context.caller, scope["method"], path)
            found = self.endpoints.get(path) if scope["method"] == "POST" else None
            await (found or self.app)(scope, exchange.receive, exchange.send)
        except ClientDisconnected:
            context.code = "cancelled" if self.pipeline.aborted else "client-gone"
        except ServiceError as error:
            await exchange.refuse(error)
        except asyncio.CancelledError:
            context.code = "cancelled"
            raise
        # The caller learns only the request id; the log has the rest.
        except Exception:
            _log.exception("request_id=%s %s failed", context.request_id, scope["path"])
            if exchange.started:
                # The headers have been sent: only a broken connection can still signal the failure.
                context.code = "internal"
                raise
            await exchange.refuse(internal(context.request_id))
        finally:
            self._record(scope, context)

    def _record(self, scope: Scope, context: RequestContext) -> None:
        # A bad key is refused before the operation is known.
        if context.operation is not None or context.code in KEY_REFUSALS:
            self.pipeline.engine.observe(context.record("http"))
        if self.traces is not None:
            name, attributes = _span(scope, context)
            self.traces.end(context, name, attributes, failed=context.status >= 500)
        quiet = context.status < 400 and _route_path(scope).startswith(_QUIET_PATHS)
        level = logging.DEBUG if quiet else logging.INFO
        if not access.isEnabledFor(level):
            return
        if self.traces is None:
            context.trace = _trace(scope)
        context.client = _client(scope)
        path = scope["path"][:200]
        fields = {"method": scope["method"], "path": path, "status": context.status}
        access.log(level, ExchangeLine(context, fields))


def _trace(scope: Scope) -> dict[str, str]:
    return {name: value for name, value in Headers(scope=scope).items() if name in TRACE_HEADERS}


def _client(scope: Scope) -> str:
    """Return the peer's address (the proxy's behind a proxy), or ""."""
    client = scope.get("client")
    return client[0] if client else ""


def _span(scope: Scope, context: RequestContext) -> tuple[str, dict[str, Any]]:
    """Return name and attributes of an exchange's span, by OpenTelemetry's conventions.

    Only paths of operations have spans; those are few, so the path can serve as the route.
    """
    method, path = scope["method"], scope["path"]
    attributes: dict[str, Any] = {
        "http.request.method": method,
        "http.route": path,
        "url.path": path,
        "url.scheme": scope.get("scheme", "http"),
        "network.protocol.version": scope.get("http_version", "1.1"),
        "client.address": _client(scope),
        "http.request.body.size": context.received_bytes,
        "http.response.body.size": context.sent_bytes,
    }
    if context.status:  # 0 if the client had gone
        attributes["http.response.status_code"] = context.status
    if server := scope.get("server"):
        attributes["server.address"] = server[0]
        if server[1] is not None:
            attributes["server.port"] = server[1]
    return f"{method} {path}", attributes


def _route_path(scope: Scope) -> str:
    """Return the path below that where the application is mounted, as its router does."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


def needs_no_key(path: str) -> bool:
    """Return whether a path is answered without an API key even by servers that have keys."""
    return path in _OPEN_PATHS or path.startswith(_OPEN_FOLDERS)


class _Exchange:
    """``receive`` and ``send`` of one exchange."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        context: RequestContext,
        pipeline: Pipeline,
    ) -> None:
        self.started = False
        self._pipeline = pipeline
        self._receive, self._send, self._context = receive, send, context
        headers: dict[bytes, bytes] = dict(scope["headers"])
        length = headers.get(b"content-length", b"0")
        self._declared_bytes = int(length) if length.isdigit() else 0
        self._body_unread = self._declared_bytes > 0 or b"transfer-encoding" in headers
        # A client that waits for "100 Continue" sends nothing before our first receive.
        expects = headers.get(b"expect", b"").lower() == b"100-continue"
        self._body_withheld = expects and scope["http_version"] != "1.0"
        self._linger = False
        self._connection = connection_of(scope)
        self._dropping: ReceiveInto | None = None

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

    async def refuse(self, error: ServiceError) -> None:
        """Answer with ``error``; raise it, to break the connection, if headers have been sent."""
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
            # After a 408 nothing more arrives.
            self._linger = message["status"] != 408 and self._body_unread
        context = self._context
        headers = [
            *message.get("headers", []),
            (b"x-request-id", context.request_id.encode("latin-1")),
            (b"server-timing", context.server_timing().encode()),
        ]
        if (span := context.traceresponse) is not None:
            headers.append((b"traceresponse", span.encode()))
        # While the server drains, a client that kept its connection would never be sent elsewhere.
        if self._body_unread or self._pipeline.leaving:
            headers.append((b"connection", b"close"))
        context.status = message["status"]
        return {**message, "headers": headers}

    async def _drop_body(self, patience_s: float) -> None:
        """Read and drop the rest of the body, unparsed if possible, for so long at most."""
        until_s = time.monotonic() + patience_s
        connection, declared_bytes = self._connection, self._declared_bytes
        if (
            self._dropping is None
            and connection is not None
            and connection.body_left_bytes(declared_bytes) > 0
        ):
            left_bytes = declared_bytes - self._context.received_bytes
            self._dropping = connection.receive_into([left_bytes])
        if self._dropping is not None:
            await asyncio.wait([self._dropping.filled], timeout=patience_s)
            self._context.received_bytes = declared_bytes - self._dropping.left_bytes
            if not self._dropping.filled.done():
                return
        # The timeout acts only while receive() waits, which it never does in a flood.
        with contextlib.suppress(TimeoutError):
            while self._body_unread and (left_s := until_s - time.monotonic()) > 0:
                async with asyncio.timeout(left_s):
                    await self.receive()


class ExchangeApp(FastAPI):
    """FastAPI without its own outer middleware, which takes longer than a small request."""

    exchange: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See `ExchangeMiddleware`."""
        await self.exchange(scope, receive, send)

    def build_middleware_stack(self) -> ASGIApp:
        """Omit the outermost layer, which would answer errors before `ExchangeMiddleware` could."""
        outermost = super().build_middleware_stack()
        assert isinstance(outermost, ServerErrorMiddleware)  # noqa: S101 - as Starlette has it
        return outermost.app
