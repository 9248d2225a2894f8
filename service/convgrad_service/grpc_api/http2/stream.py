"""One stream of a connection: a request's bytes to be read in order, and an answer to be sent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from convgrad.errors import RequestTimeout
from convgrad_service.grpc_api.http2.frames import Error, data_header, header_block
from convgrad_service.grpc_api.http2.limits import INITIAL_WINDOW

if TYPE_CHECKING:
    from convgrad_service.grpc_api.http2.connection import Http2Connection

__all__ = ["Header", "Part", "Stream", "StreamGone"]

# One write of a large answer.
_SEND_BYTES = 2**20
# Up to this an answer is one write, headers and trailers and all.
_SMALL_BYTES = 16 * 1024

# A wait that is ended by what happens, or by the connection's own pings.
_LONG_S = 3600.0
_NOWHERE = memoryview(b"")

Header = tuple[bytes, bytes]
Part = bytes | memoryview


class StreamGone(Exception):
    """The client has reset the stream, or the connection is lost."""


class Signal:
    """Something that one task waits for and others say."""

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        """Wake whoever waits."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self, timeout_s: float) -> bool:
        """Until it is said; False if that did not happen in time."""
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = loop.call_later(timeout_s, self.set)
        until_s = loop.time() + timeout_s
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None
        return loop.time() < until_s


