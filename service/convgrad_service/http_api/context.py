"""The context of an HTTP exchange, kept in its scope."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from convgrad_service.engine.telemetry.request_context import RequestContext

__all__ = ["RequestContext", "begin_context", "context_of", "told_headers"]

_KEY = "convgrad.context"


def begin_context(scope: MutableMapping[str, Any]) -> RequestContext:
    """The context of the exchange of ``scope``, kept there for `context_of`."""
    context = RequestContext.begin(
        value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"
    )
    scope[_KEY] = context
    return context


def context_of(scope: MutableMapping[str, Any]) -> RequestContext:
    """The context that the middleware put into ``scope``."""
    context: RequestContext = scope[_KEY]
    return context


def told_headers(context: RequestContext) -> list[tuple[bytes, bytes]]:
    """What every answer says of its exchange."""
    headers = [
        (b"x-request-id", context.request_id.encode("latin-1")),
        (b"server-timing", context.server_timing().encode()),
    ]
    if (span := context.traceresponse) is not None:
        headers.append((b"traceresponse", span.encode()))
    return headers
