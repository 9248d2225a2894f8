"""Receives the bytes of an answer and reads them as JSON or as an error."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from convgrad._retry import parse_retry_after
from convgrad.errors import (
    CODES,
    ConnectionFailed,
    ConvgradError,
    GatewayError,
    InvalidAnswer,
    service_error,
)

__all__ = [
    "Receiver",
    "Reply",
    "async_raw_chunks",
    "error_of",
    "raw_chunks",
    "read_json",
    "server_timing_s",
]

# Errors are a few sentences long; the rest of a longer body is not read.
_MAX_ERROR_BYTES = 1 << 16
_EXCERPT_CHARACTERS = 200
# Statuses that a proxy returns for a server that is unreachable or overloaded.
_GATEWAY_STATUSES = frozenset((429, 502, 503, 504))
# The name of a metric and its dur, among other parameters.
_DURATION = re.compile(r'(?:^|,)\s*([^;,\s]+)\s*;(?:[^,]*;)?\s*[dD][uU][rR]\s*=\s*"?([^",;\s]+)')


@dataclass(frozen=True, eq=False)
class Reply:
    """A complete answer. ``request_id`` is the server's, if the answer has one."""

    status: int
    headers: Mapping[str, str]
    """Headers by lowercase name."""
    content: NDArray[np.uint8]
    request_id: str


class Receiver:
    """Collects the chunks of an answer, in one buffer if the answer announces its size.

    The decoded arrays are views of this buffer, so there is no further copy.
    """

    def __init__(self, status: int, headers: Mapping[str, str], request_id: str) -> None:
        self._status = status
        self._headers = headers
        self._succeeded = 200 <= status < 300
        self._request_id = headers.get("x-request-id", request_id)
        self._used = 0
        self._chunks: list[bytes] = []
        self.announced_bytes = _content_length(headers)
        """The Content-Length, or None if it is missing."""
        self._buffer: NDArray[np.uint8] | None = None
        if self._succeeded and self.announced_bytes is not None:
            try:
                self._buffer = np.empty(self.announced_bytes, np.uint8)
            except (MemoryError, ValueError) as refused:
                raise self._invalid(
                    f"the answer announces {self.announced_bytes} bytes, more than fit in memory"
                ) from refused

    @property
    def has_enough(self) -> bool:
        """Whether the rest of the answer need not be read."""
        return not self._succeeded and self._used >= _MAX_ERROR_BYTES

    @property
    def missing_bytes(self) -> int:
        """Number of announced bytes that have not arrived."""
        return max(0, (self.announced_bytes or 0) - self._used)

    @property
    def memory(self) -> NDArray[np.uint8] | None:
        """The buffer of a successful answer of announced length, otherwise None."""
        return self._buffer

    @property
    def arrived_bytes(self) -> int:
        """Number of bytes of the answer that have arrived."""
        return self._used

    def is_of(self, media_type: str) -> bool:
        """Return whether the answer's Content-Type is this media type."""
        named = self._headers.get("content-type", "").partition(";")[0]
        return named.strip().lower() == media_type

    def space(self) -> memoryview | None:
        """Return the unfilled buffer to read into, or None; call `filled` after reading."""
        return None if self._buffer is None else self._buffer.data[self._used :]

    def filled(self, size: int) -> None:
        self._used += size

    def add(self, chunk: bytes) -> None:
        end = self._used + len(chunk)
        if self._buffer is None:
            self._chunks.append(chunk)
        elif end > self._buffer.size:
            raise self._invalid(
                f"the answer is longer than the {self.announced_bytes} bytes announced"
            )
        else:
            self._buffer[self._used : end] = np.frombuffer(chunk, np.uint8)
        self._used = end

    def finish(self) -> Reply:
        """Return the answer after the last chunk."""
        if self._buffer is not None and self._used < self._buffer.size:
            raise ConnectionFailed(
                f"the answer broke off after {self._used} of {self.announced_bytes} bytes",
                request_id=self._request_id,
            )
        content = self._buffer
        if content is None:
            content = np.frombuffer(bytearray().join(self._chunks), np.uint8)
        return Reply(self._status, self._headers, content, self._request_id)

    def _invalid(self, detail: str) -> InvalidAnswer:
        return InvalidAnswer(detail, request_id=self._request_id)


