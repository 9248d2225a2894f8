"""Events that a client reports to event hooks and to the logger ``convgrad``.

Requests, responses and failures are logged at DEBUG, retries at INFO.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypedDict

from convgrad.errors import ConvgradError

__all__ = [
    "EventHooks",
    "FailureEvent",
    "ProgressEvent",
    "RequestEvent",
    "ResponseEvent",
    "RetryEvent",
    "check_event_hooks",
    "emit",
]

_logger = logging.getLogger("convgrad")


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """An attempt is about to be sent; ``attempt`` counts from 1."""

    method: str
    url: str
    request_id: str
    attempt: int
    body_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.method} {self.url}: {self.body_bytes:,} bytes, attempt {self.attempt} "
            f"(request {self.request_id})"
        )


@dataclass(frozen=True, slots=True)
class ResponseEvent:
    """A complete answer has arrived, ``elapsed_s`` seconds after its attempt began."""

    method: str
    url: str
    request_id: str
    attempt: int
    status: int
    body_bytes: int
    elapsed_s: float

    def __str__(self) -> str:
        return (
            f"{self.method} {self.url}: {self.status}, {self.body_bytes:,} bytes after "
            f"{self.elapsed_s * 1e3:.1f} ms (request {self.request_id})"
        )


@dataclass(frozen=True, slots=True)
class RetryEvent:
    """Attempt ``attempt`` failed with ``error``; the next one starts in ``delay_s`` seconds."""

    method: str
    url: str
    request_id: str
    attempt: int
    error: ConvgradError
    delay_s: float

    def __str__(self) -> str:
        return f"{self.method} {self.url}: trying again in {self.delay_s:.2f} s after: {self.error}"


@dataclass(frozen=True, slots=True)
class FailureEvent:
    """A call has failed with ``error`` after ``attempt`` attempts and is not retried."""

    method: str
    url: str
    request_id: str
    attempt: int
    error: ConvgradError

    def __str__(self) -> str:
        return f"{self.method} {self.url}: failed: {self.error}"


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    """Progress of an attempt, reported whenever it waits for its connection.

    The server computes once ``sent_bytes`` equals ``body_bytes``. ``answer_bytes`` is None until
    the answer begins, and if the answer does not announce its length.
    """

    method: str
    url: str
    request_id: str
    attempt: int
    sent_bytes: int
    body_bytes: int
    received_bytes: int
    answer_bytes: int | None


class EventHooks(TypedDict, total=False):
    """Functions to call on each event, in order; an exception in one ends the call.

    Hooks run in the thread or on the event loop of the call, so they must not block.
    """

    request: Sequence[Callable[[RequestEvent], object]]
    response: Sequence[Callable[[ResponseEvent], object]]
    retry: Sequence[Callable[[RetryEvent], object]]
    failure: Sequence[Callable[[FailureEvent], object]]
    progress: Sequence[Callable[[ProgressEvent], object]]


def check_event_hooks(hooks: EventHooks) -> None:
    """Raise ValueError for an unknown event or a hook that is not callable."""
    for name, functions in hooks.items():
        if name not in EventHooks.__annotations__:
            known = ", ".join(EventHooks.__annotations__)
            raise ValueError(f"event_hooks: expected {known}, got {name!r}")
        if not isinstance(functions, Sequence) or not all(map(callable, functions)):
            raise ValueError(f"event_hooks: expected a list of functions for {name!r}")


def emit(
    hooks: EventHooks, event: RequestEvent | ResponseEvent | RetryEvent | FailureEvent
) -> None:
    """Log an event and call its hooks."""
    name, level = _KINDS[type(event)]
    _logger.log(level, "%s", event)
    for function in hooks.get(name, ()):  # type: ignore[attr-defined]
        function(event)


_KINDS = {
    RequestEvent: ("request", logging.DEBUG),
    ResponseEvent: ("response", logging.DEBUG),
    RetryEvent: ("retry", logging.INFO),
    FailureEvent: ("failure", logging.DEBUG),
}
