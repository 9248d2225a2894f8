"""One inference request over gRPC: message to request, result to responses."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import replace

import numpy as np

from convgrad.contract import Report
from convgrad.errors import ProblemTooLarge, ServiceError
from convgrad_service.engine.deadline import Deadline
from convgrad_service.engine.execution import Execution, ResponseTemplate, split_at
from convgrad_service.engine.memory.lease import Lease
from convgrad_service.engine.pipeline import Pipeline
from convgrad_service.engine.request import SMALL_BYTES, ComputeRequest, Decoded, Result, blank
from convgrad_service.engine.telemetry.request_context import RequestContext
from convgrad_service.grpc_api.compression import is_compressed
from convgrad_service.grpc_api.infer_wire import (
    Part,
    encode_response,
    encode_stream_part,
    encode_stream_response,
    raw_output_prefix,
    read_infer_request,
    request_names,
)
from convgrad_service.grpc_api.limits import Arrivals, Held
from convgrad_service.grpc_api.request_keys import Notes, RequestKeys, SplitMessage
from convgrad_service.oip.answer_parts import MAX_PART_BYTES, AnswerParts, row_bytes
from convgrad_service.oip.fields import described, request_fields, tensor_in
from convgrad_service.oip.request import InferRequest, Span
from convgrad_service.oip.shared_memory import SharedMemory
from convgrad_service.problems import Problem

__all__ = ["MAX_MESSAGE_BYTES", "InferTransport", "Message"]

MAX_MESSAGE_BYTES = 2**31 - 1
"""Largest message that protobuf and gRPC allow."""

_ID = 0x1A  # the tag of a response's id
_DOUBLE = struct.Struct("<d")
# Room for names, shapes and the report in addition to an answer's tensors.
_HEAD_BYTES = 64 * 1024

Send = Callable[[list[Part]], Awaitable[None]]


class Message:
    """One serialized request, freed once its tensors have been copied into the arena.

    ``receive`` returns its bytes. ``filled`` is set once it has been freed.
    """

    def __init__(self, receive: Callable[[], Awaitable[bytes]]) -> None:
        self.receive = receive
        self.body = b""
        self.model = self.id = ""
        self.filled = asyncio.Event()

    @classmethod
    def of(cls, body: bytes) -> Message:
        """Return a message that has already been received."""

        async def received() -> bytes:
            return body

        return cls(received)

    def read(self) -> InferRequest:
        """Parse the request; set ``model`` and ``id`` as far as they can be read."""
        try:
            request = read_infer_request(self.body)
        except ServiceError:
            self.model, self.id = request_names(self.body)
            raise
        self.model, self.id = request.operation.name, request.id
        return request


class InferTransport:
    """See `Transport`. ``in_stream`` allows several responses, as messages of a stream."""

    body_lease: Lease | None = None
    decodes_inline = True  # `decode` reads shapes and parameters; `fill` reads the elements

    enforces_deadline = True  # see `Call.cut`: cancelling the read could leak its message

    def __init__(
        self,
        pipeline: Pipeline,
        shared_memory: SharedMemory,
        keys: RequestKeys,
        arrivals: Arrivals,
        context: RequestContext,
        deadline: Deadline,
        message: Message,
        send: Send,
        *,
        in_stream: bool,
    ) -> None:
        self.streams = False
        self._pipeline, self._memory, self._keys = pipeline, shared_memory, keys
        self._arrivals, self._context, self._message = arrivals, context, message
        self._reply, self._in_stream = send, in_stream
        self._split: SplitMessage | None = None
        self._held: Held | None = None
        self._parsed: InferRequest
        self._notes: Notes
        self.request = ComputeRequest(None, deadline, context.timings, context.caller)

    async def head(self) -> Hashable | None:
        """Receive the message, which grpcio hands over whole."""
        owner, message = self._context.owner, self._message
        message.body = await message.receive()
        if is_compressed(message.body):
            message.body = await self._arrivals.inflated(message.body)
        size_bytes = self._context.received_bytes = len(message.body)
        key: Hashable | None = None
        if size_bytes <= SMALL_BYTES and not self._in_stream:
            self._split = SplitMessage(message.body)
            found = self._keys.find(self._split, owner, self._pipeline)
            if found is not None:
                self.request.operation, key = found
        if key is None:
            parsed = self._parsed = message.read()
            self.request.operation = parsed.operation
            self._notes = Notes(parsed)
            if self._split is not None:
                learnt = self._keys.learn(self._split, parsed, owner)
                if learnt is not None:
                    key, extents = learnt
                    self._notes = Notes(replace(parsed, id=""), extents)
            self.streams = parsed.in_parts
        assert self.request.operation is not None  # noqa: S101 - set above
        self._context.operation = self.request.operation.name
        self._held = self._arrivals.held(size_bytes)
        return key

    def decode(self) -> Decoded:
        request = self._parsed
        if not self._in_stream:
            request.refuse_parts()
        return Decoded(
            request_fields(request, described),
            regions=self._memory.parts(self._context.owner, request.regions),
            refuse=lambda _, problem: _refuse_above_message(request, problem),
            timeout_s=request.timeout_s,
            notes=self._notes,
        )

    async def fill(self, execution: Execution) -> None:
        notes: Notes = execution.notes
        body, self._message.body = self._message.body, b""
        with self.request.timings.stage("decode"):
            if notes.extents is not None and self._split is not None:
                text = memoryview(self._split.text)
                views = execution.input_views()
                for name, begin, end in notes.extents:
                    if name in views:
                        views[name][:] = text[begin:end]
            else:
                await execution.fill(
                    {
                        tensor.name: tensor.source
                        if isinstance(tensor.source, np.ndarray)
                        else tensor_in(body, tensor)
                        for tensor in notes.request.inputs
                        if isinstance(tensor.source, np.ndarray | Span)
                    }
                )
        self.close()
        self._message.filled.set()

    def close(self) -> None:
        """Stop counting the message."""
        if self._held is not None:
            self._held.release()

    def watch(self, gone: Callable[[], None] | None) -> None:
        """Do nothing: if the client leaves, grpcio cancels the call's task."""

    async def send(self, execution: Execution, result: Result) -> None:
        request = execution.notes.request
        if self._split is not None and self._split.id:
            request = replace(request, id=self._split.id.decode())
        if self._in_stream and request.in_parts:
            await self._send_parts(request, result)
            return
        with self.request.timings.stage("encode"):
            template = execution.template(
                result.job_result, lambda report: _template(execution, report)
            )
            if template is not None:
                parts = self._from_template(execution, template, result.job_result.compute_s)
            else:
                encode = encode_stream_response if self._in_stream else encode_response
                parts = encode(request, result.outputs, result.report)
        await self._sent(parts)

    async def _send_parts(self, request: InferRequest, result: Result) -> None:
        """One response whenever more of the answer is final."""
        outputs, progress = result.outputs, result.progress

        async def all_of(name: str, _: int) -> int:
            return outputs[name].nbytes

        chosen = request.answer_outputs(outputs)
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
            await self._sent(
                encode_stream_part(request, outputs, result.report, found, final=final)
            )
            if final:
                return

    async def _sent(self, parts: list[Part]) -> None:
        self._context.sent_bytes += sum(map(len, parts))
        await self._reply(parts)

    def _from_template(
        self, execution: Execution, template: ResponseTemplate, compute_s: float
    ) -> list[Part]:
        parts: list[Part] = [template.before, _DOUBLE.pack(compute_s), template.after]
        if self._split is not None and self._split.id:
            parts.append(bytes((_ID, len(self._split.id))) + self._split.id)
        return [*parts, *execution.output_bytes(template)]


