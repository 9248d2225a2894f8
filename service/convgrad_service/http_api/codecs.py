"""The forms a body can have over HTTP: for each media type, how it is taken in and sent."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from convgrad.contract import Request
from convgrad.errors import MalformedRequest
from convgrad.wire import safetensors
from convgrad.wire.shapes import data_view, dtype_of
from convgrad_service.engine.pipeline import (
    SMALL_BYTES,
    ComputeRequest,
    Filler,
    Pipeline,
    Result,
    Source,
    Work,
    blank,
)
from convgrad_service.http_api.body import Body
from convgrad_service.http_api.json_answer import (
    json_answer,
    refuse_endless_values,
    stored_tensor,
)
from convgrad_service.http_api.json_body import describe_json_request
from convgrad_service.http_api.response import Arriving, Chunk
from convgrad_service.problems import Problem

__all__ = ["CODECS", "JSON", "MEDIA_TYPES", "SAFETENSORS", "Codec"]


@dataclass(frozen=True, slots=True)
class Codec:
    """One media type.

    ``begin`` takes a body in: it makes the work and fills its inputs. ``limit`` names the setting
    that bounds a body. ``encode`` refers to the result's arrays and copies nothing large;
    ``refuse`` raises, before anything is computed, where an answer could not be encoded.
    ``streams``: an answer can begin before all of it is computed.
    """

    media_type: str
    limit: str
    begin: Callable[[Pipeline, ComputeRequest, Body], AbstractAsyncContextManager[Work]]
    encode: Callable[[Result], Sequence[Chunk]]
    refuse: Callable[[Request, Problem], None]
    streams: bool = False


# What longer heads say is not remembered.
_KNOWN_HEAD_BYTES = 4096


@asynccontextmanager
async def _begin_safetensors(
    plane: Pipeline, call: ComputeRequest, body: Body
) -> AsyncIterator[Work]:
    """Each tensor is received straight into its place: what comes first is the header alone."""
    with call.timings.stage("receive"):
        data_offset = safetensors.header_bytes(await body.at_least(8))
        head = memoryview(await body.at_least(data_offset))[:data_offset]
    length = body.content_length
    if length is None and body.ended:
        length = body.received_bytes
    data_bytes = None if length is None else length - data_offset
    described: list[safetensors.Layout] = []

    def fields() -> Mapping[str, Any]:
        layout = safetensors.layout(head, data_bytes)
        body.refuse_over_limit(data_offset + layout.data_bytes)
        described.append(layout)
        return _fields(layout)

    call.small = data_offset <= SMALL_BYTES
    if data_offset <= _KNOWN_HEAD_BYTES and data_bytes is not None:
        call.key = (bytes(head), data_bytes, call.refuse)
        described = call.notes
    async with plane.begin(call, fields) as work:
        targets = [
            data_view(work.inputs[name]) if name in work.inputs else placed.end - placed.begin
            for name, placed in described[0].tensors.items()
        ]
        with call.timings.stage("receive"):
            await body.into(targets, skip=data_offset)
        yield work


def _fields(layout: safetensors.Layout) -> Mapping[str, Any]:
    parameters = safetensors.parameters(layout.metadata)
    if both := sorted(layout.tensors.keys() & parameters.keys()):
        raise MalformedRequest(
            f'"{both[0]}" is both a tensor and a parameter; expected one of them'
        )
    tensors = {
        name: blank(placed.shape, placed.dtype, name=name)
        for name, placed in layout.tensors.items()
    }
    return {**parameters, **tensors}


@asynccontextmanager
async def _begin_json(plane: Pipeline, call: ComputeRequest, body: Body) -> AsyncIterator[Work]:
    """The text has a place of its own until its base64 has been decoded into the inputs' place."""
    with call.timings.stage("receive"):
        text = await body.whole(plane.engine)
    try:
        fillers: dict[str, Filler] = {}

        def fields() -> Mapping[str, Any]:
            found, to_fill = describe_json_request(text.data, call.operation)
            fillers.update(to_fill)
            return found

        call.small = text.lease is None
        async with plane.begin(call, fields, holds=text.lease) as work:
            with call.timings.stage("decode"):
                sources: dict[str, Source] = {**work.request.tensors(), **fillers}
                await work.fill(sources, holds=text.lease)
            text.release()
            yield work
    finally:
        text.release()


def _encode_json(result: Result) -> Sequence[Chunk]:
    request = result.request
    return json_answer(result.outputs, result.report, request.response, request.store)


def _refuse_json(request: Request, problem: Problem) -> None:
    elements = sum(
        spec.elements for name, spec in problem.outputs.items() if name not in request.store
    )
    refuse_endless_values(elements, request.response)


def _encode_safetensors(result: Result) -> Sequence[Chunk]:
    store = result.request.store
    metadata = {"report": result.report.model_dump_json()}
    if store:
        told = {name: stored_tensor(result.outputs[name], store[name]) for name in store}
        metadata["stored"] = json.dumps(told)
    sent = {name: array for name, array in result.outputs.items() if name not in store}
    progress = result.progress
    if progress is None:
        return safetensors.encode(sent, metadata)
    specs = {name: (dtype_of(array), array.shape) for name, array in sent.items()}
    header, order = safetensors.encode_header(specs, metadata)
    return [
        header,
        *(Arriving(data_view(sent[name]), partial(progress.until, name)) for name in order),
    ]


def _refuse_nothing(request: Request, problem: Problem) -> None:
    """safetensors holds any answer."""


JSON = Codec("application/json", "max_json_bytes", _begin_json, _encode_json, _refuse_json)
SAFETENSORS = Codec(
    safetensors.MEDIA_TYPE,
    "max_body_bytes",
    _begin_safetensors,
    _encode_safetensors,
    _refuse_nothing,
    streams=True,
)
CODECS: Mapping[str, Codec] = {wire.media_type: wire for wire in (JSON, SAFETENSORS)}
MEDIA_TYPES = tuple(CODECS)
