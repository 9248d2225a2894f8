"""Parts of ``/openapi.json``: its operations' common fields, and named schemas.

Client generators make a type of each named schema.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel

from convgrad.contract import Operation, tensor_json_schema
from convgrad.dtypes import FLOATING, INDEX
from convgrad.errors import CODES
from convgrad_service.http_api import problem_details

REF = "#/components/schemas/{}"
# Answers hold tensors of any type; the others are for requests.
_KINDS = {"Tensor": (*FLOATING, *INDEX), "FloatTensor": FLOATING, "IndexTensor": INDEX}
_FORMS = {kind: tensor_json_schema(dtypes)["oneOf"] for kind, dtypes in _KINDS.items()}
_TEXT = {"type": "string"}


def named_schemas() -> dict[str, Any]:
    """Return a schema for each kind of tensor and each of its forms, and of errors, by name."""
    schemas: dict[str, Any] = {}
    for kind, kinds_forms in _FORMS.items():
        forms = {_form_name(kind, form["title"]): form for form in kinds_forms}
        for name, form in forms.items():
            schemas[name] = {**form, "title": name}
        schemas[kind] = {"title": kind, "oneOf": [{"$ref": REF.format(name)} for name in forms]}
    dtype = {"type": "string", "enum": [each.value for each in _KINDS["Tensor"]]}
    shape = {"type": "array", "items": {"type": "integer", "minimum": 0}}
    schemas["StoredOutput"] = _object(
        "StoredOutput",
        {"stored": _TEXT, "dtype": dtype, "shape": shape},
        description="An output that is stored instead of sent.",
        additionalProperties=False,
    )
    sent = [
        form for form in schemas["Tensor"]["oneOf"] if not form["$ref"].endswith("/StoredTensor")
    ]
    schemas["OutputTensor"] = {
        "title": "OutputTensor",
        "oneOf": [*sent, {"$ref": REF.format("StoredOutput")}],
    }
    described = {"name": _TEXT, "dtype": dtype, "shape": shape}
    more = {"bytes": {"type": "integer"}, "expires_in_s": {"type": "number"}}
    schemas["StoredTensorDescription"] = _object(
        "StoredTensorDescription", described | more, required=list(described)
    )
    problem = {
        "type": _TEXT,
        "title": _TEXT,
        "status": {"type": "integer"},
        "detail": {**_TEXT, "description": "What was found and what was expected."},
        "code": {**_TEXT, "enum": list(CODES)},
        "request_id": _TEXT,
        "error": {**_TEXT, "description": "The same as detail."},
    }
    schemas["Problem"] = _object("Problem", problem, description="An error (RFC 9457).")
    return schemas


def _object(title: str, properties: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    described = {"title": title, "type": "object", "properties": properties}
    return {**described, "required": list(properties), **more}


def for_generators(schema: Any) -> Any:
    """Replace each kind of tensor in ``schema`` by a reference, and defaults of choices by null."""
    if isinstance(schema, list):
        return [for_generators(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    for kind, forms in _FORMS.items():
        if schema.get("oneOf") == forms:
            kept = {key: value for key, value in schema.items() if key in ("title", "description")}
            return {"$ref": REF.format(kind), **kept}
    if "oneOf" in schema and "default" in schema:
        # Null, which says the same as nothing: see `drop_unset`.
        text = f"{schema['description']} By default {json.dumps(schema['default'])}."
        choices = [*schema["oneOf"], {"type": "null"}]
        schema = {**schema, "oneOf": choices, "default": None, "description": text}
    return {key: for_generators(value) for key, value in schema.items()}


def form_schema(operation: Operation) -> dict[str, Any]:
    """Describe a form: files by tensor name, and parameters as text."""
    file = {"type": "string", "format": "binary", "description": "A .npy file."}
    parameter = {"type": "string", "description": "As JSON, or bare text."}
    return {
        "type": "object",
        "title": f"{operation.request.__name__.removesuffix('Request')}Form",
        "properties": {
            name: file if name in operation.tensors else parameter
            for name in operation.request.model_fields
        },
        "required": list(operation.required_tensors),
    }


def json_body(properties: Mapping[str, Any]) -> dict[str, Any]:
    """Describe a JSON body for ``openapi_extra``; fields with a default are optional."""
    required = [name for name, each in properties.items() if "default" not in each]
    schema = {"type": "object", "properties": properties, "required": required}
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": bool(required), "content": content}}


def answer_schema(operation: Operation) -> dict[str, Any]:
    """Describe an operation's answer in JSON."""
    properties = {name: {"$ref": REF.format("OutputTensor")} for name in operation.outputs}
    # If outputs can be chosen, none is required; otherwise the first is.
    always = [] if "outputs" in operation.request.model_fields else [operation.outputs[0]]
    return {
        "type": "object",
        "properties": {**properties, "report": {"$ref": REF.format("Report")}},
        "required": [*always, "report"],
    }