def _template(execution: Execution, report: Report) -> ResponseTemplate:
    request: InferRequest = execution.notes.request
    outputs = {
        name: blank(spec.shape, spec.dtype, name=name)
        for name, spec, *_ in execution.layout.outputs
    }
    text = bytes(encode_response(request, outputs, report)[0])
    placed = []
    for name in request.answer_names(outputs):
        # One field per output, empty if the output is stored or in shared memory.
        offset, size_bytes = execution.extent_of(name) if request.sends(name) else (0, 0)
        placed.append((raw_output_prefix(size_bytes), offset, size_bytes))
    return ResponseTemplate(*split_at(text, _DOUBLE.pack), tuple(placed))


def _refuse_above_message(request: InferRequest, problem: Problem) -> None:
    size_of = row_bytes if request.in_parts else (lambda spec: spec.size_bytes)
    sizes = [
        size_of(problem.outputs[name])
        for name in request.answer_names(problem.outputs)
        if request.sends(name)
    ]
    # In parts, each output has at most one row or MAX_PART_BYTES per response.
    size_bytes = sum(max(size, MAX_PART_BYTES) if request.in_parts else size for size in sizes)
    if size_bytes + _HEAD_BYTES > MAX_MESSAGE_BYTES:
        raise ProblemTooLarge(
            f"the answer has {size_bytes:,} bytes, and a gRPC message holds at most "
            f"{MAX_MESSAGE_BYTES:,}; use HTTP or shared memory, or in_parts over ModelStreamInfer"
        )
