"""Inference over gRPC: ModelInfer, and how a message becomes a request and a result responses."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from convgrad.contract import OPERATIONS, Operation
from convgrad.errors import ProblemTooLarge, ServiceError
from convgrad_service.engine.admission import Deadline
from convgrad_service.engine.execution import Execution
from convgrad_service.engine.memory.arena import Lease
from convgrad_service.engine.pipeline import Pipeline
from convgrad_service.engine.request import SMALL_BYTES, ComputeRequest, Decoded
from convgrad_service.engine.shm.registry import RegionPart
from convgrad_service.engine.telemetry.record import RequestContext
from convgrad_service.grpc_api.exchange import Call
from convgrad_service.grpc_api.limits import MessageReader, PendingResponses
from convgrad_service.grpc_api.wire import (
    Part,
    encode_head,
    encode_tensors,
    in_stream_response,
    read_infer_request,
    request_names,
    response_id,
    split_small_request,
)
from convgrad_service.oip.fields import SharedMemory, array_or_blank, input_view, request_fields
from convgrad_service.oip.request import InferRequest, Span
from convgrad_service.problems import Problem
from convgrad_service.server.settings import Settings

MAX_MESSAGE_BYTES = 2**31 - 1
"""Largest message that protobuf and gRPC allow."""

_MAX_KEY_BYTES = 4096
_DOUBLE = struct.Struct("<d")
# Room for names, shapes and the report in addition to an answer's tensors.
_HEAD_BYTES = 64 * 1024

Send = Callable[[list[Part]], Awaitable[None]]
_UNKNOWN = "unknown"
"""The operation logged for a request that was refused before its message was read."""


class Message:
    """One serialized request, freed once its tensors have been copied into the arena.

    ``receive`` returns its bytes, unless they have been received already. ``filled`` is set once it
    has been freed.
    """

    def __init__(
        self, body: bytes = b"", receive: Callable[[], Awaitable[bytes]] | None = None
    ) -> None:
        self.body, self.receive = body, receive
        self.model = self.id = ""
        self.filled = asyncio.Event()

    def read(self) -> InferRequest:
        """Parse the request; set ``model`` and ``id`` as far as they can be read."""
        try:
            request = read_infer_request(self.body)
        except ServiceError:
            self.model, self.id = request_names(self.body)
            raise
        self.model, self.id = request.operation.name, request.id
        return request


@dataclass(frozen=True, slots=True)
class _InferData:
    """Cached for requests with the same key: the request without its id, and the names of the
    inputs in raw_input_contents, or None if the next message may hold other inputs there."""

    request: InferRequest
    raw_inputs: tuple[str, ...] | None = None


class _SmallMessage(NamedTuple):
    """A small message: the tensors and the id in it, and a cache key of all else."""

    operation: Operation | None
    id: str
    raw_inputs: list[bytes]
    key: tuple[str, bytes, tuple[int, ...], str]

    @classmethod
    def of(cls, body: bytes, owner: str) -> _SmallMessage | None:
        """Parse a message; None if it is not a ModelInferRequest."""
        if (found := split_small_request(body)) is None:
            return None
        model, request_id, raw_inputs, rest = found
        key = "ModelInfer", rest, tuple(map(len, raw_inputs)), owner
        return cls(OPERATIONS.get(model), request_id, raw_inputs, key)

    def is_known_to(self, pipeline: Pipeline) -> bool:
        """Return whether the pipeline has cached what depends on the key alone."""
        return self.operation is not None and pipeline.knows(self.operation, self.key)

    def data_for(self, request: InferRequest) -> _InferData | None:
        """Return the data for requests with the same key; None if they must not be cached."""
        sources = [tensor.source for tensor in request.inputs]
        if len(self.key[1]) > _MAX_KEY_BYTES or not all(
            isinstance(source, Span | RegionPart) for source in sources
        ):
            return None
        names = (tensor.name for tensor in request.inputs if isinstance(tensor.source, Span))
        return _InferData(replace(request, id=""), tuple(names))


class InferTransport:
    """See `Transport`. With ``in_stream`` the response is a message of a stream."""

    body_lease: Lease | None = None
    decodes_inline = True  # `decode` reads shapes and parameters; `fill` reads the elements

    enforces_deadline = True  # see `Call.end_with`: cancelling the read could leak its message

    def __init__(
        self,
        pipeline: Pipeline,
        shared_memory: SharedMemory,
        reader: MessageReader,
        context: RequestContext,
        deadline: Deadline,
        message: Message,
        send: Send,
        *,
        in_stream: bool,
    ) -> None:
        self._pipeline, self._memory = pipeline, shared_memory
        self._reader, self._context, self._message = reader, context, message
        self._reply, self._in_stream = send, in_stream
        self._small: _SmallMessage | None = None
        self._held_bytes = 0
        self._parsed: InferRequest
        self._data: _InferData
        self.request = ComputeRequest(None, deadline, context.timings, context.caller)

    async def run(self) -> None:
        """Answer the request; raises as `Pipeline.run`."""
        try:
            await self._pipeline.run(self.request, self)
        finally:
            self.close()

    async def head(self) -> Hashable | None:
        """Receive the message, which grpcio hands over whole."""
        owner, message = self._context.owner, self._message
        if message.receive is not None:
            message.body = await message.receive()
        size_bytes = self._context.received_bytes = len(message.body)
        key: Hashable | None = None
        if size_bytes <= SMALL_BYTES and not self._in_stream:
            self._small = _SmallMessage.of(message.body, owner)
            if self._small is not None and self._small.is_known_to(self._pipeline):
                self.request.operation, key = self._small.operation, self._small.key
        if key is None:
            parsed = self._parsed = message.read()
            self.request.operation = parsed.operation
            self._data = _InferData(parsed)
            if self._small is not None and (data := self._small.data_for(parsed)) is not None:
                key, self._data = self._small.key, data
        assert self.request.operation is not None  # noqa: S101 - set above
        self._context.operation = self.request.operation.name
        self._reader.hold(size_bytes)
        self._held_bytes = size_bytes
        return key

    def decode(self) -> Decoded:
        request = self._parsed
        return Decoded(
            request_fields(request, array_or_blank),
            regions=self._memory.parts(self._context.owner, request.regions),
            refuse=lambda _, problem: _refuse_above_message(request, problem),
            timeout_s=request.timeout_s,
            transport_data=self._data,
        )

    async def fill(self, execution: Execution) -> None:
        data: _InferData = execution.transport_data
        body, self._message.body = self._message.body, b""
        self.request.timings.enter("decode")
        if data.raw_inputs is not None and self._small is not None:
            views = execution.input_views()
            for name, raw in zip(data.raw_inputs, self._small.raw_inputs, strict=True):
                if name in views:
                    views[name][:] = raw
        else:
            await execution.fill(
                {
                    tensor.name: tensor.source
                    if isinstance(tensor.source, np.ndarray)
                    else input_view(body, tensor)
                    for tensor in data.request.inputs
                    if isinstance(tensor.source, np.ndarray | Span)
                }
            )
        self.close()
        self._message.filled.set()

    def close(self) -> None:
        """Stop counting the message."""
        self._reader.release(self._held_bytes)
        self._held_bytes = 0

    def watch(self, on_disconnect: Callable[[], None] | None) -> None:
        """Do nothing: if the client leaves, grpcio cancels the call's task."""

    async def send(self, execution: Execution) -> None:
        data: _InferData = execution.transport_data
        request, outputs = data.request, execution.outputs
        self.request.timings.enter("encode")
        head = execution.text(
            partial(encode_head, request, outputs, in_stream=self._in_stream), _DOUBLE.pack
        )
        if self._small is not None and self._small.id:
            head += response_id(self._small.id)
        parts = [head, *encode_tensors(request, outputs)]
        if self._in_stream:
            parts = in_stream_response(parts)
        self.request.timings.enter(None)
        self._context.sent_bytes += sum(map(len, parts))
        await self._reply(parts)