def _form_name(kind: str, form: str) -> str:
    # A stored tensor's name does not depend on its dtype, so it has one form.
    return "StoredTensor" if form == "stored" else f"{form.capitalize()}{kind}"


def described(
    tag: str,
    name: str,
    summary: str,
    success: Mapping[str, Any],
    statuses: Iterable[int],
    **more: Any,
) -> dict[str, Any]:
    """Describe an HTTP operation by its 200 and the errors of ``statuses``, with more fields."""
    responses = responses_of(success, statuses)
    return {"tags": [tag], "operationId": name, "summary": summary, **more, "responses": responses}


def responses_of(success: Mapping[str, Any], statuses: Iterable[int]) -> dict[str, Any]:
    """Return the responses of an operation: its 200, and its errors."""
    return {"200": success, **{str(status): error_response(status) for status in statuses}}


def error_response(status: int) -> dict[str, Any]:
    """Refer to the error answer with this status, see `error_responses`."""
    return {"$ref": f"#/components/responses/Error{status}"}


def error_responses() -> dict[str, Any]:
    """Return the error answers by name; each is the answer of nearly every operation."""
    statuses = sorted({row.http_status for row in CODES.values()})
    return {f"Error{status}": _error_response(status) for status in statuses}


def _error_response(status: int) -> dict[str, Any]:
    codes = [row.code for row in CODES.values() if row.http_status == status]
    headers = dict(ANSWER_HEADERS)
    if status in (429, 503):
        headers["Retry-After"] = header("Seconds to wait before retrying.", "integer")
    return {
        "description": " or ".join(codes),
        "headers": headers,
        "content": {problem_details.MEDIA_TYPE: {"schema": {"$ref": REF.format("Problem")}}},
    }


def ref(model: type[BaseModel]) -> dict[str, str]:
    """Refer to the schema of a model."""
    return {"$ref": REF.format(model.__name__)}


def header(description: str, kind: str = "string") -> dict[str, Any]:
    """Describe a header of an answer."""
    return {"description": description, "schema": {"type": kind}}


def parameter(name: str, where: str, description: str = "", **schema: Any) -> dict[str, Any]:
    """Describe a parameter in the path, the query or a header: text, unless ``schema`` differs."""
    found = {"name": name, "in": where, "schema": {"type": "string", **schema}}
    more = {"description": description, "required": where == "path"}
    return found | {key: value for key, value in more.items() if value}


BINARY: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}
ANSWER_HEADERS: dict[str, Any] = {
    "X-Request-Id": header("Names the request in the server's log."),
    "Server-Timing": header("Milliseconds spent in each stage."),
}
PARAMETERS: list[dict[str, Any]] = [
    parameter(
        "X-Request-Timeout",
        "header",
        "Seconds allowed for the request; at most the server's limit.",
        type="number",
        exclusiveMinimum=0,
    ),
    parameter(
        "X-Request-Id",
        "header",
        "The client's id for the request: 1 to 128 printable ASCII characters.",
        maxLength=128,
    ),
]
