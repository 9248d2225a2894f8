"""Errors as ``application/problem+json`` (RFC 9457)."""

from __future__ import annotations

import difflib
import json
import math
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException

from convgrad.contract import OPERATIONS
from convgrad.errors import (
    Internal,
    MalformedRequest,
    MethodNotAllowed,
    NotFound,
    ServiceError,
    UnsupportedMediaType,
)

MEDIA_TYPE = "application/problem+json"
Headers = list[tuple[bytes, bytes]]


class HeadRefused(MalformedRequest):
    """A head that must be refused with a given status."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class EncodingRefused(UnsupportedMediaType):
    """A Content-Encoding that is not read, in distinction from a media type (RFC 9110, 12.5.3)."""


def problem_details(error: ServiceError, request_id: str) -> tuple[int, Headers, bytes]:
    """Return status, headers and body of an error answer.

    The body's field ``error`` repeats ``detail`` for clients of the Open Inference Protocol.
    """
    row = error.row
    status = error.status if isinstance(error, HeadRefused) else row.http_status
    body: dict[str, Any] = {
        "type": f"urn:convgrad:error:{row.code}",
        "title": row.title,
        "status": status,
        "detail": error.detail,
        "code": row.code,
        "request_id": request_id,
        "error": error.detail,
    }
    # ensure_ascii: a detail may quote lone surrogates that the client sent.
    encoded = json.dumps(body).encode("ascii")
    headers = [
        (b"content-type", MEDIA_TYPE.encode()),
        (b"content-length", str(len(encoded)).encode()),
        # An error applies to this request only, so it must not be cached.
        (b"cache-control", b"no-store"),
    ]
    if status == HTTPStatus.UNAUTHORIZED:
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, EncodingRefused):
        headers.append((b"accept-encoding", b"identity"))
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode()))
    return status, headers, encoded


def internal(request_id: str) -> Internal:
    """Return the error for an internal fault, with only the request id."""
    return Internal(f"an internal error; the server's log has it under request {request_id}")


def from_http_exception(
    error: HTTPException, method: str, path: str, *, management: bool = False
) -> ServiceError:
    """Convert an error that Starlette or FastAPI raised, such as 404 and 405."""
    if error.status_code == 404 and management:
        return NotFound(f"no resource at {path[:200]!r}; this port serves health and metrics only")
    if error.status_code == 404:
        name = path.rstrip("/").rpartition("/")[2][:64]
        near = difflib.get_close_matches(name, OPERATIONS, n=1)
        hint = f", did you mean '/{near[0]}'?" if near else ""
        return NotFound(
            f"no resource at {path[:200]!r}{hint}; GET /operations lists the operations"
        )
    if error.status_code == 405:
        # Starlette lists a set, in any order.
        allowed = ", ".join(sorted((error.headers or {})["Allow"].split(", ")))
        return MethodNotAllowed(f"{path[:200]} takes {allowed}, not {method}")
    return MalformedRequest(str(error.detail))
