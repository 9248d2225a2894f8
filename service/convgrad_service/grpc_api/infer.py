"""ModelInfer and ModelStreamInfer: a serialized request to a serialized answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np

from convgrad.errors import ProblemTooLarge, ServiceError
from convgrad_service.engine.deadline import Deadline
from convgrad_service.engine.pipeline import SMALL_BYTES, Pipeline, Work
from convgrad_service.engine.request import ComputeRequest as Job
from convgrad_service.engine.request import Result
from convgrad_service.engine.scheduling.quotas import Ticket, entered
from convgrad_service.engine.telemetry.request_context import RequestContext
from convgrad_service.engine.telemetry.timing import Timings
from convgrad_service.grpc_api.at_once import SmallInfers
from convgrad_service.grpc_api.call import EOF, Call
from convgrad_service.grpc_api.exchange import Exchanges
from convgrad_service.grpc_api.infer_wire import (
    Part,
    encode_response,
    encode_stream_error,
    encode_stream_part,
    encode_stream_response,
    read_infer_request,
    request_names,
)
from convgrad_service.grpc_api.limits import SMALL_ANSWER_BYTES
from convgrad_service.oip.answer import answer_names, answer_outputs
from convgrad_service.oip.answer_parts import MAX_PART_BYTES, AnswerParts, row_bytes
from convgrad_service.oip.fields import described, request_fields, tensor_in
from convgrad_service.oip.request import InferRequest, Span
from convgrad_service.oip.shared_memory import SharedMemory
from convgrad_service.problems import Problem
from convgrad_service.server.settings import Settings

__all__ = ["MAX_MESSAGE_BYTES", "InferMethods"]

MAX_MESSAGE_BYTES = 2**31 - 1
"""What protobuf and gRPC put into one message at most."""

UNKNOWN = "unknown"
"""The operation of a request that was refused before its message was read."""

# Names, shapes and the report beside an answer's tensors.
_HEAD_BYTES = 64 * 1024
# Requests of one stream that are in work at once; the next is not read before.
_STREAM_AHEAD = 8

Send = Callable[[list[Part]], Awaitable[None]]
Reply = Callable[[InferRequest, Result, Timings, Send], Awaitable[None]]


class _Asked:
    """One request in its message, which is let go of once the tensors are in their places."""

    def __init__(self, body: bytes) -> None:
        self.size_bytes = len(body)
        self.body = body
        self.model = self.id = ""
        self.filled = asyncio.Event()

    def read(self) -> InferRequest:
        """What is asked; ``model`` and ``id`` are set as far as they can be read."""
        try:
            request = read_infer_request(self.body)
        except ServiceError:
            self.model, self.id = request_names(self.body)
            raise
        self.model, self.id = request.operation.name, request.id
        return request

    async def fill(self, request: InferRequest, work: Work) -> None:
        """Copy the tensors into the places that ``work`` has for them."""
        body, self.body = self.body, b""
        await work.fill(
            {
                tensor.name: tensor.source
                if isinstance(tensor.source, np.ndarray)
                else tensor_in(body, tensor)
                for tensor in request.inputs
                if isinstance(tensor.source, np.ndarray | Span)
            }
        )
        self.filled.set()


class InferMethods:
    """The two methods that compute."""

    def __init__(
        self,
        pipeline: Pipeline,
        settings: Settings,
        exchanges: Exchanges,
        shared_memory: SharedMemory,
    ) -> None:
        self._pipeline = pipeline
        self._memory = shared_memory
        self._settings = settings
        self._exchanges = exchanges
        self._small = SmallInfers(pipeline)

    async def infer(self, call: Call) -> bytes:
        """ModelInfer."""
        context = call.context
        deadline = Deadline.after(self._allowed_s(call))
        # What it may have is decided before there is a message of it.
        context.operation = UNKNOWN
        async with entered(self._pipeline.engine, call.caller) as ticket:
            self._pipeline.admit()
            context.operation = None
            with context.timings.stage("receive"):
                body = await self._exchanges.arrivals.message(call, deadline)
            answer = await self._small.answer(call, body, deadline)
            if answer is not None:
                return answer
            asked = _Asked(body)
            del body
            sent = b""

            async def send(parts: list[Part]) -> None:
                nonlocal sent
                size_bytes = sum(map(len, parts))
                if size_bytes > SMALL_ANSWER_BYTES:
                    counted = await self._exchanges.answers.counted(call, size_bytes)
                    call.rpc.add_done_callback(counted.left)
                sent = b"".join(parts)

            async with deadline.enforced():
                await self._answer(asked, context, deadline, ticket, _send_whole, send)
            return sent

    async def stream(self, call: Call) -> None:
        """ModelStreamInfer: answers in the order of the requests.

        While one is computed, the next is received. A request that fails gets an answer with
        ``error_message``, and the stream goes on.
        """
        slots = asyncio.Semaphore(_STREAM_AHEAD)
        running: set[asyncio.Task[None]] = set()
        previous: asyncio.Task[None] | None = None
        try:
            while (body := await call.rpc.read()) is not EOF:
                self._exchanges.authenticate(call)
                await slots.acquire()
                asked = _Asked(bytes(body))
                del body
                previous = asyncio.ensure_future(self._one_of_stream(call, asked, previous))
                running.add(previous)
                previous.add_done_callback(running.discard)
                previous.add_done_callback(lambda _: slots.release())
                await asked.filled.wait()
            await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _one_of_stream(
        self, call: Call, asked: _Asked, previous: asyncio.Task[None] | None
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
                # Cancelled, a write would leave its message in grpcio's memory for good.
                await asyncio.shield(call.rpc.write(b"".join(parts)))
            finally:
                counted.left()

        async def work() -> None:
            async with deadline.enforced(), entered(self._pipeline.engine, call.caller) as ticket:
                await self._answer(asked, context, deadline, ticket, _send_stream, send)

        try:
            _, error = await self._exchanges.attempt("ModelStreamInfer", call, context, work())
            if error is not None and began:
                # Part of the answer has left: only the end of the stream can say so.
                call.cut(error)
            elif error is not None:
                asked.filled.set()
                detail = f"{error.detail} ({error.code})"
                await send([encode_stream_error(asked.model, asked.id, detail)])
        finally:
            asked.filled.set()
            self._exchanges.record("ModelStreamInfer", context)

    def _allowed_s(self, call: Call) -> float:
        return min(max(call.remaining_s, 0.0), self._settings.max_timeout_s)

    async def _answer(
        self,
        asked: _Asked,
        context: RequestContext,
        deadline: Deadline,
        ticket: Ticket | None,
        reply: Reply,
        send: Send,
    ) -> None:
        """Compute one request within ``deadline``, which the caller enforces."""
        request = asked.read()
        if reply is _send_whole:
            request.refuse_parts()
        context.operation = request.operation.name
        self._pipeline.admit()
        regions = self._memory.parts(context.owner, request)
        own = request.timeout_s is not None and request.timeout_s < deadline.remaining_s
        if own:
            deadline = Deadline.after(request.timeout_s or 0.0)
        job = Job(
            request.operation,
            deadline,
            context.timings,
            refuse=lambda _, problem: _refuse_above_message(request, problem),
            small=True,  # shapes and parameters; the tensors are copied below
            owner=context.owner,
            ticket=ticket,
        )
        if reply is _send_whole and asked.size_bytes <= SMALL_BYTES:
            self._small.remember(job, asked.body, request)

        def decode() -> Mapping[str, Any]:
            return request_fields(request, described)

        with self._exchanges.arrivals.held(asked.size_bytes) as held:
            async with (
                deadline.enforced() if own else contextlib.nullcontext(),
                self._pipeline.begin(job, decode, regions=regions) as work,
            ):
                with context.timings.stage("decode"):
                    await asked.fill(request, work)
                held.release()
                context.received_bytes = asked.size_bytes
                result = await work.compute(streamed=request.in_parts)

                async def sent(parts: list[Part]) -> None:
                    context.sent_bytes += sum(map(len, parts))
                    await send(parts)

                await reply(request, result, context.timings, sent)


async def _send_whole(request: InferRequest, result: Result, timings: Timings, send: Send) -> None:
    with timings.stage("encode"):
        response = encode_response(request, result.outputs, result.report)
    await send(response)


async def _send_stream(request: InferRequest, result: Result, timings: Timings, send: Send) -> None:
    """One response, or, if that was asked for, one whenever more of the answer is final."""
    outputs, progress = result.outputs, result.progress
    if not request.in_parts:
        with timings.stage("encode"):
            response = encode_stream_response(request, outputs, result.report)
        await send(response)
        return

    async def all_of(name: str, _: int) -> int:
        return outputs[name].nbytes

    chosen = answer_outputs(request, outputs)
    rows = AnswerParts(
        {name: array for name, array in chosen.items() if request.sends(name)},
        (lambda name: outputs[name].nbytes) if progress is None else progress.final_bytes,
        all_of if progress is None else progress.until,
    )
    while True:
        found = await rows.next()
        final = rows.complete
        if final and progress is not None:
            await progress.end()
        await send(encode_stream_part(request, outputs, result.report, found, final=final))
        if final:
            return


def _refuse_above_message(request: InferRequest, problem: Problem) -> None:
    size_of = row_bytes if request.in_parts else (lambda spec: spec.size_bytes)
    sizes = [
        size_of(problem.outputs[name])
        for name in answer_names(request, problem.outputs)
        if request.sends(name)
    ]
    # Of parts, each output has so many bytes or one row in a response.
    size_bytes = sum(max(size, MAX_PART_BYTES) if request.in_parts else size for size in sizes)
    if size_bytes + _HEAD_BYTES > MAX_MESSAGE_BYTES:
        raise ProblemTooLarge(
            f"the answer has {size_bytes:,} bytes, and a gRPC message holds at most "
            f"{MAX_MESSAGE_BYTES:,}; use HTTP or shared memory, or in_parts over ModelStreamInfer"
        )
