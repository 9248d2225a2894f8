"""ModelStreamInfer: several requests on one call, whose responses come in their order."""

from __future__ import annotations

import asyncio

from convgrad_service.engine.admission import Deadline
from convgrad_service.grpc_api.exchange import EOF, Call, Exchanges
from convgrad_service.grpc_api.infer_transport import InferMethod, Message
from convgrad_service.grpc_api.wire import Part, encode_stream_error

# Requests of one stream in progress at once; no further one is read meanwhile.
_STREAM_AHEAD = 8


class StreamMethod:
    """ModelStreamInfer.

    The next request is received while one is computed. A request that fails gets a response with
    ``error_message``, and the stream goes on.
    """

    def __init__(self, infer: InferMethod, exchanges: Exchanges) -> None:
        self._infer, self._exchanges = infer, exchanges

    async def __call__(self, call: Call) -> None:
        """Answer all requests of a stream."""
        with self._infer.reader.stream(call):
            await self._answer_all(call)

    async def _answer_all(self, call: Call) -> None:
        slots, streams = asyncio.Semaphore(_STREAM_AHEAD), self._infer.reader.streams
        running: set[asyncio.Task[None]] = set()
        previous: asyncio.Task[None] | None = None

        def done(task: asyncio.Task[None]) -> None:
            running.discard(task)
            slots.release()
            if not running:
                streams.mark_idle(call)

        try:
            while (body := await call.rpc.read()) is not EOF:
                streams.mark_busy(call)
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
        deadline = Deadline.after(self._infer.allowed_s(call))
        began = False

        async def send(parts: list[Part]) -> None:
            nonlocal began
            if previous is not None:
                await asyncio.wait([previous])
            began = True
            pending = await self._infer.responses.count(call, sum(map(len, parts)))
            try:
                # A cancelled write would leak its message in grpcio.
                writing = asyncio.ensure_future(call.rpc.write(b"".join(parts)))
                writing.add_done_callback(_retrieved)
                await asyncio.shield(writing)
            finally:
                pending.release()

        transport = self._infer.transport(context, deadline, message, send, in_stream=True)
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
            self._exchanges.record("ModelStreamInfer", call, context)


def _retrieved(done: asyncio.Future[None]) -> None:
    """Mark an error as retrieved: whoever awaited it may be gone, and asyncio would log it."""
    if not done.cancelled():
        done.exception()
