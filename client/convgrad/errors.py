"""Every error that convgrad raises or returns, in one table and one class tree.

::

    ConvgradError
    ├── ServiceError                  has a code in the table below
    │   ├── MalformedRequest          malformed-request      400
    │   ├── InvalidProblem            invalid-problem        400
    │   ├── Unauthenticated           unauthenticated        401
    │   ├── PermissionDenied          permission-denied      403
    │   ├── NotFound                  not-found              404
    │   ├── MethodNotAllowed          method-not-allowed     405
    │   ├── NotAcceptable             not-acceptable         406
    │   ├── RequestTimeout            request-timeout        408  retryable
    │   ├── PayloadTooLarge           payload-too-large      413
    │   ├── ProblemTooLarge           problem-too-large      413
    │   ├── UnsupportedMediaType      unsupported-media-type 415
    │   ├── UnsupportedProblem        unsupported-problem    422
    │   ├── Overloaded                overloaded             429  retryable
    │   ├── Internal                  internal               500
    │   ├── DeviceOutOfMemory         device-out-of-memory   503  retryable
    │   ├── DeviceUnavailable         device-unavailable     503  retryable
    │   └── DeadlineExceeded          deadline-exceeded      504
    └── ClientError                   raised only by the SDK, not sent by a server
        ├── ConnectionFailed          no connection, or it broke           retryable
        ├── GatewayError              429, 502, 503 or 504 from a proxy    retryable
        ├── ClientTimeout             the server did not answer in time
        └── InvalidAnswer             not a valid convgrad answer

The service raises ServiceErrors independently of any transport; each transport, and the SDK, uses
`CODES` to convert between errors and statuses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

__all__ = [
    "CODES",
    "ClientError",
    "ClientTimeout",
    "ConnectionFailed",
    "ConvgradError",
    "DeadlineExceeded",
    "DeviceOutOfMemory",
    "DeviceUnavailable",
    "ErrorCode",
    "GatewayError",
    "Internal",
    "InvalidAnswer",
    "InvalidProblem",
    "MalformedRequest",
    "MethodNotAllowed",
    "NotAcceptable",
    "NotFound",
    "Overloaded",
    "PayloadTooLarge",
    "PermissionDenied",
    "ProblemTooLarge",
    "RequestTimeout",
    "ServiceError",
    "Unauthenticated",
    "UnsupportedMediaType",
    "UnsupportedProblem",
    "service_error",
]


@dataclass(frozen=True, slots=True)
class ErrorCode:
    """One row of the error table.

    ``grpc_status`` is None for errors that only occur over HTTP. ``retryable`` says whether the
    same request may succeed later, unchanged.
    """

    code: str
    title: str
    http_status: int
    grpc_status: str | None
    retryable: bool


CODES: dict[str, ErrorCode] = {
    row.code: row
    for row in (
        ErrorCode("malformed-request", "Malformed request", 400, "INVALID_ARGUMENT", False),
        ErrorCode("invalid-problem", "Invalid problem", 400, "INVALID_ARGUMENT", False),
        ErrorCode("unauthenticated", "Unauthenticated", 401, "UNAUTHENTICATED", False),
        ErrorCode("permission-denied", "Permission denied", 403, "PERMISSION_DENIED", False),
        ErrorCode("not-found", "Not found", 404, "NOT_FOUND", False),
        ErrorCode("method-not-allowed", "Method not allowed", 405, None, False),
        ErrorCode("not-acceptable", "Not acceptable", 406, None, False),
        ErrorCode("request-timeout", "Request timeout", 408, "UNAVAILABLE", True),
        ErrorCode("payload-too-large", "Payload too large", 413, "RESOURCE_EXHAUSTED", False),
        ErrorCode("problem-too-large", "Problem too large", 413, "RESOURCE_EXHAUSTED", False),
        ErrorCode(
            "unsupported-media-type", "Unsupported media type", 415, "INVALID_ARGUMENT", False
        ),
        ErrorCode("unsupported-problem", "Unsupported problem", 422, "UNIMPLEMENTED", False),
        ErrorCode("overloaded", "Overloaded", 429, "UNAVAILABLE", True),
        ErrorCode("internal", "Internal error", 500, "INTERNAL", False),
        ErrorCode("device-out-of-memory", "Device out of memory", 503, "UNAVAILABLE", True),
        ErrorCode("device-unavailable", "Device unavailable", 503, "UNAVAILABLE", True),
        ErrorCode("deadline-exceeded", "Deadline exceeded", 504, "DEADLINE_EXCEEDED", False),
    )
}


class ConvgradError(Exception):
    """Base class of all convgrad errors.

    ``detail`` is a one-sentence description. ``request_id`` identifies the request in the
    server's logs, or is None if it is unknown.
    """

    def __init__(self, detail: str, *, request_id: str | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.request_id = request_id

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickles do not call __init__, which may require arguments that are not in self.args.
        return type(self).__new__, (type(self), *self.args), vars(self)

    @property
    def retryable(self) -> bool:
        return False

    def __str__(self) -> str:
        if self.request_id is None:
            return self.detail
        return f"{self.detail} (request {self.request_id})"


class ServiceError(ConvgradError):
    """An error with a code in `CODES`, as raised by the service and sent by a server."""

    code: ClassVar[str]

    def __init__(
        self, detail: str, *, request_id: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(detail, request_id=request_id)
        self.retry_after_s = retry_after_s

    @property
    def row(self) -> ErrorCode:
        """This error's row in the table."""
        return CODES[self.code]

    @property
    def retryable(self) -> bool:
        return self.row.retryable


