"""Inference by the Open Inference Protocol over HTTP.

In a request, ``Inference-Header-Content-Length`` is the size of the JSON that precedes the tensors'
bytes, which are received straight into place. Without it the whole body is JSON.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from convgrad.contract import Report
from convgrad.errors import MalformedRequest
from convgrad_service.engine.execution import Execution, Filler, ResponseTemplate, Result, split_at
from convgrad_service.engine.memory.arena import Lease
from convgrad_service.engine.request import SMALL_BYTES, Decoded, blank
from convgrad_service.http_api.body import Text
from convgrad_service.http_api.codecs import MAX_KEY_BYTES
from convgrad_service.http_api.transport import HttpTransport
from convgrad_service.oip.fields import SharedMemory, described, request_fields
from convgrad_service.oip.http_json import (
    HttpAnswer,
    encode_answer,
    read_infer_head,
    refuse_in_json,
)
from convgrad_service.oip.request import InferInput, InferRequest, Region, Span

__all__ = ["InferTransport"]

_HEADER_LENGTH = b"inference-header-content-length"
# The JSON before binary data is small, unless it contains numbers too.
_MAX_HEAD_BYTES = 4 * 2**20
# An id in first position, as clients write it, without escapes.
_ID = re.compile(rb'\{"id":"([!#-\[\]-~ ]{0,256})",')


class InferTransport(HttpTransport):
    """An inference request for the model that its path names."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.text = Text(memoryview(b""))
        self._id = b""
        self._length = self.request.body_bytes
        self._header_bytes = _header_bytes(self.headers, self._length)

    async def head(self) -> Hashable | None:
        """Receive the request's JSON, and nothing of what follows it."""
        settings, header_bytes = self._settings, self._header_bytes
        body = self._body = self.body(
            settings.max_json_bytes if header_bytes is None else settings.max_body_bytes
        )
        if header_bytes is None:
            self.text = await body.whole(self.pipeline.engine)
        else:
            if header_bytes > _MAX_HEAD_BYTES:
                raise MalformedRequest(
                    f"Inference-Header-Content-Length is {header_bytes:,}; at most "
                    f"{_MAX_HEAD_BYTES:,} bytes of JSON may precede binary data"
                )
            shown = await body.at_least(header_bytes)
            if len(shown) < header_bytes:
                raise MalformedRequest(
                    f"Inference-Header-Content-Length is {header_bytes:,}, and the body has "
                    f"{len(shown):,} bytes"
                )
            self.text = Text(memoryview(shown)[:header_bytes])
        self._data_bytes = _data_bytes(self._length, header_bytes)
        if self._data_bytes is None or len(self.text.data) > MAX_KEY_BYTES:
            return None
        # All of the request but its id, if that can be found.
        text = bytes(self.text.data)
        if (found := _ID.match(text)) is not None:
            self._id, text = found[1], text[found.end() :]
        return text, found is None, self._data_bytes, self.owner

    @property
    def body_lease(self) -> Lease | None:  # type: ignore[override]
        return self.text.lease

    @property
    def decodes_inline(self) -> bool:  # type: ignore[override]
        return len(self.text.data) <= SMALL_BYTES

    def decode(self) -> Decoded:
        request = read_infer_head(self.text.data, self.operation, self._data_bytes)
        data_bytes = sum(_span_bytes(tensor) for tensor in request.inputs)
        self._body.refuse_over_limit(len(self.text.data) + data_bytes)
        memory = SharedMemory(self.pipeline.engine, self._settings)
        binary = [wanted.binary or wanted.region is not None for wanted in request.outputs]
        return Decoded(
            request_fields(request, described),
            regions=memory.parts(self.owner, request.regions),
            refuse=lambda _, problem: refuse_in_json(request, problem),
            timeout_s=request.timeout_s,
            notes=replace(request, id="") if self._id else request,
            repeatable=all(binary or [request.binary_by_default])
            and all(isinstance(tensor.source, Span | Region) for tensor in request.inputs),
        )

    async def fill(self, execution: Execution) -> None:
        request: InferRequest = execution.notes
        timings = self.request.timings
        if numbers := _numbers(request):
            with timings.stage("decode"):
                await execution.fill(numbers, body_lease=self.text.lease)
        spans = [tensor for tensor in request.inputs if isinstance(tensor.source, Span)]
        if not self._body.ended or spans:
            views = execution.input_views()
            targets = [views.get(tensor.name, _span_bytes(tensor)) for tensor in spans]
            with timings.stage("receive"):
                await self._body.into(targets, skip=len(self.text.data))
        self.text.release()

    def close(self) -> None:
        self.text.release()

    async def send(self, execution: Execution, result: Result) -> None:
        request: InferRequest = execution.notes
        with self.request.timings.stage("encode"):
            template = execution.template(
                result.job_result, lambda report: _template(execution, request, report)
            )
            if template is not None:
                answer = self._from_template(execution, template, result.job_result.compute_s)
            else:
                if self._id:
                    request = replace(request, id=self._id.decode())
                answer = await self.pipeline.in_thread(
                    lambda: encode_answer(request, result.outputs, result.report),
                    execution.lease,
                    inline=_is_quick(request, result.outputs),
                )
        await self.respond(_answer_headers(answer), answer.chunks)

    def _from_template(
        self, execution: Execution, template: ResponseTemplate, compute_s: float
    ) -> HttpAnswer:
        before = template.before
        if self._id:
            before = b'{"id":"' + self._id + b'",' + before[1:]
        text = before + repr(compute_s).encode() + template.after
        header_bytes = len(text) if template.outputs else None
        return HttpAnswer([text, *execution.output_bytes(template)], header_bytes)


