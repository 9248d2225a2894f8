"""Reading a request's body: into one buffer, no further than allowed, and not for ever.

Content-Length is a promise. It refuses early and sizes the buffer, but memory is reserved and
touched only as bytes arrive, and the limit counts those.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import numpy as np
from starlette.types import Receive

from convgrad.errors import DeviceOutOfMemory, PayloadTooLarge, RequestTimeout
from convgrad_service.engine.memory import Reservation
from convgrad_service.http_api.middleware import ClientGone

__all__ = ["BodyLimits", "read_body"]

_MiB = 2**20
# The first buffer is no larger than this whatever was promised, and doubles from there.
_FIRST_BUFFER_BYTES = 64 * _MiB
_UNKNOWN_LENGTH_BUFFER_BYTES = 64 * 1024
_RESERVE_STEP_BYTES = 4 * _MiB


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """How large a body may be and how slowly it may come."""

    max_bytes: int
    idle_timeout_s: float
    min_bytes_per_s: float


async def read_body(
    receive: Receive,
    content_length: int | None,
    limits: BodyLimits,
    reservation: Reservation,
) -> memoryview:
    """The whole body, held by ``reservation``.

    Raises
    ------
    PayloadTooLarge
        It is longer than the limit, or says that it will be.
    RequestTimeout
        It pauses too long or comes too slowly.
    Overloaded
        Other requests hold the memory it needs.
    ClientGone
        The connection ended before the body did.
    """
    if content_length is not None and content_length > limits.max_bytes:
        raise PayloadTooLarge(
            f"Content-Length is {content_length:,}; this server takes bodies of at most "
            f"{limits.max_bytes:,} bytes of this media type"
        )
    buffer = _Buffer(content_length, limits.max_bytes, reservation)
    started_s = time.monotonic()
    while True:
        try:
            async with asyncio.timeout(limits.idle_timeout_s):
                message = await receive()
        except TimeoutError:
            raise RequestTimeout(
                f"nothing more of the body came for {limits.idle_timeout_s:g} s, after "
                f"{buffer.size:,} bytes"
            ) from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        buffer.append(message.get("body", b""))
        if not message.get("more_body", False):
            return buffer.view()
        overdue_s = time.monotonic() - started_s - limits.idle_timeout_s
        if overdue_s * limits.min_bytes_per_s > buffer.size:
            raise RequestTimeout(
                f"{buffer.size:,} bytes of the body came in {time.monotonic() - started_s:.1f} s; "
                f"this server waits for no less than {limits.min_bytes_per_s:,.0f} bytes a second"
            )


class _Buffer:
    """Bytes that arrive one part after another, in memory that grows in bounded steps."""

    def __init__(self, expected: int | None, max_bytes: int, reservation: Reservation) -> None:
        first = _UNKNOWN_LENGTH_BUFFER_BYTES if expected is None else expected
        self.size = 0
        self._expected, self._max_bytes, self._reservation = expected, max_bytes, reservation
        self._bytes = _untouched(min(first, _FIRST_BUFFER_BYTES))

    def append(self, part: bytes) -> None:
        end = self.size + len(part)
        if end > self._max_bytes:
            raise PayloadTooLarge(
                f"the body is longer than {self._max_bytes:,} bytes, the most this server takes "
                "of this media type"
            )
        if end > self._reservation.held_bytes:
            ahead = max(end, min(end + _RESERVE_STEP_BYTES, self._expected or 0))
            self._reservation.grow(ahead - self._reservation.held_bytes)
        if end > len(self._bytes):
            self._bytes = self._grown(end)
        self._bytes[self.size : end] = part
        self.size = end

    def view(self) -> memoryview:
        return self._bytes[: self.size]

    def _grown(self, needed: int) -> memoryview:
        # Doubling copies each byte about once more; the promise, where there is one, caps it.
        most = min(self._max_bytes, max(self._expected or self._max_bytes, needed))
        grown = _untouched(max(needed, min(2 * len(self._bytes), most)))
        grown[: self.size] = self._bytes[: self.size]
        return grown


def _untouched(size: int) -> memoryview:
    # np.empty and not bytearray: pages that nothing was written to take no memory.
    try:
        return np.empty(size, np.uint8).data
    except MemoryError:
        raise DeviceOutOfMemory(
            f"the server could not allocate {size:,} bytes for the body", retry_after_s=1.0
        ) from None
