"""``/openapi.json``, made from the contract's models, with an example of every operation.

The operations' endpoints take bytes rather than parsed models, so FastAPI does not know what they
accept. FastAPI describes the other routes (health, metrics), and the operations are added here.
"""

from __future__ import annotations

from inspect import cleandoc
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from convgrad.contract import OPERATIONS, Operation, Report
from convgrad.errors import CODES
from convgrad_service.http_api import problem_details
from convgrad_service.http_api.codecs import BODY_FORMS, JSON, SAFETENSORS
from convgrad_service.http_api.middleware import needs_no_key
from convgrad_service.http_api.multipart_body import MEDIA_TYPE as MULTIPART
from convgrad_service.http_api.npy_answer import NPY, NPZ, REPORT_HEADER
from convgrad_service.http_api.openapi_examinations import EXAMINATION_MODELS, examination_paths
from convgrad_service.http_api.openapi_tensors import REF as _REF
from convgrad_service.http_api.openapi_tensors import (
    named_tensors,
    stored_tensor_paths,
    with_named_tensors,
)
from convgrad_service.server.settings import Settings

__all__ = ["install_openapi"]

_DESCRIPTION = """\
Tensors are sent and returned as JSON, as a safetensors file or as NumPy files; `Content-Type` is
the format of the request, `Accept` that of the answer (by default the same). In a safetensors file
the parameters are JSON text under the key `parameters` of `__metadata__`, and the answer's report
is under `report`. In a form (multipart/form-data) each tensor is a .npy file and each parameter a
field; its answer is a .npz file, or a .npy file if `Accept` is application/x-npy, with the report
in `X-Report`.

Every answer carries `X-Request-Id` (yours, if you sent one) and `Server-Timing`. Every error is
`application/problem+json`.
"""

_INFER_EXAMPLE: dict[str, Any] = {
    "inputs": [
        {
            "name": "grad_output",
            "datatype": "FP32",
            "shape": [1, 1, 2, 2],
            "data": [1.0, 2.0, 3.0, 4.0],
        },
        {
            "name": "weight",
            "datatype": "FP32",
            "shape": [1, 1, 2, 2],
            "data": [1.0, 0.0, 0.0, -1.0],
        },
    ],
    "parameters": {"stride": "[1, 1]"},
}

_METHODS = {"get", "put", "post", "delete"}
# The errors of every operation, from the error table; `_describe_keys` adds those of API keys.
_ERROR_STATUSES = (400, 404, 406, 408, 413, 415, 422, 429, 500, 503, 504)


def install_openapi(app: FastAPI, settings: Settings) -> None:
    """Make ``app.openapi()`` return the whole document, built on first use."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app, settings)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign] # FastAPI's documented way


def _document(app: FastAPI, settings: Settings) -> dict[str, Any]:
    document = get_openapi(
        title=app.title,
        version=app.version,
        summary=app.summary,
        description=_DESCRIPTION,
        routes=app.routes,
    )
    models = [(operation.request, "validation") for operation in OPERATIONS.values()]
    answers = [(Report, "serialization"), *EXAMINATION_MODELS]
    _, definitions = models_json_schema(
        [*models, *answers],  # type: ignore[list-item] # literals, widened
        ref_template=_REF.replace("{}", "{model}"),
    )
    schemas: dict[str, Any] = document.setdefault("components", {}).setdefault("schemas", {})
    schemas.update(with_named_tensors(definitions["$defs"]))
    schemas.update(named_tensors())
    schemas["Problem"] = _problem_schema()
    paths = {f"/{operation.name}": _path(operation, settings) for operation in OPERATIONS.values()}
    paths["/v2/models/{model}/infer"] = _infer_path(settings)
    paths.update(examination_paths(_PARAMETERS, _ANSWER_HEADERS, _error_response))
    paths.update(stored_tensor_paths(_error_response))
    for methods in document["paths"].values():
        for described in methods.values():
            if "422" in described["responses"]:
                # FastAPI assumes that routes with parameters answer 422.
                own = {str(status): _error_response(status) for status in _ERROR_STATUSES}
                described["responses"] = {**own, "200": described["responses"]["200"]}
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    document["paths"] = {**paths, **document["paths"]}
    _describe_keys(document, required=settings.api_keys is not None)
    return document


def _describe_keys(document: dict[str, Any], *, required: bool) -> None:
    """Add the refusals of a missing or restricted key to every path that may need a key.

    If this server requires keys, the document also says so, and the page at ``/docs`` then has a
    field for one.
    """
    for path, item in document["paths"].items():
        for method in item.keys() & _METHODS:
            described = item[method]
            if needs_no_key(path):
                if required:
                    described["security"] = []
                continue
            responses = described["responses"] | {
                "401": _error_response(401),
                "403": _error_response(403),
            }
            described["responses"] = dict(sorted(responses.items()))
    if required:
        document["components"]["securitySchemes"] = {
            "apiKey": {
                "type": "http",
                "scheme": "bearer",
                "description": "An API key of this server.",
            }
        }
        document["security"] = [{"apiKey": []}]


def _path(operation: Operation, settings: Settings) -> dict[str, Any]:
    model = operation.request
    described = cleandoc(model.__doc__ or "").partition("\n")[2]
    limits = {name: int(getattr(settings, form.limit)) for name, form in BODY_FORMS.items()}
    return {
        "post": {
            "tags": ["operations"],
            "operationId": operation.name,
            "summary": operation.summary,
            # Docstrings are laid out for a terminal; Markdown would join their lines.
            "description": f"```text\n{described.strip()}\n```" if described.strip() else "",
            "parameters": _PARAMETERS,
            "requestBody": {
                "required": True,
                "description": "At most "
                + ", ".join(f"{limit:,} bytes of {name}" for name, limit in limits.items())
                + ".",
                "content": {
                    JSON: {
                        "schema": {"$ref": _REF.format(model.__name__)},
                        "example": operation.example,
                    },
                    SAFETENSORS: {"schema": _BINARY},
                    MULTIPART: {"schema": _form_schema(operation)},
                },
            },
            "responses": {
                "200": {
                    "description": "The computed tensors, and how they were computed.",
                    "headers": _ANSWER_HEADERS | _REPORT_HEADER,
                    "content": {
                        JSON: {"schema": _answer_schema(operation)},
                        SAFETENSORS: {"schema": _BINARY},
                        NPY: {"schema": _BINARY},
                        NPZ: {"schema": _BINARY},
                    },
                },
                **{str(status): _error_response(status) for status in _ERROR_STATUSES},
            },
        }
    }


def _infer_path(settings: Settings) -> dict[str, Any]:
    """Describe the protocol's inference path; its own specification has the details."""
    answer = {"description": "The outputs, in JSON or behind it.", "headers": _ANSWER_HEADERS}
    return {
        "post": {
            "tags": ["open inference protocol"],
            "operationId": "infer",
            "summary": "Compute an operation by the Open Inference Protocol v2.",
            "description": "JSON, or JSON followed by the tensors' bytes (Triton's binary data "
            "extension): then `Inference-Header-Content-Length` is the length of the JSON. "
            "Parameters are scalars or, for lists, JSON text.",
            "parameters": [
                {
                    "name": "model",
                    "in": "path",
                    "required": True,
                    "schema": {"type": "string", "enum": list(OPERATIONS)},
                },
                {
                    "name": "Inference-Header-Content-Length",
                    "in": "header",
                    "description": "Bytes of JSON before the binary data.",
                    "schema": {"type": "integer", "minimum": 1},
                },
                *_PARAMETERS,
            ],
            "requestBody": {
                "required": True,
                "description": f"At most {int(settings.max_json_bytes):,} bytes of JSON, or "
                f"{int(settings.max_body_bytes):,} with binary data.",
                "content": {
                    "application/json": {"schema": {"type": "object"}, "example": _INFER_EXAMPLE},
                    "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
                },
            },
            "responses": {
                "200": answer,
                **{str(status): _error_response(status) for status in _ERROR_STATUSES},
            },
        }
    }


