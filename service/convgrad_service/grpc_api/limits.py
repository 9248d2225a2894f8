"""Bounds on the memory that gRPC messages take on their way in and out.

grpcio assembles a message in its own memory before it hands it over, and reveals neither its length
nor its progress. So the bound is enforced before a message is read: every message that does not
arrive at once needs a permit. Small requests need none, so stalled clients cannot block them.
Responses count by their size until grpcio has sent them.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from convgrad.errors import MalformedRequest, Overloaded, RequestTimeout, ServiceError
from convgrad_service.engine.admission import Deadline
from convgrad_service.grpc_api.exchange import EOF, Call
from convgrad_service.grpc_api.wire import decompress
from convgrad_service.server.settings import Settings

RETRY_AFTER_S = 1.0
# Fairness is between clients first, then between the connections of one client (maybe a proxy).
_SHARES: tuple[Callable[[Call], Hashable], ...] = (lambda call: call.client, lambda call: call.peer)
# A message that arrives within this time needs no permit: the network bounds its size.
_AT_ONCE_S = 0.1
# For methods without a key, whose messages are a few bytes sent together with the headers.
_OPEN_PERMITS, _OPEN_TIMEOUT_S = 2, 1.0
_STREAMS_PER_PERMIT = 8
# Smaller responses are not counted.
_SMALL_ANSWER_BYTES = 4096
# The share of the limit that the unread responses of one connection may take.
_CONNECTION_SHARE = 1 / 4


def larger_share(held: Mapping[Call, int], newcomer: Call, size: int) -> list[Call]:
    """Return the calls that should make room for ``size`` more of a newcomer's.

    These are the calls of the client that holds the most, if it holds more than the newcomer's
    client would afterwards; otherwise, by the same rule, those of a connection.
    """
    for share in _SHARES:
        totals: Counter[Hashable] = Counter()
        for call, each in held.items():
            totals[share(call)] += each
        for who, most in totals.most_common(1):
            if most > totals[share(newcomer)] + size:
                return [call for call in held if share(call) == who]
    return []


class CallSlots:
    """A limited number of slots for calls; when all are taken, a new call may take another's.

    It takes that of the call that has been idle longest, if for ``patience_s`` or more; otherwise
    one of the client with the most slots, if that has more than the new call's client would have.
    """

    def __init__(self, count: int, patience_s: float, idle: str) -> None:
        self.count = count
        self._patience_s, self._idle = patience_s, idle
        self._idle_since_s: dict[Call, float] = {}

    def acquire(self, call: Call) -> bool:
        """Return whether the call gets a slot."""
        if len(self._idle_since_s) >= self.count and not self._displace(call):
            return False
        self._idle_since_s[call] = time.monotonic()
        return True

    def mark_idle(self, call: Call) -> None:
        """Count the call, if it has a slot, as idle from now on."""
        if call in self._idle_since_s:
            self._idle_since_s[call] = time.monotonic()

    def mark_busy(self, call: Call) -> None:
        """Count the call, if it has a slot, as not idle."""
        if call in self._idle_since_s:
            self._idle_since_s[call] = math.inf

    def release(self, call: Call) -> None:
        """Free the call's slot, if it has one."""
        self._idle_since_s.pop(call, None)

    def _displace(self, newcomer: Call) -> bool:
        longest = min(self._idle_since_s, key=self._idle_since_s.__getitem__)
        if time.monotonic() - self._idle_since_s[longest] >= self._patience_s:
            self._end(
                longest, RequestTimeout(f"{self._idle} {self._patience_s:g} s, and others wait")
            )
            return True
        found = larger_share(dict.fromkeys(self._idle_since_s, 1), newcomer, 1)
        if not found:
            return False
        self._end(
            min(found, key=self._idle_since_s.__getitem__),
            Overloaded(
                f"this client had {len(found)} of {self.count} permits or streams, and others wait",
                retry_after_s=RETRY_AFTER_S,
            ),
        )
        return True

    def _end(self, call: Call, error: ServiceError) -> None:
        del self._idle_since_s[call]
        call.end_with(error)


