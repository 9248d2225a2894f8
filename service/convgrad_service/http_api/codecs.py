"""The media types of request and response bodies at ``POST /<operation>``.

JSON is in `json_forms`, forms are in `multipart_body`. Answers in NumPy files, .npy for one tensor
and .npz for any number, have their report in ``X-Report``.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from numpy.typing import NDArray

from convgrad.contract import Operation, Report, Request
from convgrad.dtypes import DType
from convgrad.errors import MalformedRequest, NotAcceptable
from convgrad.wire import npy, safetensors
from convgrad.wire.shapes import data_view, dtype_of
from convgrad_service.engine.execution import Execution, ResponseTemplate, Result, split_at
from convgrad_service.engine.memory.arena import Lease
from convgrad_service.engine.pipeline import Pipeline
from convgrad_service.engine.request import SMALL_BYTES, Fields, Timings, blank
from convgrad_service.http_api.body import Body, TextReader
from convgrad_service.http_api.json_forms import (
    EncodedLater,
    describe_json_request,
    json_answer,
    refuse_endless_values,
    stored_tensor,
)
from convgrad_service.http_api.multipart_body import MEDIA_TYPE as MULTIPART
from convgrad_service.http_api.multipart_body import MultipartReader
from convgrad_service.http_api.problem_details import Headers
from convgrad_service.problems import Problem

__all__ = [
    "ANSWER_FORMS",
    "BODY_FORMS",
    "JSON",
    "MAX_KEY_BYTES",
    "NPY",
    "NPZ",
    "REPORT_HEADER",
    "SAFETENSORS",
    "AnswerForm",
    "Arriving",
    "BodyForm",
    "Chunk",
    "Reader",
    "npy_content_type",
]

NPY = npy.MEDIA_TYPE
NPZ = "application/x-npz"
REPORT_HEADER = "X-Report"


MAX_KEY_BYTES = 4096
"""Requests with longer heads are not cached."""
JSON = "application/json"
SAFETENSORS = safetensors.MEDIA_TYPE


@dataclass(frozen=True, slots=True)
class Arriving:
    """A part of an answer that is still being computed.

    ``until`` waits for a number of final bytes, and returns how many there are.
    """

    data: memoryview
    until: Callable[[int], Coroutine[Any, Any, int]]

    def __len__(self) -> int:
        return len(self.data)


Chunk = bytes | memoryview | EncodedLater | Arriving
"""A part of an answer, of one byte an item; the last two kinds are made when it is their turn."""


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


def _encode_npy(execution: Execution, result: Result) -> Sequence[Chunk]:
    """Encode the only output as a .npy file."""
    ((name, array),) = result.outputs.items()
    header, data = npy.encode(array)
    assert isinstance(data, memoryview)  # noqa: S101
    if result.progress is None:
        return [header, data]
    return [header, Arriving(data, partial(result.progress.until, name))]


def _encode_npz(execution: Execution, result: Result) -> Sequence[Chunk]:
    """Encode all outputs as a .npz file, uncompressed."""
    collected = _Chunks()
    with zipfile.ZipFile(collected, "w") as archive:  # type: ignore[call-overload]
        for name, array in result.outputs.items():
            # A fixed date, so that answers to the same request are identical.
            entry = zipfile.ZipInfo(f"{name}.npy")
            with archive.open(entry, "w", force_zip64=True) as file:
                for part in npy.encode(array):
                    file.write(part)
    return collected.parts


def npy_content_type(array: NDArray[Any]) -> str:
    """Return the media type of an array's .npy file, with dtypes that NumPy lacks."""
    return f"{NPY}; dtype=bfloat16" if dtype_of(array) is DType.BFLOAT16 else NPY


def _refuse_npy(request: Request, problem: Problem) -> None:
    """Raise NotAcceptable unless there is exactly one output, and it is not stored."""
    if len(problem.outputs) > 1:
        raise NotAcceptable(
            f"{NPY} holds one tensor, and the answer has {', '.join(problem.outputs)}; accept {NPZ}"
        )
    _refuse_npz(request, problem)


def _refuse_npz(request: Request, problem: Problem) -> None:
    """Raise NotAcceptable if an output is stored."""
    if request.store:
        raise NotAcceptable(
            "an answer in NumPy's files cannot name the outputs that were stored; accept "
            "application/json"
        )


class _Chunks:
    """A file for `zipfile` that collects what is written without copying."""

    def __init__(self) -> None:
        self.parts: list[Chunk] = []

    def write(self, part: bytes | memoryview) -> int:
        self.parts.append(part)
        return len(part)

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""


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
        AnswerForm(NPY, _encode_npy, _refuse_npy, streams=True, reports=True),
        AnswerForm(NPZ, _encode_npz, _refuse_npz, reports=True),
    )
}
