"""The media types of request and response bodies at ``POST /<operation>``.

JSON is in `json_forms`, forms and NumPy files are in `numpy_files`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Protocol

from convgrad.contract import Operation, Report, Request
from convgrad.errors import MalformedRequest
from convgrad.wire import safetensors
from convgrad.wire.shapes import data_view, dtype_of
from convgrad_service.engine.execution import Execution, ResponseTemplate, Result, split_at
from convgrad_service.engine.memory.arena import Lease
from convgrad_service.engine.pipeline import Pipeline
from convgrad_service.engine.request import SMALL_BYTES, Decoded, Fields, blank
from convgrad_service.engine.telemetry.record import Timings
from convgrad_service.http_api.body import Body
from convgrad_service.http_api.json_forms import (
    TextReader,
    describe_json_request,
    json_answer,
    refuse_endless_values,
    stored_tensor,
)
from convgrad_service.http_api.numpy_files import MEDIA_TYPE as MULTIPART
from convgrad_service.http_api.numpy_files import (
    NPY,
    NPZ,
    MultipartReader,
    encode_npy,
    encode_npz,
    npy_content_type,
    refuse_npy,
    refuse_npz,
)
from convgrad_service.http_api.problem_details import Headers
from convgrad_service.http_api.transport import (
    Arriving,
    Chunk,
    HttpTransport,
    choose_accepted,
    match_content_type,
)
from convgrad_service.problems import Problem

REPORT_HEADER = "X-Report"
MAX_KEY_BYTES = 4096
"""Requests with longer heads are not cached."""
JSON = "application/json"
SAFETENSORS = safetensors.MEDIA_TYPE


class Reader(Protocol):
    """Reads one request body, for the methods of `Transport` with the same names."""

    async def head(self, body: Body, pipeline: Pipeline) -> Hashable | None: ...

    @property
    def body_lease(self) -> Lease | None: ...

    @property
    def decodes_inline(self) -> bool: ...

    def fields(self, operation: Operation) -> tuple[Fields, Any]:
        """Return the request's fields, and notes for `fill` that are shared by similar requests."""
        ...

    async def fill(self, body: Body, execution: Execution, timings: Timings) -> None: ...

    def close(self) -> None:
        """Release all resources."""
        ...


@dataclass(frozen=True, slots=True)
class BodyForm:
    """A media type of request bodies.

    ``limit`` names the setting that bounds their size, ``reader`` makes a reader from the
    Content-Type, ``answered`` is the media type of the answer unless Accept requests another.
    """

    media_type: str
    limit: str
    reader: Callable[[str], Reader]
    answered: str


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """A media type of answers.

    ``encode`` refers to the result's arrays without copying; ``refuse`` raises, before anything is
    computed, if the answer could not be encoded. With ``streams``, sending can begin before all of
    the answer has been computed. With ``reports``, the report is in a header.
    """

    media_type: str
    encode: Callable[[Execution, Result], Sequence[Chunk]]
    refuse: Callable[[Request, Problem], None] | None = None
    streams: bool = False
    reports: bool = False

    def headers(self, result: Result) -> Headers:
        """Return the headers that depend on the form."""
        media_type = self.media_type
        if media_type == NPY:
            ((_, array),) = result.outputs.items()
            media_type = npy_content_type(array)
        headers = [(b"content-type", media_type.encode()), (b"vary", b"accept")]
        if self.reports:
            report = result.report.model_dump_json().encode("ascii")
            headers.append((REPORT_HEADER.lower().encode(), report))
        return headers


class _SafetensorsReader:
    """Reads the header first, then receives each tensor straight into its memory."""

    body_lease: Lease | None = None

    def __init__(self, content_type: str) -> None:
        self._head = memoryview(b"")
        self._data_bytes: int | None = None
        self._body: Body

    async def head(self, body: Body, pipeline: Pipeline) -> Hashable | None:
        head_bytes = safetensors.header_bytes(await body.at_least(8))
        self._head = memoryview(await body.at_least(head_bytes))[:head_bytes]
        self._body = body
        length = body.content_length
        if length is None and body.ended:
            length = body.received_bytes
        if length is None:
            return None
        self._data_bytes = length - head_bytes
        return None if head_bytes > MAX_KEY_BYTES else (bytes(self._head), self._data_bytes)

    @property
    def decodes_inline(self) -> bool:
        return len(self._head) <= SMALL_BYTES

    def fields(self, operation: Operation) -> tuple[Fields, Any]:
        layout = safetensors.layout(self._head, self._data_bytes)
        self._body.refuse_over_limit(len(self._head) + layout.data_bytes)
        parameters = safetensors.parameters(layout.metadata, operation.request.model_fields)
        if both := sorted(layout.tensors.keys() & parameters.keys()):
            raise MalformedRequest(
                f'"{both[0]}" is both a tensor and a parameter; expected one of them'
            )
        tensors = {
            name: blank(placed.shape, placed.dtype, name=name)
            for name, placed in layout.tensors.items()
        }
        sizes = [(name, placed.end - placed.begin) for name, placed in layout.tensors.items()]
        return {**parameters, **tensors}, sizes

    async def fill(self, body: Body, execution: Execution, timings: Timings) -> None:
        views = execution.input_views()
        targets = [views.get(name, size_bytes) for name, size_bytes in execution.notes]
        with timings.stage("receive"):
            await body.into(targets, skip=len(self._head))

    def close(self) -> None:
        """Do nothing: no resources are held."""


