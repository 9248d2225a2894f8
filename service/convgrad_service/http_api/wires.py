"""The forms a body can have over HTTP: for each media type, its codec and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from convgrad.contract import Operation, Request
from convgrad.errors import MalformedRequest
from convgrad.wire import safetensors
from convgrad_service.engine.dataplane import Result
from convgrad_service.http_api.json_answer import encode_json_answer, refuse_endless_values
from convgrad_service.http_api.json_body import decode_json_request
from convgrad_service.problems import Problem

__all__ = ["JSON", "MEDIA_TYPES", "SAFETENSORS", "WIRES", "Chunk", "Wire"]

Chunk = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Wire:
    """One media type.

    ``decoded_share`` and ``encoded_share`` bound the bytes that decoding allocates for each byte
    of body and encoding for each byte of tensor, so that they can be reserved beforehand;
    ``limit`` names the setting that bounds a body. ``refuse`` raises, before anything is computed,
    where an answer could not be encoded.
    """

    media_type: str
    limit: str
    decode: Callable[[memoryview, Operation], Mapping[str, Any]]
    encode: Callable[[Result], list[Chunk]]
    refuse: Callable[[Request, Problem], None]
    decoded_share: float
    encoded_share: float


def _encode_json(result: Result) -> list[Chunk]:
    return encode_json_answer(result.outputs, result.report, result.request.response)


def _refuse_json(request: Request, problem: Problem) -> None:
    elements = sum(spec.elements for spec in problem.outputs.values())
    refuse_endless_values(elements, request.response)


def _decode_safetensors(body: memoryview, _: Operation) -> Mapping[str, Any]:
    tensors, metadata = safetensors.decode(body)
    parameters = safetensors.parameters(metadata)
    if both := sorted(tensors.keys() & parameters.keys()):
        raise MalformedRequest(
            f'"{both[0]}" is both a tensor and a parameter; expected one of them'
        )
    return {**parameters, **tensors}


def _refuse_nothing(request: Request, problem: Problem) -> None:
    """safetensors holds any answer."""


def _encode_safetensors(result: Result) -> list[Chunk]:
    return safetensors.encode(result.outputs, {"report": result.report.model_dump_json()})


# Base64 holds three bytes in four characters; what lists of numbers take, json_body bounds.
JSON = Wire(
    "application/json",
    "max_json_bytes",
    decode_json_request,
    _encode_json,
    _refuse_json,
    decoded_share=0.75,
    encoded_share=1.34,
)
# Arrays are views into the body, and the answer is sent from the arrays.
SAFETENSORS = Wire(
    safetensors.MEDIA_TYPE,
    "max_body_bytes",
    _decode_safetensors,
    _encode_safetensors,
    _refuse_nothing,
    decoded_share=0,
    encoded_share=0,
)
WIRES: Mapping[str, Wire] = {wire.media_type: wire for wire in (JSON, SAFETENSORS)}
MEDIA_TYPES = tuple(WIRES)
