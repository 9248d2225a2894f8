"""One HTTP/2 connection: frames taken apart as they come, and everything that bounds a client.

A client that breaks the protocol, or asks for more than a client has reason to, ends its own
connection and nobody else's: with GOAWAY, which says why.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable, Coroutine
from typing import Any

import hpack

from convgrad_service.grpc_api.http2.frames import (
    ACK,
    END_HEADERS,
    END_STREAM,
    MAX_WINDOW,
    PADDED,
    PRIORITY,
    Error,
    Http2Error,
    Kind,
    Setting,
    frame,
    goaway,
    ping_ack,
    rst_stream,
    window_update,
)
from convgrad_service.grpc_api.http2.headers import HeaderDecoder
from convgrad_service.grpc_api.http2.limits import MAX_FRAME_BYTES, Allowance, Limits, limits_told
from convgrad_service.grpc_api.http2.parser import Parser, unpadded
from convgrad_service.grpc_api.http2.stream import Stream

__all__ = ["Http2Connection"]

# What we write in one frame, so that a stream gets its turn beside another's large answer.
_MAX_SENT_FRAME_BYTES = 2**20
# From this on, what comes is read straight to where a stream wants it.
_DIRECT_BYTES = 64 * 1024
_LINGER_S = 0.2
_SMALL_DATA_BYTES = 64
_COUNTED = frozenset(Kind) - {Kind.DATA, Kind.HEADERS, Kind.PUSH_PROMISE, Kind.GOAWAY}
_DEFAULT_FRAME_BYTES = 16 * 1024
_DEFAULT_WINDOW = 2**16 - 1
# The connection's window is opened wide: what a client can make us hold, streams' windows bound.
_WINDOW_REFILL = 2**30


class Http2Connection(asyncio.BufferedProtocol):
    """``serve`` answers one stream; it is run as a task, and cancelled if the client goes away.

    ``scratch`` is what is read to: empty between reads, so all connections of a loop share it.
    """

    def __init__(
        self,
        serve: Callable[[Stream], Coroutine[Any, Any, None]],
        limits: Limits,
        connections: set[Http2Connection],
        scratch: memoryview,
    ) -> None:
        self.patience = limits.patience
        self.send_window = _DEFAULT_WINDOW
        self.max_frame = _DEFAULT_FRAME_BYTES
        self.paused = False
        self._serve, self._limits = serve, limits
        self._connections, self._scratch = connections, scratch
        self._transport: asyncio.Transport | None = None
        self._streams: dict[int, Stream] = {}
        self._tasks: dict[asyncio.Task[None], int] = {}
        self._decoder = HeaderDecoder(limits.max_header_bytes)
        self._last_seen = self._last_stream = 0  # opened by the client, served by us
        self._peer_window = _DEFAULT_WINDOW
        self._granted = MAX_WINDOW
        self._parser = Parser(self, MAX_FRAME_BYTES, limits.max_header_bytes)
        self._data: Stream | None = None  # whose DATA frame has begun
        self._direct: Stream | None = None  # whose memory is being read to
        self._block: tuple[int, int, bytearray] | None = None  # stream, flags, header block
        self.allowance = Allowance()
        self._timer: asyncio.TimerHandle | None = None
        self._heard_s = time.monotonic()
        self._draining = self._failed = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._connections.add(self)
        if len(self._connections) > self._limits.max_connections:
            self._fail(Http2Error(Error.ENHANCE_YOUR_CALM, "as many connections as there may be"))
            return
        self.write(limits_told(self._limits) + window_update(0, MAX_WINDOW - _DEFAULT_WINDOW))
        self._within(self._limits.header_timeout_s, self._late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        for stream in self._streams.values():
            stream.lose()
        self._streams.clear()
        self._cancel()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where to read to: a stream's own memory, where much is to come for it."""
        left = self._parser.data_left
        self._direct = None
        if left >= _DIRECT_BYTES and self._data is not None and not self._data.closed:
            target = self._data.room(left)
            if len(target) >= _DIRECT_BYTES:
                self._direct = self._data
                return target
        return self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        if self._failed:
            return  # what came behind an error
        self._heard_s = time.monotonic()
        try:
            if self._direct is not None:
                self._direct.filled(nbytes)
                self._parser.count_data(nbytes)
            else:
                self._parser.take(self._scratch[:nbytes])
        except Http2Error as error:
            self._fail(error)
        except hpack.HPACKError as error:
            # What the table holds is no longer known, so no later block can be read.
            self._fail(Http2Error(Error.COMPRESSION_ERROR, str(error)))

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        for stream in self._streams.values():
            stream.window_opened()

    def write(self, data: bytes) -> None:
        """Send frames."""
        if self._transport and not (self._failed or self._transport.is_closing()):
            self._transport.write(data)

    def grant(self, stream: int, increment: int) -> None:
        """Let the client send more on a stream."""
        self.write(window_update(stream, increment))

    def reset(self, stream: int, code: Error) -> None:
        """Tell the client that a stream is over."""
        self.write(rst_stream(stream, code))

    def abort(self) -> None:
        """End the connection at once."""
        if self._transport:
            self._transport.abort()

    @property
    def idle(self) -> bool:
        """Whether no stream is being served."""
        return not self._tasks

    def drain(self) -> None:
        """Serve the streams there are, and no more."""
        if not self._draining:
            self._draining = True
            self.write(goaway(self._last_stream, Error.NO_ERROR))
            self._close_if_drained()

    def close(self) -> None:
        """End the connection, with the streams that are still being served."""
        self._cancel()
        if self._transport is not None:
            self._transport.close()

    # Frames, as the parser finds them: see `parser.Frames`.

    def greeted(self) -> None:
        self._within(self._limits.ping_interval_s, self._check_alive)

    def begin_data(self, length: int, flags: int, number: int) -> None:
        if self._block is not None:
            raise Http2Error(Error.PROTOCOL_ERROR, "a header block is not continued")
        stream = self._streams.get(number)
        if stream is None and (number == 0 or number > self._last_seen or number % 2 == 0):
            raise Http2Error(Error.PROTOCOL_ERROR, f"DATA on stream {number}, which is idle")
        if length < _SMALL_DATA_BYTES and not flags & END_STREAM:
            self.allowance.spend()
        self._granted -= length
        if self._granted < 0:
            raise Http2Error(Error.FLOW_CONTROL_ERROR, "more than the connection's window")
        if self._granted < _WINDOW_REFILL:
            self.write(window_update(0, MAX_WINDOW - self._granted))
            self._granted = MAX_WINDOW
        if stream is not None:
            if stream.remote_ended:
                raise Http2Error(Error.STREAM_CLOSED, f"DATA on stream {number} after its end")
            if not stream.take_granted(length):
                raise Http2Error(Error.FLOW_CONTROL_ERROR, f"more than stream {number}'s window")
        self._data = stream

    def data_part(self, part: memoryview) -> None:
        if self._data is not None and not self._data.closed:
            self._data.feed(part)

    def end_data(self, flags: int) -> None:
        if self._data is not None and flags & END_STREAM:
            self._data.end()
        self._data = None

    def whole_frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if self._block is not None and (kind != Kind.CONTINUATION or number != self._block[0]):
            raise Http2Error(Error.PROTOCOL_ERROR, "a header block is not continued")
        if kind == Kind.PUSH_PROMISE:
            raise Http2Error(Error.PROTOCOL_ERROR, "a client cannot push")
        if kind in _COUNTED:
            self.allowance.spend()
        handler = self._HANDLERS.get(kind)
        if handler is not None:
            handler(self, flags, number, payload)

    def _on_headers(self, flags: int, number: int, payload: bytes) -> None:
        if flags & PADDED:
            payload = unpadded(payload)
        if flags & PRIORITY:
            if len(payload) < 5:
                raise Http2Error(Error.FRAME_SIZE_ERROR, "HEADERS too short for its priority")
            payload = payload[5:]
        self._block = (number, flags, bytearray(payload))
        if flags & END_HEADERS:
            self._end_block()
        else:
            self._within(self._limits.header_timeout_s, self._late)

    def _on_continuation(self, flags: int, number: int, payload: bytes) -> None:
        if self._block is None:
            raise Http2Error(Error.PROTOCOL_ERROR, "CONTINUATION of nothing")
        self._block[2].extend(payload)
        if len(self._block[2]) > self._limits.max_header_bytes:
            raise Http2Error(Error.ENHANCE_YOUR_CALM, "headers over the limit")
        if flags & END_HEADERS:
            self._within(self._limits.ping_interval_s, self._check_alive)
            self._end_block()

    def _end_block(self) -> None:
        assert self._block is not None  # noqa: S101
        number, flags, block = self._block
        self._block = None
        # Decoded whatever becomes of it: the table must stay in step.
        headers = self._decoder.decode(bytes(block))
        stream = self._streams.get(number)
        if stream is not None:
            if not flags & END_STREAM:
                raise Http2Error(Error.PROTOCOL_ERROR, "headers in the midst of a stream")
            stream.end()  # trailers, which gRPC's clients have no use for
            return
        if number % 2 == 0 or number <= self._last_seen:
            raise Http2Error(Error.PROTOCOL_ERROR, f"stream {number} cannot be opened")
        self._last_seen = number
        if self._draining:
            return  # GOAWAY has said so
        self._last_stream = number
        if len(self._tasks) >= self._limits.max_streams:
            self.allowance.spend()
            self.reset(number, Error.REFUSED_STREAM)
            return
        stream = Stream(self, number, headers, self._peer_window)
        stream.remote_ended = bool(flags & END_STREAM)
        self._streams[number] = stream
        task = asyncio.get_running_loop().create_task(self._serve(stream))
        self._tasks[task] = number
        task.add_done_callback(self._served)

    def _served(self, task: asyncio.Task[None]) -> None:
        number = self._tasks.pop(task)
        stream = self._streams.pop(number, None)
        if stream is not None:
            stream.reset(Error.INTERNAL_ERROR)  # unless it has been answered
        if not task.cancelled() and (error := task.exception()) is not None:
            asyncio.get_running_loop().call_exception_handler(
                {"message": "a stream's task failed", "exception": error, "task": task}
            )
        self._close_if_drained()

    def _on_rst_stream(self, flags: int, number: int, payload: bytes) -> None:
        _of_size(payload, 4, "RST_STREAM")
        if number == 0 or number > self._last_seen:
            raise Http2Error(Error.PROTOCOL_ERROR, "RST_STREAM of an idle stream")
        stream = self._streams.pop(number, None)
        if stream is None:
            return
        stream.lose()
        for task, served in self._tasks.items():
            if served == number:
                task.cancel()

    def _on_settings(self, flags: int, number: int, payload: bytes) -> None:
        if flags & ACK:
            return
        _of_size(payload, len(payload) // 6 * 6, "SETTINGS")
        for key, value in struct.iter_unpack(">HL", payload):
            if key == Setting.INITIAL_WINDOW_SIZE:
                if value > MAX_WINDOW:
                    raise Http2Error(Error.FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE too large")
                for stream in self._streams.values():
                    self._widen(stream, value - self._peer_window)
                self._peer_window = value
            elif key == Setting.MAX_FRAME_SIZE:
                if not _DEFAULT_FRAME_BYTES <= value < 2**24:
                    raise Http2Error(Error.PROTOCOL_ERROR, "MAX_FRAME_SIZE out of range")
                self.max_frame = min(value, _MAX_SENT_FRAME_BYTES)
        self.write(frame(Kind.SETTINGS, ACK, 0))

    def _on_ping(self, flags: int, number: int, payload: bytes) -> None:
        _of_size(payload, 8, "PING")
        if not flags & ACK:
            self.write(ping_ack(payload))

    def _on_window_update(self, flags: int, number: int, payload: bytes) -> None:
        _of_size(payload, 4, "WINDOW_UPDATE")
        increment = int.from_bytes(payload, "big") & MAX_WINDOW
        if not increment:
            raise Http2Error(Error.PROTOCOL_ERROR, "WINDOW_UPDATE by nothing")
        if number:
            if number > self._last_seen:
                raise Http2Error(Error.PROTOCOL_ERROR, "WINDOW_UPDATE of an idle stream")
            stream = self._streams.get(number)
            if stream is not None:
                self._widen(stream, increment)
            return
        self.send_window += increment
        if self.send_window > MAX_WINDOW:
            raise Http2Error(Error.FLOW_CONTROL_ERROR, "the connection's window is too large")
        for stream in self._streams.values():
            stream.window_opened()

    def _widen(self, stream: Stream, increment: int) -> None:
        stream.send_window += increment
        if stream.send_window > MAX_WINDOW:
            raise Http2Error(Error.FLOW_CONTROL_ERROR, "a stream's window is too large")
        stream.window_opened()

    _HANDLERS: dict[int, Callable[[Http2Connection, int, int, bytes], None]] = {  # noqa: RUF012
        Kind.HEADERS: _on_headers,
        Kind.RST_STREAM: _on_rst_stream,
        Kind.SETTINGS: _on_settings,
        Kind.PING: _on_ping,
        Kind.WINDOW_UPDATE: _on_window_update,
        Kind.CONTINUATION: _on_continuation,
    }

    def _within(self, timeout_s: float, otherwise: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(timeout_s, otherwise)

    def _late(self) -> None:
        self._fail(Http2Error(Error.SETTINGS_TIMEOUT, "the preface or headers are late"))

    def _check_alive(self) -> None:
        """Ask a silent client whether it is there; end the connection if it did not answer."""
        silent_s = time.monotonic() - self._heard_s
        if silent_s > 2 * self._limits.ping_interval_s:
            self.abort()
            return
        if silent_s > 0.5 * self._limits.ping_interval_s:
            self.write(frame(Kind.PING, 0, 0, b"convgrad"))
        self._within(self._limits.ping_interval_s, self._check_alive)

    def _fail(self, error: Http2Error) -> None:
        self.write(goaway(self._last_stream, error.code, error.reason))
        self._failed = True
        self._cancel()
        # Closed with unread bytes before it, the client would see a reset in place of the reason.
        self._within(_LINGER_S, self.close)

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _close_if_drained(self) -> None:
        if self._draining and not self._tasks and self._transport is not None:
            self._transport.close()


def _of_size(payload: bytes, size: int, what: str) -> None:
    if len(payload) != size:
        raise Http2Error(Error.FRAME_SIZE_ERROR, f"{what} of {len(payload)} bytes, not {size}")
