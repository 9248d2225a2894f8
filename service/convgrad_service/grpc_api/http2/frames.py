"""Frames of HTTP/2: their kinds, flags and errors, and how those that we send are written."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from enum import IntEnum
from functools import lru_cache

__all__ = [
    "ACK",
    "END_HEADERS",
    "END_STREAM",
    "HEADER_BYTES",
    "MAX_WINDOW",
    "PADDED",
    "PREFACE",
    "PRIORITY",
    "Error",
    "Http2Error",
    "Kind",
    "Setting",
    "data_header",
    "frame",
    "goaway",
    "header_block",
    "ping_ack",
    "rst_stream",
    "settings",
    "unpacked_header",
    "window_update",
]

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADER_BYTES = 9
MAX_WINDOW = 2**31 - 1

END_STREAM = ACK = 0x1
END_HEADERS, PADDED, PRIORITY = 0x4, 0x8, 0x20


class Kind(IntEnum):
    """Kinds of frames; others are ignored."""

    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


class Error(IntEnum):
    """Why a stream was reset or a connection ended."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class Setting(IntEnum):
    """Settings that either side reads; others are ignored."""

    HEADER_TABLE_SIZE = 1
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class Http2Error(Exception):
    """The connection cannot go on."""

    def __init__(self, code: Error, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


_HEADER = struct.Struct(">HBBBL")


def unpacked_header(header: bytes | bytearray | memoryview) -> tuple[int, int, int, int]:
    """Length of the payload, kind, flags and stream of the frame that begins so."""
    high, low, kind, flags, stream = _HEADER.unpack_from(header)
    return high << 8 | low, kind, flags, stream & MAX_WINDOW


def _header(length: int, kind: Kind, flags: int, stream: int) -> bytes:
    return _HEADER.pack(length >> 8, length & 0xFF, kind, flags, stream)


def frame(kind: Kind, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A whole frame."""
    return _header(len(payload), kind, flags, stream) + payload


def data_header(length: int, stream: int, *, last: bool = False) -> bytes:
    """The header of a DATA frame whose payload is written after it."""
    return _header(length, Kind.DATA, END_STREAM if last else 0, stream)


def settings(values: Iterable[tuple[Setting, int]]) -> bytes:
    """A SETTINGS frame."""
    payload = b"".join(struct.pack(">HL", key, value) for key, value in values)
    return frame(Kind.SETTINGS, 0, 0, payload)


def window_update(stream: int, increment: int) -> bytes:
    """Leave to send ``increment`` more bytes, on a stream or (0) the connection."""
    return frame(Kind.WINDOW_UPDATE, 0, stream, increment.to_bytes(4, "big"))


def rst_stream(stream: int, code: Error) -> bytes:
    """The end of a stream."""
    return frame(Kind.RST_STREAM, 0, stream, code.to_bytes(4, "big"))


def ping_ack(payload: bytes) -> bytes:
    """The answer to a PING."""
    return frame(Kind.PING, ACK, 0, payload)


def goaway(last_stream: int, code: Error, reason: str = "") -> bytes:
    """The end of a connection: no stream after ``last_stream`` is or will be served."""
    payload = last_stream.to_bytes(4, "big") + code.to_bytes(4, "big") + reason.encode()
    return frame(Kind.GOAWAY, 0, 0, payload)


def header_block(
    stream: int, headers: Iterable[tuple[bytes, bytes]], max_frame: int, *, last: bool = False
) -> bytes:
    """HEADERS, and CONTINUATION where one frame does not hold them; names in lower case.

    Each header is a literal that no table remembers, so there is no state to keep in step.
    """
    block = _known_block(headers) if isinstance(headers, tuple) else _block(headers)
    if len(block) <= max_frame:
        flags = END_HEADERS | END_STREAM if last else END_HEADERS
        return frame(Kind.HEADERS, flags, stream, block)
    frames, kind = [], Kind.HEADERS
    for at in range(0, len(block), max_frame):
        part = block[at : at + max_frame]
        flags = END_HEADERS if at + max_frame >= len(block) else 0
        if kind is Kind.HEADERS and last:
            flags |= END_STREAM
        frames.append(frame(kind, flags, stream, part))
        kind = Kind.CONTINUATION
    return b"".join(frames)


def _block(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"".join([b"\0" + _string(name) + _string(value) for name, value in headers])


@lru_cache(maxsize=16)
def _known_block(headers: tuple[tuple[bytes, bytes], ...]) -> bytes:
    """Of headers in a tuple, which are the same in many answers."""
    return _block(headers)


def _string(text: bytes) -> bytes:
    size = len(text)
    if size < 127:
        return bytes((size,)) + text
    prefix, size = bytearray([127]), size - 127
    while size >= 128:
        prefix.append(size & 127 | 128)
        size >>= 7
    prefix.append(size)
    return bytes(prefix) + text
