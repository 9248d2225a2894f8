"""One gRPC call on a stream: its metadata and deadline, its messages both ways, its status.

Source: "gRPC over HTTP2" (the protocol's own description).
"""

from __future__ import annotations

import asyncio
import math
import re
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from convgrad.errors import MalformedRequest, PayloadTooLarge, UnsupportedMediaType
from convgrad_service.engine.admitted import SMALL_BYTES
from convgrad_service.engine.scheduling.quotas import ANYBODY
from convgrad_service.grpc_api.http2.frames import Error
from convgrad_service.grpc_api.http2.stream import Header, Part, Stream

__all__ = ["OK", "STATUS", "Call", "Message"]

STATUS: Mapping[str, int] = {
    "OK": 0,
    "INVALID_ARGUMENT": 3,
    "DEADLINE_EXCEEDED": 4,
    "NOT_FOUND": 5,
    "RESOURCE_EXHAUSTED": 8,
    "UNIMPLEMENTED": 12,
    "INTERNAL": 13,
    "UNAVAILABLE": 14,
    "UNAUTHENTICATED": 16,
}
"""The statuses that we answer with, by their names in the table of errors."""
OK = "OK"

_PREFIX_BYTES = 5
# Compressed messages are for small tensors: they are held whole, twice.
_MAX_COMPRESSED_BYTES = 64 * 2**20
_WINDOW_BITS = {"gzip": 31, "deflate": 15}
_TIMEOUT = re.compile(r"([0-9]{1,8})([HMSmun])")
_UNITS_S = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_UNPRINTABLE = re.compile(rb"[^ -$&-~]")
_RESPONSE_HEADERS = (
    (b":status", b"200"),
    (b"content-type", b"application/grpc"),
    (b"grpc-accept-encoding", b"identity,deflate,gzip"),
)


class Call:
    """A call from its headers on. ``path`` is ``/service/Method``, ``caller`` whose key it has."""

    def __init__(self, stream: Stream, max_message_bytes: int) -> None:
        self._stream = stream
        self._max_message_bytes = max_message_bytes
        self._began_s = time.monotonic()
        self._answering = False
        self._small: list[Part] = []
        self._metadata = _metadata(stream.headers)
        self.path = self.first(":path")
        self.caller = ANYBODY
        self._allowed_s = self._timeout_s()

    def metadata(self, name: str) -> list[str]:
        """The values of a header."""
        return self._metadata.get(name, [])

    def first(self, name: str) -> str:
        """The first value of a header, "" without one."""
        return self.metadata(name)[0] if name in self._metadata else ""

    @property
    def is_grpc(self) -> bool:
        """Whether the request is a gRPC call at all."""
        return self.first(":method") == "POST" and bool(
            re.match(r"application/grpc(\+|;|$)", self.first("content-type"))
        )

    @property
    def remaining_s(self) -> float:
        """Seconds until the caller's deadline; infinite without one."""
        return self._began_s + self._allowed_s - time.monotonic()

    async def message(self, *, patiently: bool = False) -> Message | None:
        """The next message, of which no more than its length has been read; None after the last.

        ``patiently``: the client may take its time to begin it, as it may in a stream.

        Raises
        ------
        PayloadTooLarge
            It is longer than the limit.
        MalformedRequest, RequestTimeout, StreamGone
            The call ends or pauses within its prefix.
        """
        stream = self._stream
        if not await stream.at_least(1, patiently=patiently):
            return None
        prefix = bytes((await stream.at_least(_PREFIX_BYTES))[:_PREFIX_BYTES])
        if len(prefix) < _PREFIX_BYTES:
            raise MalformedRequest("the call ended within the prefix of a message")
        stream.take(_PREFIX_BYTES)
        size = int.from_bytes(prefix[1:], "big")
        limit = min(self._max_message_bytes, _MAX_COMPRESSED_BYTES) if prefix[0] else math.inf
        if size > min(limit, self._max_message_bytes):
            raise PayloadTooLarge(
                f"the message has {size:,} bytes; this server takes at most "
                f"{min(limit, self._max_message_bytes):,}{' compressed' if prefix[0] else ''}"
            )
        return Message(
            stream, size, self._encoding() if prefix[0] else None, self._max_message_bytes
        )

    def whole_message(self) -> bytes | None:
        """The one message of a call, if all of it has come already and it is a small one as it is;
        it is not taken."""
        shown = self._stream.ended_with(_PREFIX_BYTES + SMALL_BYTES)
        if shown is None or len(shown) < _PREFIX_BYTES or shown[0]:
            return None
        size = int.from_bytes(shown[1:_PREFIX_BYTES], "big")
        return bytes(shown[_PREFIX_BYTES:]) if size == len(shown) - _PREFIX_BYTES else None

    async def send(self, parts: Sequence[Part]) -> None:
        """Send one message; when it returns, nothing refers to the parts any more.

        A small one waits for the next or for `finish`, and leaves with it.
        """
        size = sum(map(len, parts))
        prefixed = [*self._small, b"\0" + size.to_bytes(4, "big"), *parts]
        self._small = []
        if sum(map(len, prefixed)) <= 8192 and not self._answering:
            self._small = [b"".join(prefixed)]
            return
        headers = None if self._answering else _RESPONSE_HEADERS
        self._answering = True
        await self._stream.send(headers, prefixed, None)

    async def flush(self) -> None:
        """Send what still waits: for streams, whose next message may be long in coming."""
        if self._small:
            small, self._small = self._small, []
            self._answering = True
            await self._stream.send(_RESPONSE_HEADERS, small, None)

    async def finish(
        self, status: str = OK, detail: str = "", trailers: Iterable[tuple[str, str]] = ()
    ) -> None:
        """End the call with a status of `STATUS`, a sentence and trailers."""
        last = [(b"grpc-status", str(STATUS[status]).encode())]
        if detail:
            last.append((b"grpc-message", _percent_encoded(detail)))
        last += [(name.encode(), value.encode("latin-1", "replace")) for name, value in trailers]
        if self._answering:
            await self._stream.send(None, (), last)
        elif self._small and status == OK:
            await self._stream.send(_RESPONSE_HEADERS, self._small, last)
        else:
            # Of an answer that failed the message is not sent: a status without one says so.
            await self._stream.send(None, (), [*_RESPONSE_HEADERS, *last])

    async def refuse_http(self, status: int) -> None:
        """Answer a request that is no gRPC call."""
        await self._stream.send(None, (), [(b":status", str(status).encode())])

    def abort(self) -> None:
        """Break the call off: what was sent of its answer is not all of it."""
        self._stream.reset(Error.INTERNAL_ERROR)

    def _timeout_s(self) -> float:
        found = _TIMEOUT.fullmatch(self.first("grpc-timeout"))
        return float(found[1]) * _UNITS_S[found[2]] if found else math.inf

    def _encoding(self) -> str:
        encoding = self.first("grpc-encoding")
        if encoding not in _WINDOW_BITS:
            raise UnsupportedMediaType(
                f"a message is compressed as {encoding[:40]!r}; expected gzip, deflate or identity"
            )
        return encoding