class Stream:
    """See the module. One task may read it and one, the same or another, may send on it."""

    def __init__(
        self,
        connection: Http2Connection,
        number: int,
        headers: tuple[Header, ...],
        send_window: int,
    ) -> None:
        self.number = number
        self.headers = headers
        self.send_window = send_window
        self.remote_ended = False
        self.closed = False
        self._connection = connection
        self._granted = INITIAL_WINDOW
        self._ahead = bytearray()
        self._target: memoryview | None = None
        self._filled = 0
        self._wanted = 0
        self._received, self._sendable_again = Signal(), Signal()
        self._received_bytes = self._sent_bytes = 0
        self._last_s = self._sending_s = time.monotonic()

    # What the connection calls.

    def take_granted(self, size: int) -> bool:
        """Count bytes against the window; False if the client was not allowed to send them."""
        self._granted -= size
        return self._granted >= 0

    def feed(self, data: memoryview) -> None:
        """Bytes of the request have come."""
        self._received_bytes += len(data)
        self._last_s = time.monotonic()
        if self._target is not None:
            part = data[: len(self._target) - self._filled]
            self._target[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            data = data[len(part) :]
            if self._filled == len(self._target):
                self._received.set()
        if data:
            self._ahead += data
            if self._target is None and len(self._ahead) >= self._wanted:
                self._received.set()

    def room(self, most: int) -> memoryview:
        """Where up to ``most`` of the next bytes belong; empty if nobody waits for any."""
        if self._target is None:
            return _NOWHERE
        return self._target[self._filled : self._filled + most]

    def filled(self, size: int) -> None:
        """So many bytes have been written to `room`."""
        self._received_bytes += size
        self._last_s = time.monotonic()
        self._filled += size
        if self._target is not None and self._filled == len(self._target):
            self._received.set()

    def end(self) -> None:
        """The client has sent all of its request."""
        self.remote_ended = True
        self._received.set()

    def lose(self) -> None:
        """The client has reset the stream, or the connection is lost."""
        self.closed = True
        self._received.set()
        self._sendable_again.set()

    def window_opened(self) -> None:
        """More may be sent."""
        self._sendable_again.set()

    # What its task calls.

    @property
    def buffered(self) -> int:
        """Bytes that have come and were not taken."""
        return len(self._ahead)

    def ended_with(self, most: int) -> bytearray | None:
        """All of the request, not taken, if it has come to its end and has no more than that."""
        if not self.remote_ended or self.closed or len(self._ahead) > most:
            return None
        return self._ahead

    async def at_least(self, size: int, *, patiently: bool = False) -> bytearray:
        """What has come and was not taken: ``size`` bytes, or fewer if the request has ended.

        ``patiently``: the client may take its time, for it is not in the midst of anything.

        Raises
        ------
        RequestTimeout
            The client pauses too long, or sends too slowly.
        StreamGone
        """
        self._wanted = size
        self._grant(size - len(self._ahead))
        began_s, before = time.monotonic(), self._received_bytes
        while len(self._ahead) < size and not self.remote_ended:
            if patiently:
                self._refuse_closed()
                await self._received.wait(_LONG_S)
                continue
            await self._receive(began_s, before)
        self._refuse_closed()
        return self._ahead

    def take(self, size: int) -> bytes:
        """Take that many of the bytes that `at_least` has shown."""
        taken = bytes(memoryview(self._ahead)[:size])
        del self._ahead[:size]
        return taken

    async def into(self, target: memoryview) -> int:
        """Receive straight into ``target``; how many of its bytes came before the request's end.

        Raises as `at_least`.
        """
        part = min(len(self._ahead), len(target))
        target[:part] = self._ahead[:part]
        del self._ahead[:part]
        if part == len(target):
            return part
        self._target, self._filled = target, part
        began_s, before = time.monotonic(), self._received_bytes
        try:
            self._grant(len(target) - part)
            while self._filled < len(target) and not self.remote_ended:
                await self._receive(began_s, before)
            self._refuse_closed()
        finally:
            # Not before: what comes after an error must not be written to another's memory.
            self._target = None
        return self._filled

    async def drop(self, size: int) -> int:
        """Receive that many bytes and forget them; how many came."""
        dropped = 0
        while dropped < size:
            shown = len(await self.at_least(min(size - dropped, INITIAL_WINDOW)))
            if not shown:
                break
            dropped += len(self.take(min(shown, size - dropped)))
        return dropped

    def reopen(self) -> None:
        """Let the client send ahead again, up to the window that it began with."""
        self._wanted = 1
        self._grant(INITIAL_WINDOW - len(self._ahead))

    async def send(
        self,
        headers: Sequence[Header] | None,
        parts: Iterable[Part],
        trailers: Sequence[Header] | None,
    ) -> None:
        """Send headers, data and trailers, each where given; trailers end the stream.

        When it returns, nothing refers to the parts' memory any more.

        Raises
        ------
        StreamGone
            The client has gone, or takes nothing of its answer.
        """
        self._refuse_closed()
        max_frame = self._connection.max_frame
        begin = b"" if headers is None else header_block(self.number, headers, max_frame)
        end = b"" if trailers is None else header_block(self.number, trailers, max_frame, last=True)
        views = [memoryview(part).cast("B") for part in parts if len(part)]
        total = sum(map(len, views))
        room = min(self.send_window, self._connection.send_window, max_frame)
        if total <= min(room, _SMALL_BYTES):
            data = b"".join([data_header(total, self.number), *views]) if total else b""
            self._spend(total)
            self._connection.write(begin + data + end)
        else:
            self._connection.write(begin)
            self._sending_s, self._sent_bytes = time.monotonic(), 0
            for view in views:
                await self._send_part(view, max_frame)
            self._connection.write(end)
        if trailers is not None:
            self._finish()

    def reset(self, code: Error) -> None:
        """End the stream without an answer, or before its end."""
        if not self.closed:
            self.closed = True
            self._connection.reset(self.number, code)

    def _finish(self) -> None:
        """All is sent; what the client may still be sending is not wanted."""
        if not self.remote_ended:
            self.reset(Error.NO_ERROR)
        self.closed = True

    async def _send_part(self, part: memoryview, max_frame: int) -> None:
        while part:
            pieces: list[Part] = []
            batched = 0
            while part and batched < _SEND_BYTES:
                room = min(self.send_window, self._connection.send_window, max_frame)
                if room <= 0:
                    break
                piece = part[:room]
                pieces += [data_header(len(piece), self.number), piece]
                self._spend(len(piece))
                batched += len(piece)
                part = part[len(piece) :]
            if pieces:
                self._connection.write(b"".join(pieces))
                self._sent_bytes += batched
            while part and (
                min(self.send_window, self._connection.send_window) <= 0 or self._connection.paused
            ):
                await self._sendable()
                self._refuse_closed()

    async def _sendable(self) -> None:
        """Wait until it may be worth trying to send again."""
        patience = self._connection.patience
        happened = await self._sendable_again.wait(patience.send_idle_s)
        took_s = time.monotonic() - self._sending_s
        least = (took_s - patience.send_idle_s) * patience.min_bytes_per_s
        if not happened or least > self._sent_bytes:
            # It hardly reads: what else it has asked for on this connection waits as well.
            self._connection.abort()
            raise StreamGone

    async def _receive(self, began_s: float, before: int) -> None:
        self._refuse_closed()
        patience = self._connection.patience
        idle_s = patience.receive_idle_s - (time.monotonic() - max(self._last_s, began_s))
        if idle_s <= 0:
            raise RequestTimeout(
                f"nothing more of the message came for {patience.receive_idle_s:g} s, after "
                f"{self._received_bytes:,} bytes"
            )
        await self._received.wait(min(idle_s, 1.0))
        took_s = time.monotonic() - began_s
        least = (took_s - patience.receive_idle_s) * patience.min_bytes_per_s
        if least > self._received_bytes - before:
            raise RequestTimeout(
                f"{self._received_bytes - before:,} bytes of the message came in {took_s:.1f} s; "
                f"this server waits for no less than {patience.min_bytes_per_s:,.0f} bytes a second"
            )

    def _grant(self, wanted: int) -> None:
        """See to it that the client may send ``wanted`` bytes from now on."""
        more = wanted - self._granted
        if more > 0 and not (self.remote_ended or self.closed):
            self._granted += more
            self._connection.grant(self.number, more)

    def _spend(self, size: int) -> None:
        self.send_window -= size
        self._connection.send_window -= size
        self._connection.allowance.earn()

    def _refuse_closed(self) -> None:
        if self.closed:
            raise StreamGone
