"""The part of ``/openapi.json`` for ``/verify``, ``/time``, ``/plan`` and ``/layers``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel

from convgrad.contract import Operation
from convgrad.contract.examinations import PLANS, TIMINGS, VERIFICATIONS
from convgrad.contract.timing import PlanExplained, TimedPlan
from convgrad.contract.verification import Verification
from convgrad_service.http_api.codecs import JSON, SAFETENSORS
from convgrad_service.http_api.examinations import EVENT_STREAM
from convgrad_service.http_api.openapi_tensors import REF

__all__ = ["EXAMINATION_MODELS", "examination_paths"]

_ANSWERS: Mapping[str, type[BaseModel]] = {
    "verify": Verification,
    "time": TimedPlan,
    "plan": PlanExplained,
}
_SENTENCES = {
    "verify": "Verify a result of {} against a float64 reference, element by element.",
    "time": "Time {} on a device that does nothing else.",
    "plan": "Explain which kernel would compute {}, and why the others would not.",
}
EXAMINATION_MODELS: list[tuple[type[BaseModel], str]] = [
    *((each.request, "validation") for each in (*VERIFICATIONS.values(), *TIMINGS.values())),
    *((answer, "serialization") for answer in _ANSWERS.values()),
]
"""The models that the paths refer to, each with pydantic's mode."""

_STATUSES = (400, 401, 406, 413, 422, 429, 500, 503, 504)
# Of requests with a body.
_BODY_STATUSES = (404, 408, 415)


def examination_paths(
    parameters: list[dict[str, Any]],
    headers: Mapping[str, Any],
    error: Callable[[int], Any],
) -> dict[str, Any]:
    """Return the path items; ``error`` describes the answer of a status."""
    made: dict[str, Any] = {}
    for operations in (VERIFICATIONS, TIMINGS):
        for operation in operations.values():
            made[f"/{operation.name}"] = {"post": _post(operation, parameters, headers, error)}
    for operation in PLANS.values():
        made[f"/{operation.name}"] = {"get": _get(operation, parameters, headers, error)}
    made["/layers"] = {"get": _layers(headers, error)}
    return made


def _common(
    operation: Operation, headers: Mapping[str, Any], error: Callable[[int], Any]
) -> dict[str, Any]:
    kind, _, name = operation.name.partition("/")
    answer = {"schema": {"$ref": REF.format(_ANSWERS[kind].__name__)}}
    return {
        "tags": [kind],
        "operationId": f"{kind}_{name}",
        "summary": _SENTENCES[kind].format(name),
        "responses": {
            "200": {
                "description": "The report.",
                "headers": headers,
                "content": {JSON: answer},
            },
            **{str(status): error(status) for status in _STATUSES},
        },
    }


def _post(
    operation: Operation,
    parameters: list[dict[str, Any]],
    headers: Mapping[str, Any],
    error: Callable[[int], Any],
) -> dict[str, Any]:
    described = _common(operation, headers, error)
    schema = {"$ref": REF.format(operation.request.__name__)}
    content: dict[str, Any] = {JSON: {"schema": schema, "example": operation.example}}
    if operation.tensors:
        content[SAFETENSORS] = {"schema": {"type": "string", "format": "binary"}}
    else:
        described["responses"]["202"] = {
            "description": "With `Accept: text/event-stream`: the events `queued`, `running`, and "
            "`result` with the answer or `error` with a problem. Closing the connection cancels.",
            "content": {EVENT_STREAM: {"schema": {"type": "string"}}},
        }
    described["responses"] |= {str(status): error(status) for status in _BODY_STATUSES}
    return {
        **described,
        "parameters": parameters,
        "requestBody": {"required": True, "content": content},
    }


def _get(
    operation: Operation,
    parameters: list[dict[str, Any]],
    headers: Mapping[str, Any],
    error: Callable[[int], Any],
) -> dict[str, Any]:
    fields = operation.request.model_json_schema(ref_template=REF.replace("{}", "{model}"))
    own = [
        {
            "name": name,
            "in": "query",
            "description": f"{field.get('description', '')} Lists and objects are JSON text.",
            "schema": {"type": "string"},
        }
        for name, field in fields["properties"].items()
        if name not in ("response", "stored", "store")
    ]
    return {**_common(operation, headers, error), "parameters": [*own, *parameters]}


def _layers(headers: Mapping[str, Any], error: Callable[[int], Any]) -> dict[str, Any]:
    said = {
        "layer": "A layer in any notation; the answer has its sizes and all its notations.",
        "batch": "Number of samples; overrides the layer's.",
        "suite": "The name of a suite or network; the answer lists its layers.",
    }
    return {
        "tags": ["plan"],
        "operationId": "layers",
        "summary": "Describe a layer in every notation, or list the suites.",
        "parameters": [
            {"name": name, "in": "query", "description": text, "schema": {"type": "string"}}
            for name, text in said.items()
        ],
        "responses": {
            "200": {
                "description": "The layer or the suite; without a query, the names of the suites.",
                "headers": headers,
                "content": {JSON: {"schema": {"type": "object"}}},
            },
            "400": error(400),
        },
    }