@lru_cache(maxsize=64)
def _metadata(headers: tuple[Header, ...]) -> Mapping[str, list[str]]:
    """Headers by name: a client sends the same with nearly every call."""
    found: dict[str, list[str]] = {}
    for name, value in headers:
        found.setdefault(name.decode("latin-1"), []).append(value.decode("latin-1"))
    return found


class Message:
    """One message that is being received; what is taken of it never reaches beyond its end."""

    def __init__(self, stream: Stream, size: int, encoding: str | None, max_bytes: int) -> None:
        self.size = self.left = size
        self.encoding = encoding
        self._stream, self._max_bytes = stream, max_bytes

    async def whole(self) -> bytes:
        """All of it, decompressed; for messages that may be held in memory twice.

        Raises as `next`, and PayloadTooLarge if it decompresses to more than the limit.
        """
        shown = len(await self._stream.at_least(self.left))
        if shown < self.left:
            raise self._cut(shown)
        data = self.take(self.left)
        self._stream.reopen()
        if self.encoding is None:
            return data
        # In a thread: a few bytes may take long to inflate.
        limit = min(self._max_bytes, _MAX_COMPRESSED_BYTES)
        return await asyncio.to_thread(_inflated, data, self.encoding, limit)

    async def next(self, size: int) -> bytes:
        """Its next ``size`` bytes, or all that are left of it, without taking them.

        Raises
        ------
        MalformedRequest
            The call ends within the message.
        RequestTimeout, StreamGone
        """
        size = min(size, self.left)
        shown = await self._stream.at_least(size)
        if len(shown) < size:
            raise self._cut(len(shown))
        return bytes(memoryview(shown)[:size])

    def take(self, size: int) -> bytes:
        """Take that many of the bytes that `next` has shown."""
        self.left -= size
        return self._stream.take(size)

    async def into(self, target: memoryview) -> None:
        """Receive its next bytes straight into ``target``. Raises as `next`."""
        received = await self._stream.into(target)
        if received < len(target):
            raise self._cut(received)
        self.left -= len(target)

    async def drop(self, size: int) -> None:
        """Receive its next bytes and forget them. Raises as `next`."""
        dropped = await self._stream.drop(size)
        if dropped < size:
            raise self._cut(dropped)
        self.left -= size

    def end(self) -> None:
        """It has been read: the client may send its next."""
        self._stream.reopen()

    def _cut(self, received: int) -> MalformedRequest:
        return MalformedRequest(
            f"the call ended within a message of {self.size:,} bytes, after "
            f"{self.size - self.left + received:,} of them"
        )


def _inflated(data: bytes, encoding: str, limit: int) -> bytes:
    inflating = zlib.decompressobj(_WINDOW_BITS[encoding])
    try:
        inflated = inflating.decompress(data, limit + 1)
    except zlib.error:
        raise MalformedRequest(f"the message cannot be read as {encoding}") from None
    if len(inflated) > limit:
        raise PayloadTooLarge(
            f"the message has more than {limit:,} bytes once decompressed; send large tensors "
            "as they are"
        )
    if not inflating.eof:
        raise MalformedRequest(f"the message ends within its {encoding} data")
    return inflated


def _percent_encoded(text: str) -> bytes:
    encoded = text.encode("utf-8", "replace")
    return _UNPRINTABLE.sub(lambda found: b"%%%02X" % found[0][0], encoded)
