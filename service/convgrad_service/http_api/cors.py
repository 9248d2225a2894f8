"""CORS: the origins whose scripts may read answers. Off by default."""

from __future__ import annotations

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

__all__ = ["with_cors"]

_REQUEST_HEADERS = (
    "Authorization",
    "Content-Type",
    "Inference-Header-Content-Length",
    "X-Request-Id",
    "X-Request-Timeout",
    "X-Time-To-Live",
)
_ANSWER_HEADERS = (
    "Inference-Header-Content-Length",
    "Retry-After",
    "Server-Timing",
    "X-Report",
    "X-Request-Id",
)


def with_cors(app: ASGIApp, origins: str) -> ASGIApp:
    """Wrap ``app`` for a comma-separated list of origins; preflight requests need no API key."""
    return CORSMiddleware(
        app,
        allow_origins=[origin.strip() for origin in origins.split(",") if origin.strip()],
        allow_methods=["GET", "POST", "PUT", "DELETE"],
        allow_headers=_REQUEST_HEADERS,
        expose_headers=_ANSWER_HEADERS,
        max_age=3600,
    )
