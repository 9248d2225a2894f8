"""``POST /<operation>``: one endpoint for every operation of the contract."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from convgrad.contract import Operation
from convgrad.errors import MalformedRequest, UnsupportedMediaType
from convgrad_service.engine.dataplane import Call, Dataplane
from convgrad_service.engine.deadline import Deadline
from convgrad_service.http_api.body import BodyLimits, read_body
from convgrad_service.http_api.context import context_of
from convgrad_service.http_api.middleware import ClientGone
from convgrad_service.http_api.negotiation import choose_accepted, match_content_type
from convgrad_service.http_api.wires import MEDIA_TYPES, WIRES, Chunk, Wire
from convgrad_service.settings import Settings

__all__ = ["OperationEndpoint"]

T = TypeVar("T")

# One write of a large answer: large enough to cost nothing, small enough that the protocol sees
# within one of them that a client has stopped reading (see protocol.py).
_SEND_BYTES = 2**20


class OperationEndpoint:
    """An ASGI application that answers requests for one operation."""

    def __init__(self, operation: Operation, dataplane: Dataplane, settings: Settings) -> None:
        self.operation = operation
        self.dataplane = dataplane
        self.settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = context_of(scope)
        context.operation = self.operation.name
        headers = Headers(scope=scope)
        wire_in, wire_out = _wires(headers)
        allowed_s = _requested_timeout_s(headers.get("x-request-timeout"))
        deadline = Deadline.after(min(allowed_s or math.inf, self.settings.max_timeout_s))
        self.dataplane.admit()
        with self.dataplane.memory.reservation() as reservation:
            length = headers.get("content-length")
            reading = read_body(
                receive, None if length is None else int(length), self._limits(wire_in), reservation
            )
            with context.timings.stage("receive"):
                if allowed_s is None:
                    # Only a client that set a deadline counts its own sending towards it.
                    body = await reading
                    deadline = Deadline.after(self.settings.max_timeout_s)
                else:
                    async with deadline.enforced():
                        body = await reading
            call = Call(
                self.operation,
                reservation,
                deadline,
                context.timings,
                decoded_bytes=math.ceil(wire_in.decoded_share * len(body)),
                encoded_share=wire_out.encoded_share,
                refuse=wire_out.refuse,
            )
            # Handed over, not shared: a JSON body can go once its arrays have been made from it.
            handed = [body]
            del body
            work = self.dataplane.answer(
                call, lambda: wire_in.decode(handed.pop(), self.operation), wire_out.encode
            )
            chunks = await _unless_gone(work, receive)
            await _send_chunks(send, wire_out.media_type, chunks)

    def _limits(self, wire: Wire) -> BodyLimits:
        return BodyLimits(
            getattr(self.settings, wire.limit),
            self.settings.body_idle_timeout_s,
            self.settings.min_body_bytes_per_s,
        )


def _wires(headers: Headers) -> tuple[Wire, Wire]:
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedMediaType(
            f"the Content-Encoding is {encoding[:64]!r}; expected the body as it is (identity)"
        )
    came_in = match_content_type(headers.get("content-type"), MEDIA_TYPES)
    accept = ",".join(headers.getlist("accept"))
    return WIRES[came_in], WIRES[choose_accepted(accept, MEDIA_TYPES, came_in)]


def _requested_timeout_s(header: str | None) -> float | None:
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


async def _unless_gone(work: Coroutine[Any, Any, T], receive: Receive) -> T:
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


async def _send_chunks(send: Send, media_type: str, chunks: Iterable[Chunk]) -> None:
    parts = [part for chunk in chunks for part in _parts(chunk)]
    length = sum(len(part) for part in parts)
    headers = [
        (b"content-type", media_type.encode()),
        (b"content-length", str(length).encode()),
        (b"vary", b"accept"),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for part in parts:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _parts(chunk: Chunk) -> Iterable[memoryview]:
    view = memoryview(chunk).cast("B")
    return (view[at : at + _SEND_BYTES] for at in range(0, len(view), _SEND_BYTES))