class _JsonReader(TextReader):
    """The base64 stays in the text until it is decoded into the inputs' memory."""

    def fields(self, operation: Operation) -> tuple[Fields, Any]:
        found, self._fillers = describe_json_request(self._text.data, operation)
        return found, None


def _encode_json(execution: Execution, result: Result) -> Sequence[Chunk]:
    request = result.request
    return json_answer(result.outputs, result.report, request.response, request.store)


def _refuse_json(request: Request, problem: Problem) -> None:
    elements = sum(
        spec.elements for name, spec in problem.outputs.items() if name not in request.store
    )
    refuse_endless_values(elements, request.response)


def _encode_safetensors(execution: Execution, result: Result) -> Sequence[Chunk]:
    progress = result.progress
    if progress is None:
        make = partial(_safetensors_template, execution)
        if (template := execution.template(result.job_result, make)) is not None:
            text = template.before + repr(result.job_result.compute_s).encode() + template.after
            text += b" " * (-len(text) % 8)
            return [len(text).to_bytes(8, "little") + text, *execution.output_bytes(template)]
    store = result.request.store
    metadata = {"report": result.report.model_dump_json()}
    if store:
        stored = {name: stored_tensor(result.outputs[name], store[name]) for name in store}
        metadata["stored"] = json.dumps(stored)
    sent = {name: array for name, array in result.outputs.items() if name not in store}
    if progress is None:
        return safetensors.encode(sent, metadata)
    specs = {name: (dtype_of(array), array.shape) for name, array in sent.items()}
    header, order = safetensors.encode_header(specs, metadata)
    return [
        header,
        *(Arriving(data_view(sent[name]), partial(progress.until, name)) for name in order),
    ]


def _safetensors_template(execution: Execution, report: Report) -> ResponseTemplate:
    specs = {name: (spec.dtype, spec.shape) for name, spec, *_ in execution.layout.outputs}
    head, order = safetensors.encode_header(specs, {"report": report.model_dump_json()})
    outputs = tuple((b"", *execution.extent_of(name)) for name in order)
    text = head[8:].rstrip(b" ")
    return ResponseTemplate(*split_at(text, lambda seconds: repr(seconds).encode()), outputs)


BODY_FORMS: Mapping[str, BodyForm] = {
    form.media_type: form
    for form in (
        BodyForm(JSON, "max_json_bytes", _JsonReader, JSON),
        BodyForm(SAFETENSORS, "max_body_bytes", _SafetensorsReader, SAFETENSORS),
        BodyForm(MULTIPART, "max_json_bytes", MultipartReader, NPZ),
    )
}
ANSWER_FORMS: Mapping[str, AnswerForm] = {
    form.media_type: form
    for form in (
        AnswerForm(JSON, _encode_json, _refuse_json),
        AnswerForm(SAFETENSORS, _encode_safetensors, streams=True),
        AnswerForm(NPY, encode_npy, refuse_npy, streams=True, reports=True),
        AnswerForm(NPZ, encode_npz, refuse_npz, reports=True),
    )
}


class BodyTransport(HttpTransport):
    """A request with a body of any `BodyForm`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        content_type = self.headers.get(b"content-type")
        self._form = self._choose_forms(content_type, self.headers.get(b"accept", ""))
        self._reader = self._form.reader(content_type or "")

    def _choose_forms(self, content_type: str | None, accept: str) -> BodyForm:
        """Return the form of the body; subclasses choose that of the answer too."""
        return BODY_FORMS[match_content_type(content_type, tuple(BODY_FORMS))]

    async def head(self) -> Hashable | None:
        self._body = self.body(getattr(self._settings, self._form.limit))
        return await self._reader.head(self._body, self.pipeline)

    @property
    def body_lease(self) -> Lease | None:  # type: ignore[override]
        return self._reader.body_lease

    @property
    def decodes_inline(self) -> bool:  # type: ignore[override]
        return self._reader.decodes_inline

    def decode(self) -> Decoded:
        fields, notes = self._reader.fields(self.operation)
        return Decoded(fields, notes=notes)

    async def fill(self, execution: Execution) -> None:
        await self._reader.fill(self._body, execution, self.request.timings)

    def close(self) -> None:
        self._reader.close()


class OperationTransport(BodyTransport):
    """A body of any `BodyForm`, and an answer of any `AnswerForm`."""

    def _choose_forms(self, content_type: str | None, accept: str) -> BodyForm:
        came_in, self._form_out = _forms(content_type, accept)
        self.streams = self._form_out.streams
        return came_in

    async def head(self) -> Hashable | None:
        key = await super().head()
        return None if key is None else (key, self._form_out.media_type)

    def decode(self) -> Decoded:
        return replace(super().decode(), refuse=self._form_out.refuse)

    async def send(self, execution: Execution, result: Result) -> None:
        form = self._form_out
        with self.request.timings.stage("encode"):
            small = sum(tensor.spec.size_bytes for tensor in execution.layout.outputs)
            chunks = await self.pipeline.in_thread(
                lambda: form.encode(execution, result),
                execution.lease,
                inline=small <= SMALL_BYTES,
            )
        await self.respond(form.headers(result), chunks)


@lru_cache(maxsize=256)
def _forms(content_type: str | None, accept: str) -> tuple[BodyForm, AnswerForm]:
    came_in = BODY_FORMS[match_content_type(content_type, tuple(BODY_FORMS))]
    return came_in, ANSWER_FORMS[choose_accepted(accept, tuple(ANSWER_FORMS), came_in.answered)]
