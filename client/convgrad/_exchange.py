"""One request from its first attempt to its answer or final error, without doing I/O.

`Client` and `AsyncClient` differ only in how they wait. What to send, when to retry and when to
give up is decided here.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

import httpx

from convgrad._body import Body
from convgrad._events import (
    FailureEvent,
    ProgressEvent,
    RequestEvent,
    ResponseEvent,
    RetryEvent,
    emit,
)
from convgrad._http_errors import from_httpx
from convgrad._options import Options
from convgrad._reply import Receiver, Reply, error_of
from convgrad._trace import trace_headers
from convgrad.errors import ClientTimeout, ConnectionFailed, ConvgradError

__all__ = ["Exchange", "Requests", "Target"]

R = TypeVar("R")

# Three years; sockets reject much longer timeouts.
_LONGEST_TIMEOUT_S = 1e8


@dataclass(frozen=True)
class Target(Generic[R]):
    """Where a request goes, its body, and how its answer is read."""

    method: str
    path: str
    body: Body | None
    read: Callable[[Reply, int], R]
    """Takes the reply and the number of attempts."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers in addition to those of every request, with lowercase names."""


Requests: TypeAlias = Generator[Target[Any], Any, R]
"""Yields targets for a client to request, and is sent each result or thrown each error."""


