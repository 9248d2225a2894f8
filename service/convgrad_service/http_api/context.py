"""What the ASGI scope of an exchange holds: its context, and our extensions of ASGI.

The extensions are zero-copy receiving and sending. Behind any other ASGI server they are missing,
and bodies and answers are copied part by part.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from starlette.types import Scope

from convgrad_service.engine.telemetry.record import RequestContext
from convgrad_service.http_api.connection_io import ReceiveInto

__all__ = [
    "CONNECTION",
    "Connection",
    "RequestContext",
    "begin_context",
    "client_of",
    "connection_of",
    "context_headers",
    "context_of",
    "http_span",
]

_KEY = "convgrad.context"
CONNECTION = "convgrad.connection"
"""The key of an ASGI scope under which our protocol offers itself."""


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


class Connection(Protocol):
    """See `protocol.GuardedProtocol`."""

    def body_left_bytes(self, content_length: int) -> int:
        """Return how much of the body the parser has not seen, so that `land` may receive it."""
        ...

    def land(self, targets: Sequence[memoryview | int]) -> ReceiveInto:
        """Receive the rest of the current body, whose length is known, into ``targets``."""
        ...

    def stop_landing(self) -> None:
        """Stop writing to the targets of `land`: drop the rest of the body."""
        ...

    def whole_body(self) -> bytearray | None:
        """Return the body if it is complete and no part has been delivered yet; else None."""
        ...

    def watch(self, gone: Callable[[], None] | None) -> None:
        """Have ``gone`` called if the client closes the connection, until called with None."""
        ...

    def unbuffered(self) -> AbstractContextManager[None]:
        """Have writes within the block wait until their bytes have been sent."""
        ...


def connection_of(scope: Scope) -> Connection | None:
    """Return the connection of an exchange if the server offers one and TLS is off."""
    if scope.get("scheme") == "https":
        return None
    connection: Connection | None = scope.get(CONNECTION)
    return connection
