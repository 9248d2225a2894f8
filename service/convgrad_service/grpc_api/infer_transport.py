"""Inference over gRPC: ModelInfer, and how a message becomes a request and a result responses."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from convgrad.contract import OPERATIONS
from convgrad.errors import ProblemTooLarge
from convgrad_service.engine.admission import Deadline
from convgrad_service.engine.execution import Execution
from convgrad_service.engine.memory.arena import Lease
from convgrad_service.engine.pipeline import Pipeline
from convgrad_service.engine.request import SMALL_BYTES, ComputeRequest, Decoded
from convgrad_service.engine.telemetry.record import RequestContext
from convgrad_service.grpc_api.exchange import Call
from convgrad_service.grpc_api.limits import MessageReader, PendingResponses
from convgrad_service.grpc_api.wire import (
    Part,
    cut_infer_request,
    encode_head,
    encode_tensors,
    in_stream_response,
    is_compressed,
    read_infer_request,
    response_id,
)
from convgrad_service.oip.fields import SharedMemory, array_or_blank, request_fields
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

    ``receive`` returns its bytes, unless they have been received already. ``model`` and ``id`` are
    set as far as they can be read, ``filled`` once it has been freed.
    """

    def __init__(
        self, body: bytes = b"", receive: Callable[[], Awaitable[bytes]] | None = None
    ) -> None:
        self.body, self.receive = body, receive
        self.model = self.id = ""
        self.filled = asyncio.Event()


@dataclass(frozen=True, slots=True)
class _InferData:
    """What requests with the same key share.

    ``raw_inputs`` are the inputs whose elements are in raw_input_contents, in their order;
    ``sends`` says which outputs an answer sends, once there was one.
    """

    request: InferRequest
    raw_inputs: tuple[str, ...]
    sends: dict[str, bool] = field(default_factory=dict)


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
        self._held_bytes = 0
        self._raw: Sequence[Span] = ()
        self._parsed: InferRequest
        self.request = ComputeRequest(None, deadline, context.timings, context.caller)

    async def run(self) -> None:
        """Answer the request; raises as `Pipeline.run`."""
        try:
            await self._pipeline.run(self.request, self)
        finally:
            self.close()

    async def head(self) -> Hashable | None:
        """Receive the message, which grpcio hands over whole."""
        context, message = self._context, self._message
        if message.receive is not None:
            message.body = await message.receive()
        if is_compressed(message.body):
            message.body = await self._reader.decompress(message.body)
        size_bytes = context.received_bytes = len(message.body)
        cut = cut_infer_request(message.body)
        message.model, message.id, rest, self._raw = cut
        operation, key = OPERATIONS.get(cut.model), None
        if len(rest) <= _MAX_KEY_BYTES:
            sizes = tuple([span.size_bytes for span in self._raw])
            key = "gRPC", self._in_stream, rest, sizes, context.owner
        if operation is None or key is None or not self._pipeline.knows(operation, key):
            self._parsed = read_infer_request(cut)
            operation = self._parsed.operation
        self.request.operation, context.operation = operation, operation.name
        self._reader.hold(size_bytes)
        self._held_bytes = size_bytes
        return key

    def decode(self) -> Decoded:
        request = self._parsed
        raw = tuple(each.name for each in request.inputs if isinstance(each.source, Span))
        return Decoded(
            request_fields(request, array_or_blank),
            regions=self._memory.parts(self._context.owner, request.regions),
            refuse=lambda _, problem: _refuse_above_message(request, problem),
            timeout_s=request.timeout_s,
            transport_data=_InferData(request, raw),
            # Elements in the head would be part of its key.
            repeatable=not request.arrays,
        )

    async def fill(self, execution: Execution) -> None:
        data: _InferData = execution.transport_data
        body, self._message.body = memoryview(self._message.body), b""
        self.request.timings.enter("decode")
        views = execution.input_views()

        def copy() -> None:
            for name, span in zip(data.raw_inputs, self._raw, strict=True):
                if name in views:
                    source = body[span.start : span.start + span.size_bytes]
                    np.copyto(np.asarray(views[name]), np.asarray(source))

        small = len(body) <= SMALL_BYTES
        await self._pipeline.in_thread(copy, execution.lease, inline=small)
        if data.request.arrays:
            await execution.fill(data.request.arrays)
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
        if not data.sends:
            names = request.answer_names(outputs)
            data.sends.update({name: request.sends(name) for name in names})
        self.request.timings.enter("encode")
        head = execution.text(
            partial(encode_head, request, outputs, in_stream=self._in_stream), _DOUBLE.pack
        )
        if self._message.id:
            head += response_id(self._message.id)
        parts = [head, *encode_tensors(data.sends, outputs)]
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