def _template(execution: Execution, request: InferRequest, report: Report) -> ResponseTemplate:
    outputs = {
        name: blank(spec.shape, spec.dtype, name=name)
        for name, spec, *_ in execution.layout.outputs
    }
    head = bytes(encode_answer(request, outputs, report).chunks[0])
    sent = (name for name in request.answer_names(outputs) if request.sends(name))
    places = tuple((b"", *execution.extent_of(name)) for name in sent)
    return ResponseTemplate(*split_at(head, lambda seconds: repr(seconds).encode()), places)


def _data_bytes(length: int | None, header_bytes: int | None) -> int | None:
    """Return how many bytes follow the JSON; None if not known yet."""
    if header_bytes is None:
        return 0
    return None if length is None else length - header_bytes


def _header_bytes(headers: Mapping[bytes, str], length: int | None) -> int | None:
    given = headers.get(_HEADER_LENGTH)
    if given is None:
        return None
    if not (given.isascii() and given.isdigit() and len(given) < 20):
        raise MalformedRequest(
            f"Inference-Header-Content-Length is {given[:64]!r}; expected a number of bytes"
        )
    header_bytes = int(given)
    if header_bytes == 0:
        raise MalformedRequest(
            "Inference-Header-Content-Length is 0; a request of raw bytes alone is for models "
            "whose input's shape follows from its size, which no operation's does"
        )
    if length is not None and header_bytes > length:
        raise MalformedRequest(
            f"Inference-Header-Content-Length is {header_bytes:,}, more than the {length:,} of "
            "Content-Length"
        )
    return header_bytes


def _numbers(request: InferRequest) -> dict[str, NDArray[Any] | Filler]:
    """Return the fillers of inputs whose elements are in the JSON."""
    return {
        tensor.name: tensor.source
        for tensor in request.inputs
        if not isinstance(tensor.source, Span | Region)
    }


def _span_bytes(tensor: InferInput) -> int:
    return tensor.source.size_bytes if isinstance(tensor.source, Span) else 0


def _is_quick(request: InferRequest, outputs: Mapping[str, NDArray[Any]]) -> bool:
    """Whether the answer has at most a few numbers in JSON."""
    spelt = [
        array.nbytes
        for name, array in outputs.items()
        if request.sends(name) and not request.wants_binary(name)
    ]
    return sum(spelt) <= SMALL_BYTES


def _answer_headers(answer: HttpAnswer) -> list[tuple[bytes, bytes]]:
    if answer.header_bytes is None:
        return [(b"content-type", b"application/json")]
    return [
        (b"content-type", b"application/octet-stream"),
        (_HEADER_LENGTH, str(answer.header_bytes).encode()),
    ]
