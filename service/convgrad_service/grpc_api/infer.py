"""ModelInfer and ModelStreamInfer, from serialized request to serialized response."""

from __future__ import annotations

import asyncio
from functools import partial

from convgrad_service.engine.pipeline import Pipeline
from convgrad_service.engine.request import Deadline
from convgrad_service.grpc_api.call import EOF, Call
from convgrad_service.grpc_api.exchange import Exchanges
from convgrad_service.grpc_api.infer_transport import MAX_MESSAGE_BYTES, InferTransport, Message
from convgrad_service.grpc_api.infer_wire import Part, encode_stream_error
from convgrad_service.oip.shared_memory import SharedMemory
from convgrad_service.server.settings import Settings

__all__ = ["MAX_MESSAGE_BYTES", "InferMethods"]

_UNKNOWN = "unknown"
"""The operation logged for a request that was refused before its message was read."""
# Requests of one stream in progress at once; no further one is read meanwhile.
_STREAM_AHEAD = 8


class InferMethods:
    """The methods that compute."""

    def __init__(
        self,
        pipeline: Pipeline,
        settings: Settings,
        exchanges: Exchanges,
        shared_memory: SharedMemory,
    ) -> None:
        self._settings, self._exchanges = settings, exchanges
        self._transport = partial(InferTransport, pipeline, shared_memory, exchanges.arrivals)

    async def infer(self, call: Call) -> bytes:
        """ModelInfer."""
        context, sent = call.context, b""
        deadline = Deadline.after(self._allowed_s(call))

        async def send(parts: list[Part]) -> None:
            nonlocal sent
            sent = await self._exchanges.answers.joined(call, parts)

        async def receive() -> bytes:
            context.operation = None
            return await self._exchanges.arrivals.message(call, deadline)

        context.operation = _UNKNOWN
        message = Message(receive=receive)
        await self._transport(context, deadline, message, send, in_stream=False).run()
        return sent

    async def stream(self, call: Call) -> None:
        """ModelStreamInfer: responses come in the order of the requests.

        The next request is received while one is computed. A request that fails gets a response
        with ``error_message``, and the stream goes on.
        """
        with self._exchanges.arrivals.stream(call):
            await self._answer_all(call)

    async def _answer_all(self, call: Call) -> None:
        slots, places = asyncio.Semaphore(_STREAM_AHEAD), self._exchanges.arrivals.streams
        running: set[asyncio.Task[None]] = set()
        previous: asyncio.Task[None] | None = None

        def done(task: asyncio.Task[None]) -> None:
            running.discard(task)
            slots.release()
            if not running:
                places.rest(call)

        try:
            while (body := await call.rpc.read()) is not EOF:
                places.work(call)
                self._exchanges.authenticate(call)
                await slots.acquire()
                message = Message(bytes(body))
                del body
                previous = asyncio.ensure_future(self._one_of_stream(call, message, previous))
                running.add(previous)
                previous.add_done_callback(done)
                await message.filled.wait()
            await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _one_of_stream(
        self, call: Call, message: Message, previous: asyncio.Task[None] | None
    ) -> None:
        context = call.begin()
        self._exchanges.trace(call, context)
        deadline = Deadline.after(self._allowed_s(call))
        began = False

        async def send(parts: list[Part]) -> None:
            nonlocal began
            if previous is not None:
                await asyncio.wait([previous])
            began = True
            counted = await self._exchanges.answers.counted(call, sum(map(len, parts)))
            try:
                # A cancelled write would leak its message in grpcio.
                writing = asyncio.ensure_future(call.rpc.write(b"".join(parts)))
                writing.add_done_callback(_retrieved)
                await asyncio.shield(writing)
            finally:
                counted.left()

        transport = self._transport(context, deadline, message, send, in_stream=True)
        try:
            _, error = await self._exchanges.attempt(
                "ModelStreamInfer", call, context, transport.run()
            )
            if error is not None and began:
                # Part of the answer has been sent, so only ending the stream can report the error.
                call.end_with(error)
            elif error is not None:
                message.filled.set()
                detail = f"{error.detail} ({error.code})"
                await send([encode_stream_error(message.model, message.id, detail)])
        finally:
            message.filled.set()
            self._exchanges.record("ModelStreamInfer", context)

    def _allowed_s(self, call: Call) -> float:
        return min(max(call.remaining_s, 0.0), self._settings.max_timeout_s)


def _retrieved(done: asyncio.Future[None]) -> None:
    """Mark an error as retrieved: whoever awaited it may be gone, and asyncio would log it."""
    if not done.cancelled():
        done.exception()