class InferMethod:
    """ModelInfer, from a call to its answer."""

    def __init__(
        self,
        pipeline: Pipeline,
        settings: Settings,
        shared_memory: SharedMemory,
        reader: MessageReader,
        responses: PendingResponses,
    ) -> None:
        self.settings, self.reader, self.responses = settings, reader, responses
        self.transport = partial(InferTransport, pipeline, shared_memory, reader)

    async def __call__(self, call: Call) -> bytes:
        """Receive and answer one request."""
        context, sent = call.context, b""
        deadline = Deadline.after(self.allowed_s(call))

        async def send(parts: list[Part]) -> None:
            nonlocal sent
            sent = await self.responses.join(call, parts)

        async def receive() -> bytes:
            context.operation = None
            return await self.reader.message(call, deadline)

        context.operation = _UNKNOWN
        message = Message(receive=receive)
        await self.transport(context, deadline, message, send, in_stream=False).run()
        return sent

    def allowed_s(self, call: Call) -> float:
        """Return how long a request of this call may take."""
        return min(max(call.remaining_s, 0.0), self.settings.max_timeout_s)


def _refuse_above_message(request: InferRequest, problem: Problem) -> None:
    names = request.answer_names(problem.outputs)
    size_bytes = sum(problem.outputs[name].size_bytes for name in names if request.sends(name))
    if size_bytes + _HEAD_BYTES > MAX_MESSAGE_BYTES:
        raise ProblemTooLarge(
            f"the answer has {size_bytes:,} bytes, and a gRPC message holds at most "
            f"{MAX_MESSAGE_BYTES:,}; use HTTP or shared memory"
        )
