"""Common request headers, and sending of response bodies."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.types import Send

from convgrad.errors import MalformedRequest, UnsupportedMediaType
from convgrad_service.engine.request import SMALL_BYTES
from convgrad_service.http_api.base64_tensors import EncodedLater
from convgrad_service.http_api.context import Connection
from convgrad_service.http_api.problem_details import Headers

__all__ = [
    "Arriving",
    "Chunk",
    "refuse_encoded",
    "seconds_in",
    "send_chunks",
]


@dataclass(frozen=True, slots=True)
class Arriving:
    """A part of an answer that is still being computed.

    ``until`` waits for a number of final bytes, and returns how many there are.
    """

    data: memoryview
    until: Callable[[int], Coroutine[Any, Any, int]]

    def __len__(self) -> int:
        return len(self.data)


Chunk = bytes | memoryview | EncodedLater | Arriving
"""A part of an answer, of one byte an item; the last two kinds are made when it is their turn."""
T = TypeVar("T")
Wait = Callable[[Coroutine[Any, Any, int]], Awaitable[int]]

# Size of one write: large enough to be efficient, small enough that the protocol soon notices a
# client that stops reading.
_SEND_BYTES = 2**20


def refuse_encoded(content_encoding: str | None) -> None:
    """Raise UnsupportedMediaType if the body has a Content-Encoding."""
    encoding = (content_encoding or "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedMediaType(
            f"the Content-Encoding is {encoding[:64]!r}; expected the body as it is (identity)"
        )


def seconds_in(value: str | None, header: str) -> float | None:
    """Return the seconds in the value of ``header``; raises MalformedRequest if it is invalid."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise MalformedRequest(
            f"{header} is {value[:64]!r}; expected a number of seconds above zero"
        )
    return seconds


async def send_chunks(
    send: Send,
    headers: Headers,
    chunks: Sequence[Chunk],
    *,
    connection: Connection | None = None,
    in_thread: Callable[[Callable[[], bytes]], Awaitable[bytes]] | None = None,
    waiting: Wait | None = None,
) -> None:
    """Send a 200 with these headers, Content-Length, and the chunks as its body.

    When it returns, nothing refers to the chunks' memory any more: they have been sent, or copied
    if the server offers no ``connection`` that reports completion. ``in_thread`` runs deferred
    encoding. ``waiting`` awaits what is still being computed.
    """
    length = sum(len(chunk) for chunk in chunks)
    headers = [*headers, (b"content-length", str(length).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    if length <= SMALL_BYTES:
        body = b"".join(_made(chunk) for chunk in chunks)
        await send({"type": "http.response.body", "body": body, "more_body": False})
        return
    with contextlib.nullcontext() if connection is None else connection.unbuffered():
        for chunk in chunks:
            if isinstance(chunk, EncodedLater):
                made = chunk.encoded() if in_thread is None else await in_thread(chunk.encoded)
                await send({"type": "http.response.body", "body": made, "more_body": True})
                continue
            data = chunk.data if isinstance(chunk, Arriving) else memoryview(chunk).cast("B")
            at = 0
            while at < len(data):
                end = len(data)
                if isinstance(chunk, Arriving):
                    coming = chunk.until(at + 1)
                    end = await (coming if waiting is None else waiting(coming))
                for part in _parts(data[at:end]):
                    sent = bytes(part) if connection is None else part
                    await send({"type": "http.response.body", "body": sent, "more_body": True})
                at = end
        # Unbuffered, so this waits until everything before it has been sent.
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _made(chunk: Chunk) -> bytes | memoryview:
    if isinstance(chunk, Arriving):
        raise TypeError("nothing small is sent before it is computed")
    return chunk.encoded() if isinstance(chunk, EncodedLater) else chunk


def _parts(view: memoryview) -> Iterable[memoryview]:
    return (view[at : at + _SEND_BYTES] for at in range(0, len(view), _SEND_BYTES))
