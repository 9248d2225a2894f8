"""What gRPC messages may hold of this process's memory on their way in and out.

grpcio gathers a message in memory of its own before it hands it over, and tells neither its length
nor how much of it has come. So what bounds that memory is taken before a message is read: a permit
for each message that does not come at once. A stalled client takes no permit from small requests,
which need none. Answers are counted by their size until grpcio has sent them.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from convgrad.errors import MalformedRequest, Overloaded, RequestTimeout, ServiceError
from convgrad_service.engine.deadline import Deadline
from convgrad_service.grpc_api.call import EOF, Call
from convgrad_service.server.settings import Settings

__all__ = ["Answer", "Answers", "Arrivals"]

# What a network brings in this time is memory enough for messages without a permit.
_AT_ONCE_S = 0.1
# Of methods that need no key: their messages are a few bytes, sent together with the headers.
_OPEN_PERMITS, _OPEN_TIMEOUT_S = 2, 1.0
# Streams that may be open, for each message that may be on its way.
_STREAMS_PER_PERMIT = 8
_RETRY_AFTER_S = 1.0
# What is too little to be counted.
_SMALL_ANSWER_BYTES = 4096
# Of all unread answers those of one connection may take this share.
_CONNECTION_SHARE = 1 / 4


class Arrivals:
    """Reads messages, with a permit for each that has not come after 0.1 s."""

    def __init__(self, settings: Settings, *, needs_key: bool = True) -> None:
        permits = settings.grpc_message_permits if needs_key else _OPEN_PERMITS
        self.permits = permits
        self.longest_s = settings.max_timeout_s if needs_key else _OPEN_TIMEOUT_S
        self._patience_s = settings.body_idle_timeout_s
        self._waiting: OrderedDict[_Arrival, float] = OrderedDict()
        self._held_limit = permits * settings.grpc_max_message_bytes
        self.held_bytes = 0
        self._streams = 0

    async def message(self, call: Call, deadline: Deadline | None = None) -> bytes:
        """The one message of a unary call.

        Raises
        ------
        MalformedRequest
            There is none, or a second one.
        grpc.aio.AbortError
            It did not come in time, and the call has been answered with that.
        """
        with _Arrival(self, call, deadline or Deadline.after(self.longest_s)):
            message = await call.rpc.read()
            if message is EOF:
                raise MalformedRequest("the call ended without its message")
            if await call.rpc.read() is not EOF:
                raise MalformedRequest("the call holds a second message; its method takes one")
        return bytes(message)

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Count an open stream, whose messages need no permit: it may be silent between them.

        Raises
        ------
        Overloaded
            As many are open as may be.
        """
        if self._streams >= _STREAMS_PER_PERMIT * self.permits:
            raise Overloaded(
                f"{self._streams} streams are open, and no more may be",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._streams += 1
        try:
            yield
        finally:
            self._streams -= 1

    def held(self, size_bytes: int) -> Held:
        """Count a message that has been read until its tensors are in their places.

        Raises
        ------
        Overloaded
            Together with the others it is more than may be.
        """
        if self.held_bytes + size_bytes > self._held_limit:
            raise Overloaded(
                f"messages that wait for memory hold {self.held_bytes:,} bytes of the "
                f"{self._held_limit:,} that they may; this one has {size_bytes:,}",
                retry_after_s=_RETRY_AFTER_S,
            )
        self.held_bytes += size_bytes
        return Held(self, size_bytes)

    def enter(self, arrival: _Arrival) -> bool:
        """Give a permit, for which one that had its time may have to go; whether there was one."""
        now_s = asyncio.get_running_loop().time()
        if len(self._waiting) >= self.permits:
            oldest, since_s = next(iter(self._waiting.items()))
            if now_s - since_s < self._patience_s:
                return False
            oldest.cut(
                RequestTimeout(
                    f"the message has not come within {self._patience_s:g} s, and others wait"
                )
            )
            del self._waiting[oldest]
        self._waiting[arrival] = now_s
        return True

    def leave(self, arrival: _Arrival) -> None:
        """Take its permit back, if it had one."""
        self._waiting.pop(arrival, None)


class Held:
    """The bytes of a message that are counted until `release`, or the end of the block."""

    def __init__(self, arrivals: Arrivals, size_bytes: int) -> None:
        self._arrivals, self._size_bytes = arrivals, size_bytes

    def release(self) -> None:
        """The message is in memory no more; harmless when it was not before."""
        self._arrivals.held_bytes -= self._size_bytes
        self._size_bytes = 0

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class _Arrival:
    """While it lasts, a call's message is awaited; what takes too long cuts the call."""

    __slots__ = ("_arrivals", "_call", "_deadline", "_timer")

    def __init__(self, arrivals: Arrivals, call: Call, deadline: Deadline) -> None:
        self._arrivals, self._call, self._deadline = arrivals, call, deadline

    def __enter__(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_AT_ONCE_S, self._late)

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._arrivals.leave(self)

    def cut(self, error: ServiceError) -> None:
        self._call.cut(error)

    def _late(self) -> None:
        if not self._arrivals.enter(self):
            self._call.cut(
                Overloaded(
                    f"{self._arrivals.permits} messages are on their way in, and no more may be",
                    retry_after_s=_RETRY_AFTER_S,
                )
            )
            return
        remaining_s = max(self._deadline.remaining_s, 0.0)
        self._timer = asyncio.get_running_loop().call_later(
            remaining_s, lambda: self._call.cut(self._deadline.exceeded())
        )


class Answers:
    """Counts the answers that grpcio has and has not sent, and cuts off who does not read."""

    def __init__(self, settings: Settings) -> None:
        self._limit_bytes = int(settings.grpc_max_unread_bytes)
        self._wait_s = settings.max_memory_wait_s
        self._idle_s = settings.answer_idle_timeout_s
        self._per_s = int(settings.min_body_bytes_per_s)
        self._bytes: Counter[str] = Counter()
        self._unread: OrderedDict[Answer, None] = OrderedDict()
        self._waiting: OrderedDict[asyncio.Future[Answer], tuple[Call, int]] = OrderedDict()

    async def joined(self, call: Call, parts: Sequence[bytes | memoryview]) -> bytes:
        """The only message that answers a call, counted until the call has ended.

        Raises as `counted`.
        """
        size_bytes = sum(map(len, parts))
        if size_bytes > _SMALL_ANSWER_BYTES:
            call.rpc.add_done_callback((await self.counted(call, size_bytes)).left)
        return b"".join(parts)

    async def counted(self, call: Call, size_bytes: int) -> Answer:
        """An answer of this size, once there is room for it; its caller says when it has left.

        Raises
        ------
        Overloaded
            The client, or others, have not read what was sent to them before.
        """
        if not self._waiting and self._fits(call, size_bytes):
            return self._count(call, size_bytes)
        loop = asyncio.get_running_loop()
        self._cut_the_oldest(loop.time())
        turn: asyncio.Future[Answer] = loop.create_future()
        self._waiting[turn] = call, size_bytes
        self._serve()
        try:
            async with asyncio.timeout(self._wait_s):
                return await turn
        except (TimeoutError, asyncio.CancelledError) as error:
            if turn.done() and not turn.cancelled():
                turn.result().left()
            if not isinstance(error, TimeoutError):
                raise
            raise Overloaded(
                f"answers that their clients have not read hold {self._bytes.total():,} bytes, "
                f"{self._bytes[call.peer]:,} of them on this connection; this one has "
                f"{size_bytes:,}",
                retry_after_s=_RETRY_AFTER_S,
            ) from None
        finally:
            self._waiting.pop(turn, None)

    def _fits(self, call: Call, size_bytes: int) -> bool:
        """Whether there is room; for one answer there is, whatever its size, beside no other."""
        mine, total = self._bytes[call.peer], self._bytes.total()
        share_bytes = self._limit_bytes * _CONNECTION_SHARE
        return (not mine or mine + size_bytes <= share_bytes) and (
            not total or total + size_bytes <= self._limit_bytes
        )

    def _count(self, call: Call, size_bytes: int) -> Answer:
        answer = Answer(self, call, size_bytes, self._idle_s + size_bytes / self._per_s)
        self._bytes[call.peer] += size_bytes
        self._unread[answer] = None
        return answer

    def _cut_the_oldest(self, now_s: float) -> None:
        """Where there is no room, who had time enough to read makes some."""
        oldest = next(iter(self._unread), None)
        if oldest is not None and now_s - oldest.since_s > self._idle_s:
            oldest.cut()

    def remove(self, answer: Answer) -> None:
        """It has been sent, or never will be."""
        if answer in self._unread:
            del self._unread[answer]
            self._bytes[answer.call.peer] -= answer.size_bytes
            if not self._bytes[answer.call.peer]:
                del self._bytes[answer.call.peer]
            self._serve()

    def _serve(self) -> None:
        """Let those go on for whom there is room; none waits for another connection's reading."""
        for turn, (call, size_bytes) in list(self._waiting.items()):
            if not turn.done() and self._fits(call, size_bytes):
                turn.set_result(self._count(call, size_bytes))


class Answer:
    """One answer that is to be sent within a time."""

    __slots__ = ("_answers", "_timer", "call", "since_s", "size_bytes")

    def __init__(self, answers: Answers, call: Call, size_bytes: int, longest_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._answers, self.call, self.size_bytes = answers, call, size_bytes
        self.since_s = loop.time()
        self._timer = loop.call_later(longest_s, self.cut)

    def left(self, _: object = None) -> None:
        """It has been sent, or never will be."""
        self._timer.cancel()
        self._answers.remove(self)

    def cut(self) -> None:
        """End the connection: grpcio ends no call whose answer waits to be read."""
        self.call.disconnect()
