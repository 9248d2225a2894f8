"""ModelInfer and ModelStreamInfer: a serialized request to a serialized answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from convgrad.errors import MalformedRequest, ProblemTooLarge
from convgrad_service.engine.deadline import Deadline
from convgrad_service.engine.pipeline import Pipeline
from convgrad_service.engine.request import ComputeRequest as Job
from convgrad_service.engine.request import Result
from convgrad_service.engine.scheduling.quotas import entered
from convgrad_service.engine.telemetry.request_context import RequestContext
from convgrad_service.engine.telemetry.timing import Timings
from convgrad_service.grpc_api.asked import Asked
from convgrad_service.grpc_api.at_once import SmallInfers
from convgrad_service.grpc_api.call import Call
from convgrad_service.grpc_api.exchange import Exchanges
from convgrad_service.grpc_api.http2.stream import StreamGone
from convgrad_service.grpc_api.infer_wire import (
    Part,
    encode_response,
    encode_stream_error,
    encode_stream_part,
    encode_stream_response,
)
from convgrad_service.oip.answer import answer_names, answer_outputs
from convgrad_service.oip.answer_parts import MAX_PART_BYTES, AnswerParts, row_bytes
from convgrad_service.oip.fields import described, request_fields
from convgrad_service.oip.request import InferRequest
from convgrad_service.oip.shared_memory import SharedMemory
from convgrad_service.problems import Problem
from convgrad_service.server.settings import Settings

__all__ = ["MAX_MESSAGE_BYTES", "InferMethods"]

MAX_MESSAGE_BYTES = 2**31 - 1
"""What protobuf and gRPC put into one message at most."""

# Names, shapes and the report beside an answer's tensors.
_HEAD_BYTES = 64 * 1024
# Requests of one stream that are in work at once; the next is not read before.
_STREAM_AHEAD = 8

Send = Callable[[list[Part]], Awaitable[None]]
Reply = Callable[[InferRequest, Result, Timings, Send], Awaitable[None]]


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
        self._small = SmallInfers(pipeline, settings.max_timeout_s)

    async def infer(self, call: Call) -> None:
        """ModelInfer."""

        async def work(context: RequestContext) -> None:
            at_once = await self._small.answer(call, context)
            if at_once is not None:
                await call.send(at_once)
                return
            deadline = Deadline.after(self._allowed_s(call))
            async with deadline.enforced():
                message = await call.message()
                if message is None:
                    raise MalformedRequest("the call ended without its message")
                await self._answer(Asked(message), context, deadline, _send_whole, call.send)

        await self._exchanges.run("ModelInfer", call, work)

    async def stream(self, call: Call) -> None:
        """ModelStreamInfer: answers in the order of the requests.

        While one is computed, the next is received. A request that fails gets an answer with
        ``error_message``, and the stream goes on.
        """

        async def work(_: RequestContext) -> None:
            slots = asyncio.Semaphore(_STREAM_AHEAD)
            previous: asyncio.Task[None] | None = None
            try:
                async with asyncio.TaskGroup() as tasks:
                    while (message := await call.message(patiently=True)) is not None:
                        await slots.acquire()
                        asked = Asked(message)
                        previous = tasks.create_task(self._one_of_stream(call, asked, previous))
                        previous.add_done_callback(lambda _: slots.release())
                        await asked.received.wait()
            except* StreamGone:
                raise StreamGone from None

        await self._exchanges.run("ModelStreamInfer", call, work)

    async def _one_of_stream(
        self, call: Call, asked: Asked, previous: asyncio.Task[None] | None
    ) -> None:
        context = self._exchanges.begin(call)
        began = False

        async def send(parts: list[Part]) -> None:
            nonlocal began
            if previous is not None:
                await asyncio.wait([previous])
            began = True
            await call.send(parts)
            await call.flush()

        async def work(context: RequestContext) -> None:
            deadline = Deadline.after(self._allowed_s(call))
            async with deadline.enforced():
                await self._answer(asked, context, deadline, _send_stream, send)

        try:
            _, error = await self._exchanges.attempt("ModelStreamInfer", context, work)
            if error is not None:
                if began:
                    call.abort()
                    raise StreamGone
                await asked.skip()
                asked.received.set()
                detail = f"{error.detail} ({error.code})"
                await send([encode_stream_error(asked.model, asked.id, detail)])
        finally:
            asked.received.set()
            self._exchanges.record("ModelStreamInfer", context)

    def _allowed_s(self, call: Call) -> float:
        return min(max(call.remaining_s, 0.0), self._settings.max_timeout_s)

    async def _answer(
        self,
        asked: Asked,
        context: RequestContext,
        deadline: Deadline,
        reply: Reply,
        send: Send,
    ) -> None:
        """Compute one request within ``deadline``, which the caller enforces."""
        with context.timings.stage("receive"):
            request = await asked.head()
        if reply is _send_whole:
            request.refuse_parts()
        context.operation = request.operation.name
        # Before the tensors are received, and after it is known what was refused.
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
            small=True,  # shapes and parameters; the tensors are received below
            owner=context.owner,
        )
        if reply is _send_whole and asked.whole is not None:
            self._small.remember(job, asked.whole, request)

        def decode() -> Mapping[str, Any]:
            return request_fields(request, described)

        async with (
            deadline.enforced() if own else contextlib.nullcontext(),
            entered(self._pipeline.engine, context.caller) as job.ticket,
            self._pipeline.begin(job, decode, regions=regions) as work,
        ):
            with context.timings.stage("receive"):
                await asked.fill(request, work)
            asked.received.set()
            context.received_bytes = asked.size
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
