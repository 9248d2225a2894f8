"""A connection's bytes taken apart into frames; DATA is passed on as it comes, others whole."""

from __future__ import annotations

from typing import Protocol

from convgrad_service.grpc_api.http2.frames import (
    HEADER_BYTES,
    PADDED,
    PREFACE,
    Error,
    Http2Error,
    Kind,
    unpacked_header,
)

__all__ = ["Frames", "Parser", "unpadded"]


class Frames(Protocol):
    """Who is told of what the parser finds; any call may raise Http2Error."""

    def greeted(self) -> None: ...

    def begin_data(self, length: int, flags: int, number: int) -> None: ...

    def data_part(self, part: memoryview) -> None: ...

    def end_data(self, flags: int) -> None: ...

    def whole_frame(self, kind: int, flags: int, number: int, payload: bytes) -> None: ...


class Parser:
    """Takes bytes in parts of any size.

    ``max_data_bytes`` bounds a frame of DATA, ``max_other_bytes`` the others, which are held until
    they are whole.
    """

    def __init__(self, frames: Frames, max_data_bytes: int, max_other_bytes: int) -> None:
        self._frames = frames
        self._max_data_bytes, self._max_other_bytes = max_data_bytes, max_other_bytes
        self._pending = bytearray()
        self._greeted = False
        self._in_data = False
        self._data_left = self._padding_left = self._data_flags = 0

    @property
    def data_left(self) -> int:
        """How many bytes come next that are nothing but the payload of DATA."""
        return self._data_left

    def count_data(self, size: int) -> None:
        """So many bytes of DATA have gone where they belong without being taken."""
        self._data_left -= size
        self._end_data_if_whole()

    def take(self, view: memoryview) -> None:
        """The next bytes.

        Raises
        ------
        Http2Error
            They are not HTTP/2, or more of it than is allowed.
        """
        while view:
            if (part_bytes := self._plain(view)) > 0:
                view = view[part_bytes:]
                continue
            if self._data_left:
                part = view[: self._data_left]
                self._frames.data_part(part)
                self.count_data(len(part))
            elif self._padding_left:
                part = view[: self._padding_left]
                self._padding_left -= len(part)
                self._end_data_if_whole()
            else:
                part = view[: self._needed() - len(self._pending)]
                self._pending += part
                # Asked again: a frame's header says how much more is needed.
                if len(self._pending) == self._needed():
                    self._whole()
            view = view[len(part) :]

    def _plain(self, view: memoryview) -> int:
        """Pass on a frame that ``view`` begins with and that lies in it whole, or the header of an
        unpadded DATA frame; how many bytes that were, 0 for all that is put together elsewhere."""
        if self._in_data or self._pending or not self._greeted or len(view) < HEADER_BYTES:
            return 0
        length, kind, flags, number = unpacked_header(view)
        if kind == Kind.DATA:
            if flags & PADDED or not 0 < length <= self._max_data_bytes:
                return 0
            self._frames.begin_data(length, flags, number)
            self._in_data, self._data_flags = True, flags
            self._data_left, self._padding_left = length, 0
            return HEADER_BYTES
        end = HEADER_BYTES + length
        if length > self._max_other_bytes or end > len(view):
            return 0
        self._frames.whole_frame(kind, flags, number, bytes(view[HEADER_BYTES:end]))
        return end

    def _needed(self) -> int:
        """How many bytes make what is pending whole: of DATA what stands before its payload."""
        if not self._greeted:
            return len(PREFACE)
        if len(self._pending) < HEADER_BYTES:
            return HEADER_BYTES
        length, kind, flags, _ = unpacked_header(self._pending)
        limit = self._max_data_bytes if kind == Kind.DATA else self._max_other_bytes
        if length > limit:
            raise Http2Error(Error.FRAME_SIZE_ERROR, f"a frame of {length} bytes")
        if kind == Kind.DATA:
            return HEADER_BYTES + (1 if flags & PADDED and length else 0)
        return HEADER_BYTES + length

    def _whole(self) -> None:
        if not self._greeted:
            if self._pending != PREFACE:
                raise Http2Error(Error.PROTOCOL_ERROR, "this is not HTTP/2 with prior knowledge")
            self._greeted = True
            self._pending.clear()
            self._frames.greeted()
            return
        length, kind, flags, number = unpacked_header(self._pending)
        payload = bytes(self._pending[HEADER_BYTES:])
        self._pending.clear()
        if kind != Kind.DATA:
            self._frames.whole_frame(kind, flags, number, payload)
            return
        padding = 0
        if flags & PADDED:
            if not payload or payload[0] >= length:
                raise Http2Error(Error.PROTOCOL_ERROR, "padding longer than its frame")
            padding = payload[0]
        self._frames.begin_data(length, flags, number)
        self._in_data, self._data_flags = True, flags
        self._data_left, self._padding_left = length - len(payload) - padding, padding
        self._end_data_if_whole()

    def _end_data_if_whole(self) -> None:
        if self._in_data and not (self._data_left or self._padding_left):
            self._in_data = False
            self._frames.end_data(self._data_flags)


def unpadded(payload: bytes) -> bytes:
    """The payload of a padded frame without its padding; raises Http2Error if that is too long."""
    if not payload or payload[0] >= len(payload):
        raise Http2Error(Error.PROTOCOL_ERROR, "padding longer than its frame")
    return payload[1 : len(payload) - payload[0]]
