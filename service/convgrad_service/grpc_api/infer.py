"""ModelInfer and ModelStreamInfer: a serialized request to a serialized answer."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import grpc.aio
from numpy.typing import NDArray

from convgrad.contract import Report
from convgrad.errors import MalformedRequest, PayloadTooLarge, ProblemTooLarge, ServiceError
from convgrad_service.engine.dataplane import SMALL_BYTES, Call, Dataplane
from convgrad_service.engine.deadline import Deadline
from convgrad_service.grpc_api.exchange import Exchanges
from convgrad_service.grpc_api.infer_wire import (
    encode_response,
    encode_stream_error,
    encode_stream_response,
    read_infer_request,
    request_names,
)
from convgrad_service.oip.answer import answer_names
from convgrad_service.oip.fields import described, request_fields, tensor_in
from convgrad_service.oip.request import InferRequest, Region
from convgrad_service.oip.shared_memory import ANONYMOUS, SharedMemory
from convgrad_service.problems import Problem
from convgrad_service.request_context import RequestContext
from convgrad_service.settings import Settings

__all__ = ["MAX_MESSAGE_BYTES", "InferMethods"]

MAX_MESSAGE_BYTES = 2**31 - 1
"""What protobuf and gRPC put into one message at most."""

# Names, shapes and the report beside an answer's tensors.
_HEAD_BYTES = 64 * 1024
# Requests of one stream that are in work at once; the next is not read before.
_STREAM_AHEAD = 8

T = TypeVar("T")
Encode = Callable[[InferRequest, Mapping[str, NDArray[Any]], Report], bytes]


class InferMethods:
    """The two methods that compute."""

    def __init__(
        self,
        dataplane: Dataplane,
        settings: Settings,
        exchanges: Exchanges,
        shared_memory: SharedMemory,
    ) -> None:
        self._dataplane = dataplane
        self._memory = shared_memory
        self._settings = settings
        self._exchanges = exchanges

    async def infer(self, _: Any, call: Any) -> bytes:
        """ModelInfer.

        It reads its one message itself: not before the queue has room for it, and so that nobody
        else keeps it while it is computed.
        """

        async def work(context: RequestContext) -> bytes:
            self._dataplane.admit()
            patience = Deadline.after(self._settings.max_timeout_s)
            with context.timings.stage("receive"):
                async with patience.enforced():
                    body = await call.read()
            if body is grpc.aio.EOF:
                raise MalformedRequest("the call ended without its message")
            asked = _Asked(body)
            del body
            return await self._answer(asked, context, call.time_remaining(), encode_response)

        return await self._exchanges.run("ModelInfer", call, work)

    async def stream(self, _: Any, call: Any) -> AsyncIterator[bytes]:
        """ModelStreamInfer: answers in the order of the requests, several in work at once.

        A request that fails gets an answer with ``error_message``, and the stream goes on.
        """
        tasks: asyncio.Queue[asyncio.Task[bytes] | None] = asyncio.Queue(_STREAM_AHEAD)
        started: set[asyncio.Task[Any]] = set()

        def start(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
            task = asyncio.create_task(work)
            started.add(task)
            task.add_done_callback(started.discard)
            return task

        async def read() -> None:
            try:
                while (body := await call.read()) is not grpc.aio.EOF:
                    asked = _Asked(body)
                    del body
                    await tasks.put(start(self._one_of_stream(asked, call)))
            finally:
                await tasks.put(None)

        reading = start(read())
        try:
            while (task := await tasks.get()) is not None:
                yield await task
            await reading
        finally:
            for task in started:
                task.cancel()

    async def _one_of_stream(self, asked: _Asked, call: Any) -> bytes:
        context = self._exchanges.begin(call)

        async def work(context: RequestContext) -> bytes:
            self._dataplane.admit()
            return await self._answer(asked, context, call.time_remaining(), encode_stream_response)

        try:
            answer, error = await self._exchanges.attempt("ModelStreamInfer", context, work)
        finally:
            self._exchanges.record("ModelStreamInfer", context)
        if error is None:
            assert answer is not None  # noqa: S101 - attempt gives one of the two
            return answer
        return encode_stream_error(asked.model, asked.id, f"{error.detail} ({error.code})")

    async def _answer(
        self, asked: _Asked, context: RequestContext, remaining_s: float | None, encode: Encode
    ) -> bytes:
        context.received_bytes = len(asked.body)
        limit = self._settings.max_body_bytes
        if len(asked.body) > limit:
            raise PayloadTooLarge(
                f"the message has {len(asked.body):,} bytes; this server takes at most {limit:,}"
            )
        request = asked.read()
        regions = self._memory.parts(ANONYMOUS, request)
        context.operation = request.operation.name
        allowed_s = min(
            request.timeout_s or math.inf,
            math.inf if remaining_s is None else remaining_s,
            self._settings.max_timeout_s,
        )
        call = Call(
            request.operation,
            Deadline.after(max(allowed_s, 0.0)),
            context.timings,
            refuse=lambda _, problem: _refuse_above_message(request, problem),
            small=True,  # nothing is copied yet
        )

        def decode() -> Mapping[str, Any]:
            return request_fields(request, described)

        async with (
            call.deadline.enforced(),
            self._dataplane.begin(call, decode, regions=regions) as work,
        ):
            with context.timings.stage("decode"):
                await work.fill(asked.tensors(request))
                asked.forget()
            result = await work.compute()
            small = _sent_bytes(request, result.outputs) <= SMALL_BYTES
            with context.timings.stage("encode"):
                answer = await self._dataplane.in_thread(
                    lambda: encode(request, result.outputs, result.report),
                    work.lease,
                    inline=small,
                )
        context.sent_bytes = len(answer)
        return answer


class _Asked:
    """One serialized request: kept until its tensors have been copied from it, and no longer."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.model = self.id = ""

    def read(self) -> InferRequest:
        """What it asks; ``model`` and ``id`` are set as far as they can be read."""
        try:
            request = read_infer_request(self.body)
        except ServiceError:
            self.model, self.id = request_names(self.body)
            raise
        self.model, self.id = request.operation.name, request.id
        return request

    def tensors(self, request: InferRequest) -> dict[str, NDArray[Any]]:
        """The inputs that came with the message, as views of it."""
        return {
            tensor.name: tensor_in(self.body, tensor)
            for tensor in request.inputs
            if not isinstance(tensor.source, Region)
        }

    def forget(self) -> None:
        """Let go of the bytes."""
        self.body = b""


def _sent_bytes(request: InferRequest, outputs: Mapping[str, NDArray[Any]]) -> int:
    """Bytes of the tensors that an answer holds."""
    return sum(array.nbytes for name, array in outputs.items() if not request.region_of(name))


def _refuse_above_message(request: InferRequest, problem: Problem) -> None:
    size_bytes = sum(
        problem.outputs[name].size_bytes
        for name in answer_names(request, problem.outputs)
        if request.region_of(name) is None
    )
    if size_bytes + _HEAD_BYTES > MAX_MESSAGE_BYTES:
        raise ProblemTooLarge(
            f"the answer has {size_bytes:,} bytes, and a gRPC message holds at most "
            f"{MAX_MESSAGE_BYTES:,}; use HTTP or shared memory"
        )