class MessageReader:
    """Reads messages; one that has not arrived after 0.1 s needs a permit."""

    def __init__(self, settings: Settings, *, needs_key: bool = True) -> None:
        permits = settings.grpc_message_permits if needs_key else _OPEN_PERMITS
        patience_s = settings.body_idle_timeout_s
        self.permits = CallSlots(permits, patience_s, "the message has not arrived within")
        self.streams = CallSlots(
            _STREAMS_PER_PERMIT * permits, patience_s, "the stream has been silent for"
        )
        self.longest_s = settings.max_timeout_s if needs_key else _OPEN_TIMEOUT_S
        self._max_bytes = int(settings.grpc_max_message_bytes)
        self._held_limit = permits * self._max_bytes
        self._decompressing, self._wait_s = asyncio.Semaphore(), settings.max_memory_wait_s
        self.held_bytes = 0

    async def message(self, call: Call, deadline: Deadline | None = None) -> bytes:
        """Return the message of a unary call; any other is not read, as grpcio itself has it.

        Raises
        ------
        MalformedRequest
            There is no message.
        grpc.aio.AbortError
            The message did not arrive in time, and the call has been ended with that error.
        """
        with _TimeLimits(self, call, deadline or Deadline.after(self.longest_s)):
            message = await call.rpc.read()
        if message is EOF:
            raise MalformedRequest("the call ended without its message")
        return bytes(message)

    @contextmanager
    def stream(self, call: Call) -> Iterator[None]:
        """Count an open stream. Its messages need no permit: it may pause between them.

        Raises
        ------
        Overloaded
            Too many streams are open.
        """
        if not self.streams.acquire(call):
            raise Overloaded(
                f"{self.streams.count} streams are open, the maximum",
                retry_after_s=RETRY_AFTER_S,
            )
        try:
            yield
        finally:
            self.streams.release(call)

    async def decompress(self, message: bytes) -> bytes:
        """Decompress a message; one at a time, since a few bytes may become very many.

        Raises as `wire.decompress`, and Overloaded if others do not end in time.
        """
        try:
            async with asyncio.timeout(self._wait_s):
                await self._decompressing.acquire()
        except TimeoutError:
            raise Overloaded(
                f"other compressed messages were decompressed for {self._wait_s:g} s",
                retry_after_s=RETRY_AFTER_S,
            ) from None
        loop = asyncio.get_running_loop()
        decompressing = loop.run_in_executor(None, decompress, message, self._max_bytes)
        # Not before the thread has ended, which a cancelled call does not wait for.
        decompressing.add_done_callback(lambda _: self._decompressing.release())
        decompressing.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(decompressing)

    def hold(self, size_bytes: int) -> None:
        """Count a message that has been read, until `release`: its tensors have been copied then.

        Raises
        ------
        Overloaded
            Together with the other such messages it exceeds the limit.
        """
        if self.held_bytes + size_bytes > self._held_limit:
            raise Overloaded(
                f"messages that wait for memory hold {self.held_bytes:,} bytes of the "
                f"{self._held_limit:,} that they may; this one has {size_bytes:,}",
                retry_after_s=RETRY_AFTER_S,
            )
        self.held_bytes += size_bytes

    def release(self, size_bytes: int) -> None:
        """Stop counting a message."""
        self.held_bytes -= size_bytes


class _TimeLimits:
    """Ends a call whose message does not arrive in time, for the length of a ``with`` block."""

    __slots__ = ("_call", "_deadline", "_reader", "_timer")

    def __init__(self, reader: MessageReader, call: Call, deadline: Deadline) -> None:
        self._reader, self._call, self._deadline = reader, call, deadline

    def __enter__(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_AT_ONCE_S, self._late)

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._reader.permits.release(self._call)

    def _late(self) -> None:
        permits = self._reader.permits
        if not permits.acquire(self._call):
            self._call.end_with(
                Overloaded(
                    f"{permits.count} messages are being received, the maximum",
                    retry_after_s=RETRY_AFTER_S,
                )
            )
            return
        remaining_s = max(self._deadline.remaining_s, 0.0)
        self._timer = asyncio.get_running_loop().call_later(
            remaining_s, lambda: self._call.end_with(self._deadline.exceeded())
        )


