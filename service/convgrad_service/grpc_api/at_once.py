"""A small ModelInfer like one before it, from its message to its answer in one function.

What is new to the server, large, still on its way or in any way unusual is not for here:
`SmallInfers.answer` says so before anything is done, and it is answered from the beginning.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace

from convgrad.contract import Operation, Report
from convgrad_service.engine.admitted import SMALL_BYTES, Known, ResponseTemplate
from convgrad_service.engine.deadline import CancelScope, Deadline
from convgrad_service.engine.pipeline import Pipeline, blank
from convgrad_service.engine.prepared_request import MARK_S, Span, place_of, words_around
from convgrad_service.engine.request import ComputeRequest as Job
from convgrad_service.engine.scheduling.quotas import NO_LIMITS
from convgrad_service.grpc_api.call import Call
from convgrad_service.grpc_api.infer_wire import Part, encode_response, raw_output_prefix
from convgrad_service.oip.answer import answer_names
from convgrad_service.oip.request import InferRequest, Region
from convgrad_service.oip.request import Span as Raw

__all__ = ["SmallInfers"]

Spans = tuple[Span, ...]

_DOUBLE = struct.Struct("<d")
_MARK = _DOUBLE.pack(MARK_S)
# The first fields of a request, and an answer's third: texts, each with its length before it.
_NAME, _VERSION, _ID = 0x0A, 0x12, 0x1A
_MAX_SHORT = 0x7F
_MAX_HEAD_BYTES = 4096
# What is known is found by the length of the message, so many kinds for each.
_MOST_LENGTHS, _MOST_EACH = 256, 4


class SmallInfers:
    """Answers small requests like those that it was told to `remember`."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._plane = pipeline
        self._seen: OrderedDict[int, list[tuple[Operation, Spans]]] = OrderedDict()

    async def answer(self, call: Call, body: bytes, deadline: Deadline) -> bytes | None:
        """The answer to one of them; None if it is none, and then nothing has been done.

        Raises a ServiceError if it was one, and failed.
        """
        context = call.context
        if len(body) > SMALL_BYTES or context.caller.limits != NO_LIMITS:
            return None
        timings = context.timings
        text, request_id = _without_id(body)
        for operation, spans in self._seen.get(len(text), ()):
            context.operation = operation.name
            key = _key(text, spans, context.owner)
            job = Job(operation, deadline, timings, key=key, owner=context.owner)
            if (work := self._plane.at_once(job)) is not None:
                break
        else:
            context.operation = None
            return None
        request: InferRequest = work.known.notes[0]
        if request.timeout_s is not None and request.timeout_s < deadline.allowed_s:
            job.deadline = Deadline(timings.started_s + request.timeout_s, request.timeout_s)
        try:
            with memoryview(text) as view:
                work.fill(view, _spans)
            timings.add("decode", timings.total_s)
            context.received_bytes = len(body)
            finished = work.computed_here()
            if finished is None:
                with CancelScope(job.deadline):
                    finished = await work.computed()
            with timings.stage("encode"):
                words = work.words(finished, _words)
                parts: list[Part] = [words.before, _DOUBLE.pack(finished.compute_s), words.after]
                if request_id:
                    parts.append(bytes((_ID, len(request_id))) + request_id)
                parts += work.outputs(words)
                answer = b"".join(parts)
        finally:
            work.lease.release()
        context.sent_bytes = len(answer)
        return answer

    def remember(self, job: Job, whole: bytes, request: InferRequest) -> None:
        """Have requests like this one, which came in these bytes, known from it."""
        text, request_id = _without_id(whole)
        cut = len(whole) - len(text)
        spans = tuple(
            Span(tensor.name, start := tensor.source.start - cut, start + tensor.source.size_bytes)
            for tensor in request.inputs
            if isinstance(tensor.source, Raw)
        )
        key = _key(text, spans, job.owner)
        if (
            request_id != request.id.encode()
            or len(key[1]) > _MAX_HEAD_BYTES
            or not all(isinstance(tensor.source, Raw | Region) for tensor in request.inputs)
            or list(spans) != sorted(spans, key=lambda span: span.begin)
        ):
            return
        job.key, job.notes[:] = key, [replace(request, id=""), spans]
        seen = self._seen.setdefault(len(text), [])
        if (job.operation, spans) not in seen:
            seen.insert(0, (job.operation, spans))
            del seen[_MOST_EACH:]
        self._seen.move_to_end(len(text))
        if len(self._seen) > _MOST_LENGTHS:
            self._seen.popitem(last=False)


def _without_id(message: bytes) -> tuple[bytes, bytes]:
    """A request without its id, and the id; together with it where that is not plain to see."""
    at = 0
    for tag in (_NAME, _VERSION):
        end = _end_of_text(message, at, tag)
        at = end or at
    end = _end_of_text(message, at, _ID)
    if end and (found := message[at + 2 : end]).isascii():
        return message[:at] + message[end:], found
    return message, b""


def _end_of_text(message: bytes, at: int, tag: int) -> int:
    """Where the short text ends that is the field with this tag at this place; 0 if none is."""
    head = message[at : at + 2]
    return at + 2 + head[1] if len(head) == 2 and head[0] == tag and head[1] <= _MAX_SHORT else 0


def _key(text: bytes, spans: Spans, owner: str) -> tuple[str, bytes, int, str]:
    """All of a request but its tensors' elements, and its length."""
    begins = [0, *(span.end for span in spans)]
    ends = [*(span.begin for span in spans), len(text)]
    rest = b"".join([text[begin:end] for begin, end in zip(begins, ends, strict=True)])
    return "ModelInfer", rest, len(text), owner


def _spans(known: Known) -> Iterable[Span]:
    spans: Spans = known.notes[1]
    return spans


def _words(known: Known, report: Report) -> ResponseTemplate:
    request: InferRequest = known.notes[0]
    outputs = {
        name: blank(spec.shape, spec.dtype, name=name) for name, spec, *_ in known.layout.outputs
    }
    text = bytes(encode_response(request, outputs, report)[0])
    placed = []
    for name in answer_names(request, outputs):
        # One field for each output: of one that stays here it is empty.
        offset, size_bytes = place_of(known, name) if request.sends(name) else (0, 0)
        placed.append((raw_output_prefix(size_bytes), offset, size_bytes))
    return ResponseTemplate(*words_around(text, _MARK), tuple(placed))
