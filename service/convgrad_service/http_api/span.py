"""What a span says of an HTTP exchange, by OpenTelemetry's semantic conventions."""

from __future__ import annotations

from typing import Any

from starlette.types import Scope

from convgrad_service.http_api.context import RequestContext

__all__ = ["client_of", "http_span"]


def http_span(scope: Scope, context: RequestContext) -> tuple[str, dict[str, Any]]:
    """The name and the attributes of the span of an exchange that computed, or should have.

    Its path is an operation's, of which there are few: it can stand for its route.
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
    if context.status:  # none where the client had gone
        attributes["http.response.status_code"] = context.status
    if server := scope.get("server"):
        attributes["server.address"] = server[0]
        if server[1] is not None:
            attributes["server.port"] = server[1]
    return f"{method} {path}", attributes


def client_of(scope: Scope) -> str:
    """The address that an exchange came from: a proxy's where one is between; "" if unknown."""
    client = scope.get("client")
    return client[0] if client else ""