class PendingResponses:
    """Counts responses that grpcio has not sent yet, and disconnects clients that do not read."""

    def __init__(self, settings: Settings) -> None:
        self._limit_bytes = int(settings.grpc_max_unread_bytes)
        self._wait_s = settings.max_memory_wait_s
        self._idle_s = settings.answer_idle_timeout_s
        self._per_s = int(settings.min_body_bytes_per_s)
        self._bytes: Counter[str] = Counter()
        self._unread: OrderedDict[PendingResponse, None] = OrderedDict()
        self._waiting: OrderedDict[asyncio.Future[PendingResponse], tuple[Call, int]] = (
            OrderedDict()
        )

    async def join(self, call: Call, parts: Sequence[bytes | memoryview]) -> bytes:
        """Return the single message that answers a call, counted until the call has ended.

        Raises as `count`.
        """
        size_bytes = sum(map(len, parts))
        if size_bytes > _SMALL_ANSWER_BYTES:
            call.rpc.add_done_callback((await self.count(call, size_bytes)).release)
        return b"".join(parts)

    async def count(self, call: Call, size_bytes: int) -> PendingResponse:
        """Wait until a response of this size fits; the caller releases it once it is sent.

        Raises
        ------
        Overloaded
            This client, or others, did not read earlier responses in time.
        """
        if not self._waiting and self._fits(call, size_bytes):
            return self._count(call, size_bytes)
        loop = asyncio.get_running_loop()
        self._disconnect_oldest(loop.time())
        turn: asyncio.Future[PendingResponse] = loop.create_future()
        self._waiting[turn] = call, size_bytes
        self._serve()
        relief = loop.call_later(self._wait_s / 2, self._relieve, turn, call, size_bytes)
        try:
            async with asyncio.timeout(self._wait_s):
                return await turn
        except (TimeoutError, asyncio.CancelledError) as error:
            if turn.done() and not turn.cancelled():
                turn.result().release()
            if not isinstance(error, TimeoutError):
                raise
            raise Overloaded(
                f"answers that their clients have not read hold {self._bytes.total():,} bytes, "
                f"{self._bytes[call.peer]:,} of them on this connection; this one has "
                f"{size_bytes:,}",
                retry_after_s=RETRY_AFTER_S,
            ) from None
        finally:
            relief.cancel()
            self._waiting.pop(turn, None)

    def _fits(self, call: Call, size_bytes: int) -> bool:
        """Return whether a response fits; one of any size fits if it is the only one."""
        mine, total = self._bytes[call.peer], self._bytes.total()
        share_bytes = self._limit_bytes * _CONNECTION_SHARE
        return (not mine or mine + size_bytes <= share_bytes) and (
            not total or total + size_bytes <= self._limit_bytes
        )

    def _count(self, call: Call, size_bytes: int) -> PendingResponse:
        response = PendingResponse(self, call, size_bytes, self._idle_s + size_bytes / self._per_s)
        self._bytes[call.peer] += size_bytes
        self._unread[response] = None
        return response

    def _disconnect_oldest(self, now_s: float) -> None:
        """Disconnect the client of the oldest response if it had enough time to read it."""
        oldest = next(iter(self._unread), None)
        if oldest is not None and now_s - oldest.since_s > self._idle_s:
            oldest.call.disconnect()

    def _relieve(self, turn: asyncio.Future[PendingResponse], call: Call, size_bytes: int) -> None:
        """Disconnect clients that leave more unread than ``call`` would, until it fits."""
        excess = self._bytes.total() + size_bytes - self._limit_bytes
        before_s = asyncio.get_running_loop().time() - self._wait_s / 2
        unread = list(self._unread)
        while excess > 0 and not turn.done():
            held: Counter[Call] = Counter()
            for each in unread:
                held[each.call] += each.size_bytes
            heaviest = larger_share(held, call, size_bytes)
            found = [each for each in unread if each.call in heaviest and each.since_s <= before_s]
            if not found:
                return
            found[0].call.disconnect()
            excess -= self._bytes[found[0].call.peer]
            unread = [each for each in unread if each.call.peer != found[0].call.peer]

    def remove(self, response: PendingResponse) -> None:
        """Stop counting a response."""
        if response in self._unread:
            del self._unread[response]
            self._bytes[response.call.peer] -= response.size_bytes
            if not self._bytes[response.call.peer]:
                del self._bytes[response.call.peer]
            self._serve()

    def _serve(self) -> None:
        """Admit every waiting response that fits; none waits for another connection's client."""
        for turn, (call, size_bytes) in list(self._waiting.items()):
            if not turn.done() and self._fits(call, size_bytes):
                turn.set_result(self._count(call, size_bytes))


class PendingResponse:
    """One response, with a time limit for sending it."""

    __slots__ = ("_responses", "_timer", "call", "since_s", "size_bytes")

    def __init__(
        self, responses: PendingResponses, call: Call, size_bytes: int, longest_s: float
    ) -> None:
        loop = asyncio.get_running_loop()
        self._responses, self.call, self.size_bytes = responses, call, size_bytes
        self.since_s = loop.time()
        self._timer = loop.call_later(longest_s, call.disconnect)

    def release(self, _: object = None) -> None:
        """Stop counting: the response has been sent, or never will be."""
        self._timer.cancel()
        self._responses.remove(self)
