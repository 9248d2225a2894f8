"""One request from first attempt to answer or final error, without any input or output.

`Client` and `AsyncClient` differ only in how they wait; what they send, when they send it again
and how long in all they try is decided here.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypedDict, TypeVar

import httpx

from convgrad._body import WIRES, Body
from convgrad._http_errors import from_httpx
from convgrad._reply import Reply, error_of
from convgrad._retry import Backoff
from convgrad.errors import ClientTimeout, ConvgradError

__all__ = ["Exchange", "OptionChanges", "Options", "Target"]

R = TypeVar("R")

# A connection that is not made by then will not be; trying again may reach a healthy address.
_CONNECT_TIMEOUT_S = 10.0
# Three years: sockets refuse much longer ones, and no one waits for them.
_LONGEST_TIMEOUT_S = 1e8


class OptionChanges(TypedDict, total=False):
    """What `with_options` takes."""

    timeout: float | None
    retries: int
    wire: str
    store: Mapping[str, str]


@dataclass(frozen=True)
class Options:
    """What a client was told when it was made. Raises ValueError for what cannot work."""

    base_url: str
    timeout_s: float | None
    retries: int
    wire: str
    headers: Mapping[str, str] = field(default_factory=dict)
    backoff: Backoff = field(default_factory=Backoff)
    store: Mapping[str, str] = field(default_factory=dict)
    base_path: str = field(init=False)

    def __post_init__(self) -> None:
        url = httpx.URL(self.base_url)
        # A frozen dataclass sets what it derives like this.
        object.__setattr__(self, "base_path", url.raw_path.decode("ascii").rstrip("/"))
        lowered = {name.lower(): value for name, value in self.headers.items()}
        object.__setattr__(self, "headers", lowered)
        if url.scheme not in ("http", "https") or not url.host:
            raise ValueError(f"base_url: expected http://… or https://…, got {self.base_url!r}")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ValueError(f"timeout: expected a positive number or None, got {self.timeout_s}")
        if self.retries < 0:
            raise ValueError(f"retries: expected 0 or more, got {self.retries}")
        if self.wire not in WIRES:
            raise ValueError(f"wire: expected {' or '.join(WIRES)}, got {self.wire!r}")

    def changed(self, changes: OptionChanges) -> Options:
        """These options with some replaced."""
        return replace(
            self,
            timeout_s=changes.get("timeout", self.timeout_s),
            retries=changes.get("retries", self.retries),
            wire=changes.get("wire", self.wire),
            store=dict(changes.get("store", self.store)),
        )


@dataclass(frozen=True)
class Target(Generic[R]):
    """Where a request goes, with what body, and how its answer is read."""

    method: str
    path: str
    body: Body | None
    read: Callable[[Reply, int], R]
    """Takes the reply and the number of attempts."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Beside those that every request has; names in small letters."""


class Exchange(Generic[R]):
    """The attempts of one request, which share a deadline and a request id."""

    def __init__(
        self, target: Target[R], options: Options, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.request_id = secrets.token_hex(8)
        self._target = target
        self._options = options
        self._clock = clock
        self._attempts = 0
        timeout_s = math.inf if options.timeout_s is None else options.timeout_s
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
        """The path alone, as a request line has it."""
        return f"{self._options.base_path}/{self._target.path}"

    @property
    def body(self) -> Body | None:
        return self._target.body

    def begin(self) -> Mapping[str, str]:
        """Begin the next attempt; its headers."""
        self._attempts += 1
        return self._headers(self.remaining_s())

    def request(self, http: httpx.Client | httpx.AsyncClient) -> httpx.Request:
        """The next attempt. Its body starts afresh each time, so sending again is safe."""
        headers = self.begin()
        remaining_s = self.remaining_s()
        timeout = httpx.Timeout(remaining_s, connect=_soonest(remaining_s, _CONNECT_TIMEOUT_S))
        content: Any = None
        if self._target.body is not None:
            kind = _AsyncContent if isinstance(http, httpx.AsyncClient) else _Content
            content = kind(self._target.body, self.check_deadline)
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
        """The answer; raises the error that the reply is, if it is one."""
        refusal = error_of(reply)
        if refusal is not None:
            raise refusal
        try:
            return self._target.read(reply, self._attempts)
        except ConvgradError as error:
            if error.request_id is None:
                error.request_id = reply.request_id
            raise

    def pause_s(self, error: ConvgradError) -> float:
        """Seconds to wait before the next attempt; raises ``error`` when there is none.

        Sending again is safe even after an answer broke off: every operation is a pure function
        of its request, so a second run changes nothing.
        """
        if not error.retryable or self._attempts > self._options.retries:
            raise error
        retry_after_s: float | None = getattr(error, "retry_after_s", None)
        pause_s = self._options.backoff.delay_s(self._attempts, retry_after_s)
        if self._clock() + pause_s >= self._deadline_s:
            raise error
        return pause_s

    def failed(self, error: Exception) -> ConvgradError:
        """What an exception of httpx means here."""
        return from_httpx(error, self.url, self.request_id)

    def check_deadline(self) -> None:
        """Raise ClientTimeout once the time is up, and shorten httpx's timeouts to it.

        httpx bounds each read and each write; a peer that sends a byte now and then would pass
        those forever. (A read already begun keeps its bound: only a peer that falls silent in the
        middle of an answer can take longer than asked, and at most twice as long.)
        """
        remaining_s = self.remaining_s()
        if remaining_s is not None:
            self._socket_timeout.update(read=remaining_s, write=remaining_s)

    def remaining_s(self) -> float | None:
        """Seconds that are left, None for no bound; raises ClientTimeout once the time is up."""
        remaining_s = self._deadline_s - self._clock()
        if remaining_s > _LONGEST_TIMEOUT_S:
            return None
        if remaining_s <= 0:
            raise ClientTimeout(
                f"no answer from {self.url} within {self._options.timeout_s:g} s",
                request_id=self.request_id,
            )
        return remaining_s

    def _headers(self, remaining_s: float | None) -> Mapping[str, str]:
        headers = {**self._options.headers, **self._target.headers}  # names in small letters
        headers["accept-encoding"] = "identity"
        headers["x-request-id"] = self.request_id
        body = self._target.body
        if body is not None:
            headers["content-type"] = headers["accept"] = body.content_type
            # Announced, so that httpx does not fall back to chunked encoding.
            headers["content-length"] = str(body.total_bytes)
            if remaining_s is not None:
                headers["x-request-timeout"] = f"{max(remaining_s, 0.001):.3f}"
        return headers


class _Content:
    # Not a generator: httpx iterates it again where an injected client's auth sends twice.
    def __init__(self, body: Body, on_chunk: Callable[[], None]) -> None:
        self._body = body
        self._on_chunk = on_chunk

    def __iter__(self) -> Iterator[memoryview]:
        return self._body.chunks(self._on_chunk)


class _AsyncContent:
    def __init__(self, body: Body, on_chunk: Callable[[], None]) -> None:
        self._body = body
        self._on_chunk = on_chunk

    def __aiter__(self) -> AsyncIterator[memoryview]:
        return self._body.async_chunks(self._on_chunk)


def _soonest(first_s: float | None, second_s: float) -> float:
    return second_s if first_s is None else min(first_s, second_s)