def _form_schema(operation: Operation) -> dict[str, Any]:
    """Describe a form: files by tensor name, and parameters as text."""
    properties: dict[str, Any] = {
        name: _BINARY | {"description": "A .npy file."}
        if name in operation.tensors
        else {"type": "string", "description": "As JSON, or bare text."}
        for name in operation.request.model_fields
    }
    return {
        "type": "object",
        "title": f"{operation.request.__name__.removesuffix('Request')}Form",
        "properties": properties,
        "required": list(operation.required_tensors),
    }


def _answer_schema(operation: Operation) -> dict[str, Any]:
    properties = {name: {"$ref": _REF.format("OutputTensor")} for name in operation.outputs}
    # If outputs can be chosen, none is required; otherwise the first is.
    always = [] if "outputs" in operation.request.model_fields else [operation.outputs[0]]
    return {
        "type": "object",
        "properties": {**properties, "report": {"$ref": _REF.format("Report")}},
        "required": [*always, "report"],
    }


def _error_response(status: int) -> dict[str, Any]:
    codes = [row.code for row in CODES.values() if row.http_status == status]
    headers = dict(_ANSWER_HEADERS)
    if status in (429, 503):
        headers["Retry-After"] = {
            "description": "Seconds to wait before retrying.",
            "schema": {"type": "integer"},
        }
    return {
        "description": " or ".join(codes),
        "headers": headers,
        "content": {problem_details.MEDIA_TYPE: {"schema": {"$ref": _REF.format("Problem")}}},
    }


def _problem_schema() -> dict[str, Any]:
    text = {"type": "string"}
    properties = {
        "type": text,
        "title": text,
        "status": {"type": "integer"},
        "detail": {**text, "description": "What was found and what was expected."},
        "code": {**text, "enum": list(CODES)},
        "request_id": text,
        "error": {**text, "description": "The same as detail."},
    }
    return {
        "title": "Problem",
        "description": "An error (RFC 9457).",
        "type": "object",
        "properties": properties,
        "required": list(properties),
    }


_BINARY: dict[str, Any] = {"type": "string", "format": "binary"}
_ANSWER_HEADERS: dict[str, Any] = {
    "X-Request-Id": {
        "description": "Names the request in the server's log.",
        "schema": {"type": "string"},
    },
    "Server-Timing": {
        "description": "Milliseconds spent in each stage.",
        "schema": {"type": "string"},
    },
}
_REPORT_HEADER: dict[str, Any] = {
    REPORT_HEADER: {
        "description": "How an answer in .npy or .npz was computed, as JSON.",
        "schema": {"type": "string"},
    },
}
_PARAMETERS: list[dict[str, Any]] = [
    {
        "name": "X-Request-Timeout",
        "in": "header",
        "description": "Seconds allowed for the request; at most the server's limit.",
        "schema": {"type": "number", "exclusiveMinimum": 0},
    },
    {
        "name": "X-Request-Id",
        "in": "header",
        "description": "The client's id for the request: 1 to 128 printable ASCII characters.",
        "schema": {"type": "string", "maxLength": 128},
    },
]
