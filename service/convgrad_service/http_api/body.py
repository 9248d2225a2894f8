"""Receives request bodies within limits of size and time, copying each byte once.

Content-Length allows refusing a body early. A client that then sends less runs into the timeouts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.types import Message, Receive, Scope

from convgrad.errors import DeadlineExceeded, MalformedRequest, PayloadTooLarge, RequestTimeout
from convgrad_service.engine.admission import CancelScope, ClientDisconnected, Deadline
from convgrad_service.engine.engine import Engine
from convgrad_service.engine.memory.arena import Lease
from convgrad_service.engine.options import MAX_TRANSFER_S
from convgrad_service.engine.request import SMALL_BYTES
from convgrad_service.http_api.connection import connection_of
from convgrad_service.http_api.middleware import context_of
from convgrad_service.server.settings import Settings

# A smaller rest of a body arrives in one part anyway.
_DIRECT_BYTES = 128 * 1024


@dataclass(slots=True)
class WholeBody:
    """A whole body; ``lease`` is its place in the arena, None for small bodies."""

    data: memoryview
    lease: Lease | None = None

    def release(self) -> None:
        """Free the place in the arena; ``data`` must not be used any longer."""
        if self.lease is not None:
            self.lease.release()
            self.lease = None


class Body:
    """One body of at most ``max_bytes``, read by `peek` and `read_into`, or by `read_all` at once.

    Its pauses and its rate have the limits of ``settings``. While others wait for memory of
    ``engine``, where it is held, it must come within `MAX_TRANSFER_S`; its rate is known after
    ``max_memory_wait_s``.

    Every method raises PayloadTooLarge if the body or its Content-Length exceeds the limit,
    RequestTimeout if it pauses too long or arrives too slowly, and ClientDisconnected if the
    connection ends before the body does.
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        settings: Settings,
        max_bytes: int,
        engine: Engine | None = None,
    ) -> None:
        lengths = (int(value) for name, value in scope["headers"] if name == b"content-length")
        self.content_length = next(lengths, None)
        if self.content_length is not None and self.content_length > max_bytes:
            raise PayloadTooLarge(
                f"Content-Length is {self.content_length:,}; this server accepts at most "
                f"{max_bytes:,} bytes of this media type"
            )
        self.received_bytes = 0
        self.ended = False
        self._receive, self._settings, self._max_bytes = receive, settings, max_bytes
        self._engine = engine
        # For what is received past `receive`, which counts what it returns.
        self._connection, self._context = connection_of(scope), context_of(scope)
        self._ahead = b""  # received but not consumed
        self._started_s = time.monotonic()
        # Since when the body's memory is held, what had been received by then, and its end.
        self._holding: tuple[float, int, int] | None = None

    def refuse_over_limit(self, size: int) -> None:
        """Raise PayloadTooLarge if ``size`` exceeds the limit."""
        if size > self._max_bytes:
            raise PayloadTooLarge(
                f"the body is longer than {self._max_bytes:,} bytes, the most this server "
                "takes of this media type"
            )

    async def peek(self, size: int) -> bytes:
        """Return ``size`` bytes or more without consuming them; fewer if the body is shorter."""
        while len(self._ahead) < size and (part := await self._part()) is not None:
            self._ahead = self._ahead + part if self._ahead else part
        return self._ahead

    async def read_into(self, targets: Sequence[memoryview | int], *, skip: int = 0) -> None:
        """Skip ``skip`` bytes that `peek` returned, and receive the rest into ``targets``.

        A number among the targets is a count of bytes to drop.

        Raises
        ------
        MalformedRequest
            The body's length differs from that of the targets.
        """
        left = memoryview(self._ahead)[skip:]
        self._ahead = b""
        self._hold(self.received_bytes - len(left) + sum(map(_size_of, targets)))
        for index, target in enumerate(targets):
            size, at = _size_of(target), 0
            while at < size:
                if not left:
                    rest = [_from(target, at), *targets[index + 1 :]]
                    if await self._receive_directly(rest):
                        return
                    part = await self._part()
                    if part is None:
                        raise _wrong_length(targets, self.received_bytes - skip)
                    left = memoryview(part)
                taken = left[: size - at]
                if not isinstance(target, int):
                    target[at : at + len(taken)] = taken
                at += len(taken)
                left = left[len(taken) :]
        while not left and (part := await self._part()) is not None:
            left = memoryview(part)
        if left:
            raise _wrong_length(targets, self.received_bytes - skip)

    async def read_all(self, engine: Engine) -> WholeBody:
        """Receive all of it; the caller must release the result.

        Raises
        ------
        Overloaded, ProblemTooLarge
            Other bodies hold the memory that it needs, or it needs more than there is.
        """
        shown = await self.peek(min(SMALL_BYTES + 1, self.content_length or SMALL_BYTES + 1))
        if self.ended:
            return WholeBody(memoryview(shown))
        promised = self.content_length or 2 * len(shown)
        text = await _place(engine, max(promised, len(shown)))
        try:
            size = len(shown)
            text.data[:size] = shown
            self._ahead = b""
            self._hold(promised)
            if await self._receive_directly([text.data[size:promised]]):
                size = promised
            while (part := await self._part()) is not None:
                if size + len(part) > len(text.data):
                    larger = await _place(engine, max(size + len(part), 2 * size))
                    larger.data[:size] = text.data[:size]
                    text.release()
                    text = larger
                text.data[size : size + len(part)] = part
                size += len(part)
        except BaseException:
            text.release()
            raise
        text.data = text.data[:size]
        return text

    async def _receive_directly(self, targets: Sequence[memoryview | int]) -> bool:
        """Receive the rest straight into ``targets``; return False if that is not worthwhile."""
        connection, length = self._connection, self.content_length
        if connection is None or length is None or self.ended:
            return False
        if not _DIRECT_BYTES <= sum(map(_size_of, targets)) == length - self.received_bytes:
            return False
        if connection.body_left_bytes(length) <= 0:
            return False  # already in the server's buffer
        before = self.received_bytes
        receiving = connection.receive_into(targets)
        try:
            while not receiving.filled.done():
                idle_s = self._settings.body_idle_timeout_s - (time.monotonic() - receiving.last_s)
                if idle_s <= 0:
                    raise self._idle()
                await asyncio.wait([receiving.filled], timeout=min(idle_s, 1.0))
                self.received_bytes = before + receiving.received_bytes
                if not receiving.filled.done():
                    self._refuse_slow()
        finally:
            if not receiving.filled.done():
                connection.stop_receiving()
            self.received_bytes = before + receiving.received_bytes
            self._context.received_bytes += receiving.received_bytes
        if not receiving.filled.result():
            raise ClientDisconnected
        await self._part()  # consume the end of the body, which the middleware watches for
        return True

    def _idle(self) -> RequestTimeout:
        return RequestTimeout(
            f"no more of the body arrived for {self._settings.body_idle_timeout_s:g} s, after "
            f"{self.received_bytes:,} bytes"
        )

    async def _part(self) -> bytes | None:
        """Return the next bytes; None once the body has ended."""
        if self.ended:
            return None
        message = await self._message()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        part: bytes = message.get("body", b"")
        self.received_bytes += len(part)
        self.ended = not message.get("more_body", False)
        self.refuse_over_limit(self.received_bytes)
        if not self.ended:
            self._refuse_slow()
        return part

    async def _message(self) -> Message:
        left_s = self._settings.body_idle_timeout_s
        while True:
            wait_s = min(left_s, 1.0)
            try:
                with CancelScope(Deadline.after(wait_s)):
                    return await self._receive()
            except DeadlineExceeded:
                left_s -= wait_s
                if left_s <= 0:
                    raise self._idle() from None
                self._refuse_slow()

    def _hold(self, end: int) -> None:
        """Note that memory for all of the body is held from now on; it ends at byte ``end``."""
        self._holding = time.monotonic(), self.received_bytes, end

    def _refuse_slow(self) -> None:
        settings, now_s = self._settings, time.monotonic()
        took_s = now_s - self._started_s
        if self._holding is not None:
            since_s, before, end = self._holding
            held_s, came = now_s - since_s, self.received_bytes - before
            late = (end - self.received_bytes) * held_s > came * MAX_TRANSFER_S
            waited_for = self._engine is not None and self._engine.status.short_of_memory
            if late and held_s > settings.max_memory_wait_s and waited_for:
                raise RequestTimeout(
                    f"{came:,} of {end - before:,} bytes of the body arrived in {held_s:.1f} s, "
                    "and other requests wait for the memory that it holds"
                )
        per_s = settings.min_body_bytes_per_s
        if (took_s - settings.body_idle_timeout_s) * per_s > self.received_bytes:
            raise RequestTimeout(
                f"{self.received_bytes:,} bytes of the body arrived in {took_s:.1f} s; this "
                f"server requires at least {per_s:,.0f} bytes per second"
            )


async def small_body(request: Request, settings: Settings, max_bytes: int) -> bytes:
    """Receive a whole body of at most ``max_bytes``. Raises as `Body`."""
    return await Body(request.scope, request.receive, settings, max_bytes).peek(max_bytes + 1)


async def _place(engine: Engine, size: int) -> WholeBody:
    lease = await engine.reserve(size, text=True)
    return WholeBody(engine.arena.view(lease.offset, size), lease)


def _from(target: memoryview | int, at: int) -> memoryview | int:
    return target - at if isinstance(target, int) else target[at:]


def _wrong_length(targets: Iterable[memoryview | int], found: int) -> MalformedRequest:
    described = sum(map(_size_of, targets))
    more = "" if found < described else " or more"
    return MalformedRequest(
        f"the header describes {described} bytes of data, but {found}{more} follow"
    )


def _size_of(target: memoryview | int) -> int:
    return target if isinstance(target, int) else len(target)
