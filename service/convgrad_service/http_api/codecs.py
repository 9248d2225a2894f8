"""The media types of request and response bodies at ``POST /<operation>``.

JSON and safetensors are here; base64 of megabytes is in `long_base64`, forms and NumPy files are in
`numpy_files`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any

import pybase64
from numpy.typing import NDArray

from convgrad.contract import Operation, Report, Request, drop_unset, refuse_unknown
from convgrad.errors import MalformedRequest, ProblemTooLarge
from convgrad.wire import safetensors, strict_json
from convgrad.wire.json_tensors import FORMS, Form, decode_tensor, encode_tensor
from convgrad.wire.sentences import shown
from convgrad.wire.shapes import data_view, dtype_of
from convgrad.wire.strict_json import dumps
from convgrad_service import long_json
from convgrad_service.engine.execution import (
    Execution,
    Filler,
    Source,
    json_seconds,
)
from convgrad_service.engine.request import Decoded, blank
from convgrad_service.http_api.body import Body
from convgrad_service.http_api.content_types import choose_accepted, match_content_type
from convgrad_service.http_api.long_base64 import LONG_BASE64, long_tensor
from convgrad_service.http_api.numpy_files import MEDIA_TYPE as MULTIPART
from convgrad_service.http_api.numpy_files import (
    NPY,
    NPZ,
    decode_form,
    encode_npy,
    encode_npz,
    npy_content_type,
    refuse_npy,
    refuse_npz,
)
from convgrad_service.http_api.problem_details import Headers
from convgrad_service.http_api.transport import (
    Chunk,
    Content,
    HeadBytes,
    HttpTransport,
    LazyBase64,
)
from convgrad_service.problems import Problem

REPORT_HEADER = "X-Report"
JSON = "application/json"
SAFETENSORS = safetensors.MEDIA_TYPE
# This form is for human readers: an element takes some twenty characters and a microsecond, against
# five characters in base64.
_MAX_VALUES = 2**20
# Of an answer's base64: fits the cache, and is a multiple of three bytes (four characters).
_BLOCK_BYTES = 3 * 2**18


@dataclass(frozen=True, slots=True)
class RequestFormat:
    """A media type of request bodies.

    ``decode`` is called with the head, the operation, the bytes behind the head (None if not known
    yet) and the Content-Type. It returns the request's fields, whose tensors may be `blank`, and
    where their data is. Without ``head_bytes`` the head is all of the body. ``default_response`` is
    the media type of the answer unless Accept requests another.
    """

    media_type: str
    decode: Callable[[memoryview, Operation, int | None, str], tuple[dict[str, Any], Content]]
    default_response: str
    head_bytes: HeadBytes | None = None

    @property
    def limit(self) -> str:
        """The setting that bounds the body's size; see `HttpTransport.receive`."""
        return "max_json_bytes" if self.head_bytes is None else "max_body_bytes"


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """A media type of responses.

    ``encode`` refers to the outputs without copying; ``refuse`` raises, before anything is
    computed, if the answer could not be encoded. With ``reports``, the report is in a
    header.
    """

    media_type: str
    encode: Callable[[Execution], Sequence[Chunk]]
    refuse: Callable[[Request, Problem], None] | None = None
    reports: bool = False

    def headers(self, execution: Execution) -> Headers:
        """Return the headers that depend on the format."""
        media_type = self.media_type
        if media_type == NPY:
            ((_, array),) = execution.outputs.items()
            media_type = npy_content_type(array)
        headers = [(b"content-type", media_type.encode()), (b"vary", b"accept")]
        if self.reports:
            report = execution.report.model_dump_json().encode("ascii")
            headers.append((REPORT_HEADER.lower().encode(), report))
        return headers


