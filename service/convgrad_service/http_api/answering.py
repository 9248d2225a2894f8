"""What every endpoint that computes does alike: its deadline, its client's leaving, its answer."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from starlette.types import Receive, Send

from convgrad.errors import MalformedRequest, UnsupportedMediaType
from convgrad_service.http_api.middleware import ClientGone
from convgrad_service.http_api.problem_details import Headers

__all__ = ["Chunk", "refuse_encoded", "requested_timeout_s", "send_chunks", "unless_gone"]

Chunk = bytes | memoryview
T = TypeVar("T")

# One write of a large answer: large enough to cost nothing, small enough that the protocol sees
# within one of them that a client has stopped reading (see protocol.py).
_SEND_BYTES = 2**20


def refuse_encoded(content_encoding: str | None) -> None:
    """Raise UnsupportedMediaType unless the body comes as it is."""
    encoding = (content_encoding or "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedMediaType(
            f"the Content-Encoding is {encoding[:64]!r}; expected the body as it is (identity)"
        )


def requested_timeout_s(header: str | None) -> float | None:
    """The seconds that an X-Request-Timeout header allows; raises MalformedRequest if none can be
    read from it."""
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise MalformedRequest(
            f"X-Request-Timeout is {header[:64]!r}; expected a number of seconds above zero"
        )
    return seconds


async def unless_gone(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """The result of ``work``, which is cancelled if the client closes the connection first."""
    working = asyncio.ensure_future(work)
    # After the whole body, the only thing left to receive is that the client has gone.
    leaving = asyncio.ensure_future(receive())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
        # Both are awaited, so that neither outlives the request nor warns that nobody looked.
        await asyncio.gather(working, leaving, return_exceptions=True)


async def send_chunks(send: Send, headers: Headers, chunks: Iterable[Chunk]) -> None:
    """A 200 with these headers, Content-Length besides, and the chunks as its body."""
    parts = [part for chunk in chunks for part in _parts(chunk)]
    length = sum(len(part) for part in parts)
    headers = [*headers, (b"content-length", str(length).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for part in parts:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _parts(chunk: Chunk) -> Iterable[memoryview]:
    view = memoryview(chunk).cast("B")
    return (view[at : at + _SEND_BYTES] for at in range(0, len(view), _SEND_BYTES))