def raw_chunks(response: httpx.Response) -> Iterator[bytes]:
    """Yield the bytes of a response, even if a hook of an injected client has read them."""
    return iter([response.content]) if response.is_stream_consumed else response.iter_raw()


async def async_raw_chunks(response: httpx.Response) -> AsyncIterator[bytes]:
    """`raw_chunks` for `AsyncClient`."""
    if response.is_stream_consumed:
        yield response.content
    else:
        async for chunk in response.aiter_raw():
            yield chunk


def error_of(reply: Reply) -> ConvgradError | None:
    """Return the error that a reply reports, or None; problem+json gives the specific class."""
    if reply.status == httpx.codes.OK:
        if (coding := reply.headers.get("content-encoding", "identity")) != "identity":
            return InvalidAnswer(
                f"the answer is encoded as {coding}, which was not asked for",
                request_id=reply.request_id,
            )
        return None
    problem = _problem(reply)
    retry_after_s = parse_retry_after(reply.headers.get("retry-after"))
    of_a_gateway = reply.status in _GATEWAY_STATUSES
    if problem is not None and (problem["code"] in CODES or not of_a_gateway):
        return service_error(
            problem["code"],
            problem["detail"],
            request_id=problem.get("request_id") or reply.request_id,
            retry_after_s=retry_after_s,
        )
    found = f"got status {reply.status} with {_excerpt(reply.content)}"
    if of_a_gateway:
        return GatewayError(
            f"the server could not be reached through what stands before it: {found}",
            status=reply.status,
            request_id=reply.request_id,
            retry_after_s=retry_after_s,
        )
    return InvalidAnswer(f"expected a convgrad answer, {found}", request_id=reply.request_id)


def read_json(reply: Reply) -> Any:
    """Parse a reply as JSON."""
    try:
        return json.loads(reply.content.tobytes())
    except ValueError as refused:
        raise InvalidAnswer(
            f"expected JSON, got {_excerpt(reply.content)}", request_id=reply.request_id
        ) from refused


def server_timing_s(headers: Mapping[str, str]) -> dict[str, float]:
    """Parse Server-Timing, whose ``dur`` is in milliseconds, into seconds per stage."""
    durations: dict[str, float] = {}
    for stage, text in _DURATION.findall(headers.get("server-timing", "")):
        duration = _float(text)
        if duration is not None:
            durations[stage] = duration / 1000
    return durations


def _problem(reply: Reply) -> Mapping[str, str] | None:
    if not reply.headers.get("content-type", "").startswith("application/problem+json"):
        return None
    try:
        problem = json.loads(reply.content.tobytes())
    except ValueError:
        return None
    if not isinstance(problem, dict):
        return None
    texts = {key: value for key, value in problem.items() if isinstance(value, str)}
    return texts if {"code", "detail"} <= texts.keys() else None


def _excerpt(content: NDArray[np.uint8]) -> str:
    # A character has at most four bytes, so these bytes contain the whole excerpt.
    text = content[: 4 * _EXCERPT_CHARACTERS + 4].tobytes().decode(errors="replace").strip()
    if not text:
        return "an empty body"
    shortened = text[:_EXCERPT_CHARACTERS]
    return repr(shortened) + ("…" if len(text) > len(shortened) else "")


def _content_length(headers: Mapping[str, str]) -> int | None:
    value = headers.get("content-length", "")
    return int(value) if value.isascii() and value.isdigit() and len(value) < 19 else None


def _float(text: str) -> float | None:
    try:
        return float(text.strip().strip('"'))
    except ValueError:
        return None
