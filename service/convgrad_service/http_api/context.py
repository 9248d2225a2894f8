"""The context of an HTTP exchange, stored in its ASGI scope, and its trace span."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from starlette.types import Scope

from convgrad_service.engine.telemetry.request_context import RequestContext

__all__ = [
    "RequestContext",
    "begin_context",
    "client_of",
    "context_headers",
    "context_of",
    "http_span",
]

_KEY = "convgrad.context"


def begin_context(scope: MutableMapping[str, Any]) -> RequestContext:
    """Create the context of an exchange, and store it in ``scope`` for `context_of`."""
    context = RequestContext.begin(
        value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"
    )
    scope[_KEY] = context
    return context


def context_of(scope: MutableMapping[str, Any]) -> RequestContext:
    """Return the context that the middleware stored in ``scope``."""
    context: RequestContext = scope[_KEY]
    return context


def context_headers(context: RequestContext) -> list[tuple[bytes, bytes]]:
    """Return the headers that every answer has."""
    headers = [
        (b"x-request-id", context.request_id.encode("latin-1")),
        (b"server-timing", context.server_timing().encode()),
    ]
    if (span := context.traceresponse) is not None:
        headers.append((b"traceresponse", span.encode()))
    return headers


def http_span(scope: Scope, context: RequestContext) -> tuple[str, dict[str, Any]]:
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
        "client.address": client_of(scope),
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


def client_of(scope: Scope) -> str:
    """Return the peer's address (the proxy's behind a proxy), or ""."""
    client = scope.get("client")
    return client[0] if client else ""