class MalformedRequest(ServiceError):
    """The request's bytes or fields cannot be read."""

    code = "malformed-request"


class InvalidProblem(ServiceError):
    """The request can be read, but its sizes or values contradict each other."""

    code = "invalid-problem"


class Unauthenticated(ServiceError):
    """The API key is missing or unknown."""

    code = "unauthenticated"


class PermissionDenied(ServiceError):
    """The API key is valid but lacks the required scope."""

    code = "permission-denied"


class NotFound(ServiceError):
    """The operation, path or stored tensor does not exist."""

    code = "not-found"


class MethodNotAllowed(ServiceError):
    """The path does not support this HTTP method."""

    code = "method-not-allowed"


class NotAcceptable(ServiceError):
    """The server cannot answer in a format that Accept allows."""

    code = "not-acceptable"


class RequestTimeout(ServiceError):
    """The request's body did not arrive in time."""

    code = "request-timeout"


class PayloadTooLarge(ServiceError):
    """The body has more bytes than the server accepts."""

    code = "payload-too-large"


class ProblemTooLarge(ServiceError):
    """The problem needs more memory or more FLOPs than the server allows."""

    code = "problem-too-large"


class UnsupportedMediaType(ServiceError):
    """The server does not support this Content-Type."""

    code = "unsupported-media-type"


class UnsupportedProblem(ServiceError):
    """The problem is valid, but no kernel of this server supports it; ``detail`` says why."""

    code = "unsupported-problem"


class Overloaded(ServiceError):
    """The server has no capacity at the moment; ``retry_after_s`` says when to retry."""

    code = "overloaded"


class Internal(ServiceError):
    """The server failed unexpectedly."""

    code = "internal"


class DeviceOutOfMemory(ServiceError):
    """The device does not have enough free memory at the moment."""

    code = "device-out-of-memory"


class DeviceUnavailable(ServiceError):
    """No device is available at the moment."""

    code = "device-unavailable"


class DeadlineExceeded(ServiceError):
    """The request's deadline passed before the answer was ready."""

    code = "deadline-exceeded"


class ClientError(ConvgradError):
    """An error raised only by the SDK, not sent by a server."""


class ConnectionFailed(ClientError):
    """No connection could be made, or it broke before the answer was complete."""

    @property
    def retryable(self) -> bool:
        return True


class ClientTimeout(ClientError):
    """The server did not answer within the client's own timeout."""


class GatewayError(ClientError):
    """A proxy or load balancer in front of the server answered in its place.

    ``status`` is 429, 502, 503 or 504. ``retry_after_s`` is the value of its Retry-After header,
    or None.
    """

    def __init__(
        self,
        detail: str,
        *,
        status: int,
        request_id: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(detail, request_id=request_id)
        self.status = status
        self.retry_after_s = retry_after_s

    @property
    def retryable(self) -> bool:
        return True


class InvalidAnswer(ClientError):
    """The answer is not a valid convgrad answer."""


_BY_CODE: dict[str, type[ServiceError]] = {
    error.code: error for error in ServiceError.__subclasses__()
}


def service_error(
    code: str, detail: str, *, request_id: str | None = None, retry_after_s: float | None = None
) -> ServiceError:
    """Make the error for a code in the table; an unknown code gives an `Internal` naming it."""
    error = _BY_CODE.get(code)
    if error is None:
        return Internal(f"{detail} (unknown code {code!r})", request_id=request_id)
    return error(detail, request_id=request_id, retry_after_s=retry_after_s)
