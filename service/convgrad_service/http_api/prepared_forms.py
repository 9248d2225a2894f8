"""The forms in which small requests come over HTTP: safetensors, and the protocol's binary data."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable
from dataclasses import replace
from functools import lru_cache

from convgrad.contract import Report
from convgrad.errors import ServiceError
from convgrad.wire import safetensors
from convgrad.wire.safetensors import Layout
from convgrad_service.engine.admitted import Known, ResponseTemplate
from convgrad_service.engine.pipeline import blank
from convgrad_service.engine.prepared_request import MARK_S, PreparedRequest, place_of, words_around
from convgrad_service.engine.prepared_request import Span as Bytes
from convgrad_service.engine.request import ComputeRequest
from convgrad_service.http_api.codecs import MEDIA_TYPES, SAFETENSORS
from convgrad_service.http_api.negotiation import choose_accepted, match_content_type
from convgrad_service.http_api.prepared_request import Asked, Given, Part
from convgrad_service.oip.answer import answer_names
from convgrad_service.oip.http_answer import encode_answer
from convgrad_service.oip.request import InferRequest, Region, Span

__all__ = ["KNOWN_HEAD_BYTES", "InferForm", "SafetensorsForm", "remember"]

KNOWN_HEAD_BYTES = 4096
"""What longer heads say is not remembered."""

_MARK = repr(MARK_S).encode()
_SAFETENSORS_LINES = b"content-type: %s\r\nvary: accept\r\n" % SAFETENSORS.media_type.encode()
_BINARY_LINES = b"content-type: application/octet-stream\r\ninference-header-content-length: %d\r\n"


class SafetensorsForm:
    """See `Form`: safetensors in, safetensors out."""

    def asked(self, headers: Given, body: bytearray, owner: str) -> Asked | None:
        content_type, accept = headers.get(b"content-type", b""), headers.get(b"accept", b"")
        if not _is_safetensors(content_type, accept) or len(body) < 8:
            return None
        data_at = 8 + int.from_bytes(body[:8], "little")
        if data_at > min(len(body), KNOWN_HEAD_BYTES):
            return None
        return Asked((bytes(body[:data_at]), len(body) - data_at, SAFETENSORS.refuse), data_at)

    def spans(self, known: Known) -> Iterable[Bytes]:
        layout: Layout = known.notes[0]
        for name, placed in layout.tensors.items():
            yield Bytes(name, placed.begin, placed.end)

    def timeout_s(self, known: Known) -> float | None:
        return None

    def words(self, known: Known, report: Report) -> ResponseTemplate:
        specs = {name: (spec.dtype, spec.shape) for name, spec, *_ in known.layout.outputs}
        head, order = safetensors.encode_header(specs, {"report": report.model_dump_json()})
        outputs = tuple((b"", *place_of(known, name)) for name in order)
        return ResponseTemplate(*words_around(head[8:].rstrip(b" "), _MARK), outputs)

    def answer(
        self, words: ResponseTemplate, compute_s: bytes, asked: Asked, work: PreparedRequest
    ) -> tuple[bytes, list[Part]]:
        text = words.before + compute_s + words.after
        text += b" " * (-len(text) % 8)
        return _SAFETENSORS_LINES, [len(text).to_bytes(8, "little"), text, *work.outputs(words)]


@lru_cache(maxsize=64)
def _is_safetensors(content_type: bytes, accept: bytes) -> bool:
    """Whether both ask for that form; what can be understood as no form is for the endpoint."""
    try:
        came_in = match_content_type(content_type.decode("latin-1"), MEDIA_TYPES)
        goes_out = choose_accepted(accept.decode("latin-1"), MEDIA_TYPES, came_in)
    except ServiceError:
        return False
    return came_in == goes_out == SAFETENSORS.media_type


_ID = re.compile(rb'\{"id":"([!#-\[\]-~ ]{0,256})",')


def _infer_key(text: bytes, data_bytes: int, owner: str) -> tuple[Hashable, bytes]:
    """The `ComputeRequest.key` of all requests that differ in their ids alone, and this one's id.

    Only an id that comes first, as clients write it, and needs no escapes is told apart.
    """
    found = _ID.match(text)
    if found is None:
        return ("infer", text, data_bytes, owner), b""
    return ("infer", text[found.end() :], data_bytes, owner), found[1]


def remember(
    call: ComputeRequest, request: InferRequest, text: memoryview, data_bytes: int | None
) -> None:
    """Have a request of the protocol known to those like it, if all that differs is its data."""
    binary = [wanted.binary or wanted.region is not None for wanted in request.outputs]
    if (
        data_bytes is None
        or len(text) > KNOWN_HEAD_BYTES
        or not all(binary or [request.binary_by_default])
        or not all(isinstance(tensor.source, Span | Region) for tensor in request.inputs)
    ):
        return
    call.key, found = _infer_key(bytes(text), data_bytes, call.owner)
    # One that is not told apart from the rest is the same in all.
    call.notes[:] = [replace(request, id="") if found else request]


class InferForm:
    """See `Form`: the Open Inference Protocol with binary data, or none but in shared memory."""

    def asked(self, headers: Given, body: bytearray, owner: str) -> Asked | None:
        length = headers.get(b"inference-header-content-length")
        if length is None:
            data_at = len(body)
        elif length.isdigit() and len(length) < 6:
            data_at = int(length)
        else:
            return None
        if not 0 < data_at <= min(len(body), KNOWN_HEAD_BYTES):
            return None
        key, request_id = _infer_key(bytes(body[:data_at]), len(body) - data_at, owner)
        return Asked(key, data_at, request_id)

    def spans(self, known: Known) -> Iterable[Bytes]:
        request: InferRequest = known.notes[0]
        for tensor in request.inputs:
            if isinstance(source := tensor.source, Span):
                yield Bytes(tensor.name, source.start, source.start + source.size_bytes)

    def timeout_s(self, known: Known) -> float | None:
        request: InferRequest = known.notes[0]
        return request.timeout_s

    def words(self, known: Known, report: Report) -> ResponseTemplate:
        request: InferRequest = known.notes[0]
        outputs = {
            name: blank(spec.shape, spec.dtype, name=name)
            for name, spec, *_ in known.layout.outputs
        }
        head = encode_answer(request, outputs, report).chunks[0]
        sent = (name for name in answer_names(request, outputs) if request.sends(name))
        placed = tuple((b"", *place_of(known, name)) for name in sent)
        return ResponseTemplate(*words_around(bytes(head), _MARK), placed)

    def answer(
        self, words: ResponseTemplate, compute_s: bytes, asked: Asked, work: PreparedRequest
    ) -> tuple[bytes, list[Part]]:
        before = words.before
        if asked.id:
            before = b'{"id":"' + asked.id + b'",' + before[1:]
        text = before + compute_s + words.after
        if not words.outputs:
            return b"content-type: application/json\r\n", [text]
        return _BINARY_LINES % len(text), [text, *work.outputs(words)]