class Exchange(Generic[R]):
    """The attempts of a request, which share a deadline and a request id."""

    def __init__(
        self, target: Target[R], options: Options, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.request_id = secrets.token_hex(8)
        self._target = target
        self._options = options
        self._clock = clock
        self._attempts = 0
        self._began_s = 0.0
        timeout_s = math.inf if options.timeout is None else options.timeout
        self._deadline_s = clock() + timeout_s
        self._socket_timeout: dict[str, float | None] = {}

    @property
    def url(self) -> str:
        return f"{self._options.base_url.rstrip('/')}/{self._target.path}"

    @property
    def method(self) -> str:
        return self._target.method

    @property
    def path(self) -> str:
        """The path as in a request line."""
        return f"{self._options.base_path}/{self._target.path}"

    @property
    def body(self) -> Body | None:
        return self._target.body

    def begin(self) -> Mapping[str, str]:
        """Begin the next attempt and return its headers."""
        self._attempts += 1
        self._began_s = self._clock()
        body = self._target.body
        size = 0 if body is None else body.total_bytes
        event = RequestEvent(self.method, self.url, self.request_id, self._attempts, size)
        emit(self._options.event_hooks, event)
        return self._headers(self.remaining_s(), size)

    def request(self, http: httpx.Client | httpx.AsyncClient) -> httpx.Request:
        """Build the next attempt, whose body starts from the beginning."""
        headers = self.begin()
        timeout = httpx.Timeout(self.wait_s(), connect=self.connect_s())
        content: Any = None
        if self._target.body is not None:
            kind = _AsyncContent if isinstance(http, httpx.AsyncClient) else _Content
            content = kind(self._target.body, self._about_to_send)
        request = http.build_request(
            self._target.method,
            self.url,
            content=content,
            headers=headers,
            timeout=timeout,
        )
        self._socket_timeout = request.extensions["timeout"]
        return request

    def read(self, reply: Reply) -> R:
        """Read the answer, or raise the error that the reply reports."""
        emit(
            self._options.event_hooks,
            ResponseEvent(
                self.method,
                self.url,
                self.request_id,
                self._attempts,
                reply.status,
                reply.content.nbytes,
                self._clock() - self._began_s,
            ),
        )
        refusal = error_of(reply)
        if refusal is not None:
            raise refusal
        try:
            return self._target.read(reply, self._attempts)
        except ConvgradError as error:
            if error.request_id is None:
                error.request_id = reply.request_id
            raise

    def retry_delay_s(self, error: ConvgradError, *, possible: bool = True) -> float:
        """Return the seconds to wait before a retry; raise ``error`` if there is to be none.

        ``possible`` is False when the call can no longer be retried. Retrying is safe even after
        a partial answer, because every operation is a pure function of its request.
        """
        which = self.method, self.url, self.request_id, self._attempts
        delay_s = math.inf
        if possible and error.retryable and self._attempts <= self._options.max_retries:
            retry_after_s: float | None = getattr(error, "retry_after_s", None)
            delay_s = self._options.backoff.delay_s(self._attempts, retry_after_s)
        if delay_s == math.inf or self._clock() + delay_s >= self._deadline_s:
            emit(self._options.event_hooks, FailureEvent(*which, error))
            raise error
        emit(self._options.event_hooks, RetryEvent(*which, error, delay_s))
        return delay_s

    def failed(self, error: Exception) -> ConvgradError:
        """Convert an httpx exception to a convgrad error."""
        if isinstance(error, httpx.ReadTimeout | httpx.WriteTimeout):
            self.waited_in_vain()
        return from_httpx(error, self.url, self.request_id)

    def report(self, sent_bytes: int, answer: Receiver | None) -> None:
        """Report the progress of this attempt to the progress hooks, if any."""
        for hook in self._options.event_hooks.get("progress", ()):
            arrived, announced = (
                (0, None) if answer is None else (answer.arrived_bytes, answer.announced_bytes)
            )
            which = self.method, self.url, self.request_id, self._attempts
            size = 0 if self.body is None else self.body.total_bytes
            hook(ProgressEvent(*which, sent_bytes, size, arrived, announced))

    def _about_to_send(self, sent_bytes: int) -> None:
        self.check_deadline()
        self.report(sent_bytes, None)

    def check_deadline(self) -> None:
        """Raise ClientTimeout after the deadline, and limit httpx's timeouts to the time left.

        httpx only limits each read and write, so a peer that sends a byte now and then would
        never time out. A read in progress keeps its limit, so a peer that stops in the middle of
        an answer can take up to twice the timeout.
        """
        wait_s = self.wait_s()
        if wait_s is not None:
            self._socket_timeout.update(read=wait_s, write=wait_s)

    def remaining_s(self) -> float | None:
        """Return the seconds left, None for no limit; raise ClientTimeout after the deadline."""
        remaining_s = self._deadline_s - self._clock()
        if remaining_s > _LONGEST_TIMEOUT_S:
            return None
        if remaining_s <= 0:
            raise ClientTimeout(
                f"no answer from {self.url} within {self._options.timeout:g} s",
                request_id=self.request_id,
            )
        return remaining_s

    def wait_s(self) -> float | None:
        """Return the seconds that one read or write may wait; raise like `remaining_s`."""
        return _sooner(self.remaining_s(), self._options.read_timeout)

    def connect_s(self) -> float:
        """Return the seconds that connecting may take; raise like `remaining_s`."""
        return min(self._options.connect_timeout, self.remaining_s() or _LONGEST_TIMEOUT_S)

    def waited_in_vain(self) -> None:
        """Handle `wait_s` seconds without any data.

        Raises
        ------
        ClientTimeout
            The deadline of the call has passed.
        ConnectionFailed
            The server sent nothing for ``read_timeout`` seconds.
        """
        self.remaining_s()
        if self._options.read_timeout is not None:
            raise ConnectionFailed(
                f"no answer from {self.url}: nothing was read or sent for the read_timeout of "
                f"{self._options.read_timeout:g} s",
                request_id=self.request_id,
            )

    def _headers(self, remaining_s: float | None, body_bytes: int) -> Mapping[str, str]:
        # Names are lowercase. A trace header set by the caller overrides the current span's.
        headers = {**trace_headers(), **self._options.headers, **self._target.headers}
        headers["accept-encoding"] = "identity"
        headers["x-request-id"] = self.request_id
        body = self._target.body
        if body is not None:
            headers["content-type"] = body.content_type
            headers["accept"] = self._target.headers.get("accept", body.content_type)
            # With a length, httpx does not fall back to chunked encoding.
            headers["content-length"] = str(body_bytes)
            if remaining_s is not None:
                headers["x-request-timeout"] = f"{max(remaining_s, 0.001):.3f}"
        return headers


class _Content:
    # Not a generator: httpx iterates it again if the auth of an injected client sends twice.
    def __init__(self, body: Body, on_chunk: Callable[[int], None]) -> None:
        self._body = body
        self._on_chunk = on_chunk

    def __iter__(self) -> Iterator[memoryview]:
        return self._body.chunks(self._on_chunk)


class _AsyncContent:
    def __init__(self, body: Body, on_chunk: Callable[[int], None]) -> None:
        self._body = body
        self._on_chunk = on_chunk

    def __aiter__(self) -> AsyncIterator[memoryview]:
        return self._body.async_chunks(self._on_chunk)


def _sooner(first_s: float | None, second_s: float | None) -> float | None:
    return min((each for each in (first_s, second_s) if each is not None), default=None)