class OperationTransport(HttpTransport):
    """A request in any `RequestFormat`, and a response in any `ResponseFormat`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        content_type, accept = self.headers.get(b"content-type"), self.headers.get(b"accept", "")
        self.request_format, self.response_type = _formats(
            content_type, accept, self.response_types()
        )

    def response_types(self) -> tuple[str, ...]:
        """Return the media types of responses that this exchange may have."""
        return _RESPONSE_TYPES

    async def head(self) -> Hashable | None:
        body = await self.receive(self.request_format.head_bytes)
        if self.data_bytes is None and body.ended:
            self.data_bytes = body.received_bytes - len(self.text.data)
        key = None if self.request_format.head_bytes is None else self.key()
        return None if key is None else (key, self.response_type)

    def decode(self) -> Decoded:
        content_type = self.headers[b"content-type"]
        fields, content = self.request_format.decode(
            self.text.data, self.operation, self.data_bytes, content_type
        )
        self.refuse_over_limit(content)
        return Decoded(fields, transport_data=content, refuse=self.refuse)

    def refuse(self, request: Request, problem: Problem) -> None:
        """Raise, before anything is computed, if the answer could not be encoded."""
        if (refuse := RESPONSE_FORMATS[self.response_type].refuse) is not None:
            refuse(request, problem)

    def encode(self, execution: Execution) -> tuple[Headers, Sequence[Chunk]]:
        response_format = RESPONSE_FORMATS[self.response_type]
        return response_format.headers(execution), response_format.encode(execution)


@lru_cache(maxsize=256)
def _formats(
    content_type: str | None, accept: str, response_types: tuple[str, ...]
) -> tuple[RequestFormat, str]:
    found = REQUEST_FORMATS[match_content_type(content_type, tuple(REQUEST_FORMATS))]
    preferred = found.default_response
    if preferred not in response_types:
        preferred = response_types[0]
    return found, choose_accepted(accept, response_types, preferred)


async def _safetensors_head(body: Body) -> int:
    return safetensors.header_bytes(await body.peek(8))


def _decode_safetensors(
    head: memoryview, operation: Operation, data_bytes: int | None, _: str
) -> tuple[dict[str, Any], Content]:
    layout = safetensors.layout(head, data_bytes)
    parameters = safetensors.parameters(layout.metadata, operation.request.model_fields)
    if both := sorted(layout.tensors.keys() & parameters.keys()):
        raise MalformedRequest(
            f'"{both[0]}" is both a tensor and a parameter; expected one of them'
        )
    tensors = {
        name: blank(placed.shape, placed.dtype, name=name)
        for name, placed in layout.tensors.items()
    }
    spans = [(name, placed.end - placed.begin) for name, placed in layout.tensors.items()]
    return {**parameters, **tensors}, Content(spans=spans)


def _encode_safetensors(execution: Execution) -> Sequence[Chunk]:
    store, outputs = execution.request.store, execution.outputs
    sent = {name: array for name, array in outputs.items() if name not in store}

    def header(report: Report) -> bytes:
        metadata = {"report": report.model_dump_json()}
        if store:
            stored = {name: stored_tensor(outputs[name], store[name]) for name in store}
            metadata["stored"] = json.dumps(stored)
        specs = {name: (dtype_of(array), array.shape) for name, array in sent.items()}
        return safetensors.encode_header(specs, metadata)[0][8:].rstrip(b" ")

    text = execution.text(header, json_seconds)
    text += b" " * (-len(text) % 8)
    order = safetensors.data_order({name: array.itemsize for name, array in sent.items()})
    data = [data_view(sent[name]) for name in order]
    return [len(text).to_bytes(8, "little") + text, *data]


def parse_json_body(body: bytes | memoryview) -> dict[str, Any]:
    """Parse a body. Long strings under ``npy`` and ``data`` become views of what is between their
    quotes."""
    if len(body) <= LONG_BASE64.min_bytes:
        return strict_json.loads_object(body, "the body")
    return LONG_BASE64.parse_object(memoryview(body), "the body")


def decode_json(
    body: memoryview, operation: Operation, _: int | None = 0, __: str = ""
) -> tuple[dict[str, Any], Content]:
    """Return a request's fields, ready for `convgrad.contract.validate`, and its tensors' data.

    A tensor with long base64 is a blank of its shape and dtype until its source is called with its
    memory.

    Raises
    ------
    MalformedRequest
        The body is not a JSON object, has an unknown field, or a tensor cannot be read. The sources
        raise it too.
    """
    fields = parse_json_body(body)
    refuse_unknown(operation.request, fields)
    drop_unset(operation.request, fields)
    stored = {
        name: _stored_name(value, name)
        for name in operation.tensors
        if isinstance(value := fields.get(name), dict) and "stored" in value
    }
    if fields.get("response") is None:
        # The form of the first tensor that is not stored.
        given = (fields.get(name) for name in operation.tensors)
        forms = (form for each in given if isinstance(each, dict) for form in FORMS & each.keys())
        fields["response"] = next(forms, "npy")
    if stored:
        others = fields.get("stored")
        fields["stored"] = {**(others if isinstance(others, dict) else {}), **stored}
    sources: dict[str, Source] = {}
    for name in operation.tensors:
        if name in stored:
            del fields[name]
        # An optional tensor may be null; decoding refuses a null required one.
        if name in fields and (fields[name] is not None or name in operation.required_tensors):
            fields[name], filler = described_tensor(fields[name], name)
            sources[name] = fields[name] if filler is None else filler
    return fields, Content(sources)


def _stored_name(tensor: Mapping[str, Any], field: str) -> str:
    name = tensor["stored"]
    if len(tensor) > 1 or not isinstance(name, str):
        raise MalformedRequest(
            f'{field}: expected "stored" to be the name of a tensor, and no other key, got '
            f"{shown(tensor)}"
        )
    return name


def described_tensor(tensor: Any, name: str) -> tuple[NDArray[Any], Filler | None]:
    """Return a tensor's array and, if that is still blank, its filler.

    Raises
    ------
    MalformedRequest
        The tensor cannot be read.
    """
    if isinstance(tensor, dict) and any(isinstance(each, memoryview) for each in tensor.values()):
        return long_tensor(tensor, name)
    return decode_tensor(
        tensor, name=name, b64decode=partial(pybase64.b64decode, validate=True)
    ), None


def json_answer(
    outputs: Mapping[str, NDArray[Any]],
    report: Report,
    form: Form,
    store: Mapping[str, str] = MappingProxyType({}),
) -> list[Chunk]:
    """Encode ``{"grad_input": {...}, "report": {...}}`` with tensors in ``form``.

    Base64 is encoded block by block when it is sent. For outputs in ``store``, only the name there
    is sent, and their elements are not read.
    """
    chunks: list[Chunk] = [b"{"]
    for name, array in outputs.items():
        chunks.append(dumps(name) + b":{")
        if name in store:
            chunks.append(dumps(stored_tensor(array, store[name]))[1:-1])
        else:
            chunks.extend(_members(encode_tensor(array, form, b64encode=_Base64), array.size))
        chunks.append(b"},")
    chunks.append(b'"report":' + report.model_dump_json().encode() + b"}")
    return chunks


def stored_tensor(array: NDArray[Any], name: str) -> dict[str, Any]:
    """Describe an output that was stored."""
    return {"stored": name, "dtype": dtype_of(array).value, "shape": list(array.shape)}


class _Base64(list[LazyBase64]):
    """The base64 of consecutive parts; the size of all but the last is a multiple of 3 bytes."""

    def __init__(self, parts: list[bytes | memoryview]) -> None:
        for part in parts:
            view = memoryview(part)
            self += (
                LazyBase64(view[start : start + _BLOCK_BYTES])
                for start in range(0, len(view), _BLOCK_BYTES)
            )


def _members(encoded: Mapping[str, Any], elements: int) -> Iterator[bytes | LazyBase64]:
    separator = b""
    for key, value in encoded.items():
        yield separator + dumps(key) + b":"
        if isinstance(value, _Base64):
            yield b'"'
            yield from value
            yield b'"'
        else:
            short = elements <= long_json.NUMBERS_AT_ONCE
            yield dumps(value) if short else b"".join(long_json.blocks_of(value))
        separator = b","


def _encode_json(execution: Execution) -> Sequence[Chunk]:
    request = execution.request
    return json_answer(execution.outputs, execution.report, request.response, request.store)


def _refuse_json(request: Request, problem: Problem) -> None:
    sent = (spec for name, spec in problem.outputs.items() if name not in request.store)
    refuse_endless_values(sum(spec.elements for spec in sent), request.response)


def refuse_endless_values(elements: int, form: Form) -> None:
    """Raise ProblemTooLarge if ``values`` are requested for too many elements."""
    if form == "values" and elements > _MAX_VALUES:
        raise ProblemTooLarge(
            f'response "values" is for at most {_MAX_VALUES:,} elements and the answer has '
            f'{elements:,}; ask for "npy" or "data"'
        )


REQUEST_FORMATS: Mapping[str, RequestFormat] = {
    form.media_type: form
    for form in (
        RequestFormat(JSON, decode_json, JSON),
        RequestFormat(SAFETENSORS, _decode_safetensors, SAFETENSORS, _safetensors_head),
        RequestFormat(MULTIPART, decode_form, NPZ),
    )
}
RESPONSE_FORMATS: Mapping[str, ResponseFormat] = {
    form.media_type: form
    for form in (
        ResponseFormat(JSON, _encode_json, _refuse_json),
        ResponseFormat(SAFETENSORS, _encode_safetensors),
        ResponseFormat(NPY, encode_npy, refuse_npy, reports=True),
        ResponseFormat(NPZ, encode_npz, refuse_npz, reports=True),
    )
}
_RESPONSE_TYPES = tuple(RESPONSE_FORMATS)
