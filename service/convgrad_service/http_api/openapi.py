"""``/openapi.json``, made from the contract's models, with an example of every operation.

The operations' endpoints take bytes rather than parsed models, so FastAPI does not know what they
accept. FastAPI describes the other routes (health, metrics), and the operations are added here.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from inspect import cleandoc
from typing import Any

import numpy as np
from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode

from convgrad.contract import OPERATIONS, Operation, Report, validate
from convgrad.contract.examinations import PLANS, TIMINGS, VERIFICATIONS, operation_examined
from convgrad.contract.timing import PlanExplained, TimedPlan
from convgrad.contract.verification import Verification
from convgrad.wire.json_tensors import decode_tensor, encode_tensor
from convgrad_service.http_api.codecs import JSON, REPORT_HEADER, REQUEST_FORMATS, SAFETENSORS
from convgrad_service.http_api.examinations import EVENT_STREAM
from convgrad_service.http_api.middleware import needs_no_key
from convgrad_service.http_api.numpy_files import MEDIA_TYPE as MULTIPART
from convgrad_service.http_api.numpy_files import NPY, NPZ
from convgrad_service.http_api.openapi_parts import (
    ANSWER_HEADERS,
    BINARY,
    PARAMETERS,
    REF,
    answer_schema,
    described,
    error_response,
    error_responses,
    for_generators,
    form_schema,
    header,
    named_schemas,
    parameter,
    ref,
    responses_of,
)
from convgrad_service.problems import problem_from
from convgrad_service.server.settings import Settings

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
# The errors of /plan, which has no body, and of /verify and /time.
_PLAN_STATUSES = (400, 401, 406, 413, 422, 429, 500, 503, 504)
_EXAMINATION_STATUSES = (*_PLAN_STATUSES, 404, 408, 415)
# The answers of each kind of examination, and its summary.
_EXAMINATIONS: Mapping[str, tuple[type[BaseModel], str]] = {
    "verify": (
        Verification,
        "Verify a result of {} against a float64 reference, element by element.",
    ),
    "time": (TimedPlan, "Time {} on a device that does nothing else."),
    "plan": (
        PlanExplained,
        "Explain which kernel would compute {}, and why the others would not.",
    ),
}
_REPORT_HEADER = {REPORT_HEADER: header("How an answer in .npy or .npz was computed, as JSON.")}


def add_openapi(app: FastAPI, settings: Settings) -> None:
    """Add ``/openapi.json`` to ``app``, and make ``app.openapi()`` return the whole document.

    Making it takes half a second. It is made in a thread, on the first request for it.
    """
    making: asyncio.Future[bytes] | None = None
    app.openapi = lambda: _document(app, settings)  # type: ignore[method-assign]

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi(request: Request) -> Response:
        nonlocal making
        if making is None:
            made = asyncio.to_thread(lambda: json.dumps(app.openapi()).encode())
            making = asyncio.ensure_future(made)
        text = await asyncio.shield(making)
        if root := request.scope.get("root_path", "").rstrip("/"):
            text = b'{"servers": [{"url": %s}], ' % json.dumps(root).encode() + text[1:]
        return Response(text, media_type=JSON)


def _document(app: FastAPI, settings: Settings) -> dict[str, Any]:
    document = get_openapi(
        title=app.title,
        version=app.version,
        summary=app.summary,
        description=_DESCRIPTION,
        routes=app.routes,
    )
    requests = (*OPERATIONS.values(), *VERIFICATIONS.values(), *TIMINGS.values())
    schemas: dict[str, Any] = document.setdefault("components", {}).setdefault("schemas", {})
    answers: list[type[BaseModel]] = [Report, *(answer for answer, _ in _EXAMINATIONS.values())]
    found: dict[str, Any] = {}
    for operation in requests:
        found.update(_schemas(operation.request, "validation"))
    for answer in answers:
        found.update(_schemas(answer, "serialization"))
    schemas.update(sorted(found.items()))
    schemas.update(named_schemas())
    document["components"]["responses"] = error_responses()
    for methods in document["paths"].values():
        for item in methods.values():
            if "422" in item["responses"] or "requestBody" in item:
                # FastAPI assumes that routes with parameters answer 422.
                item["responses"] = responses_of(item["responses"]["200"], _ERROR_STATUSES)
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    document["paths"] = {**_paths(settings), **document["paths"]}
    _describe_keys(document, required=settings.api_keys is not None)
    return document


def _schemas(model: type[BaseModel], mode: JsonSchemaMode) -> dict[str, Any]:
    """Return the schemas of a model and of those that it refers to, by name.

    Pydantic can do this for all models at once, but then compares each name with all others.
    """
    schema = model.model_json_schema(ref_template=REF.replace("{}", "{model}"), mode=mode)
    found = {**schema.pop("$defs", {}), model.__name__: schema}
    return {name: for_generators(each) for name, each in found.items()}


def _paths(settings: Settings) -> dict[str, Any]:
    """Return the path items of what FastAPI knows nothing about."""
    return {
        **{f"/{each.name}": {"post": _computed(each, settings)} for each in OPERATIONS.values()},
        "/v2/models/{model}/infer": {"post": _infer(settings)},
        **{
            f"/{each.name}": {"post": _examined(each)}
            for each in (*VERIFICATIONS.values(), *TIMINGS.values())
        },
        **{f"/{each.name}": {"get": _planned(each)} for each in PLANS.values()},
        "/layers": {"get": _layers()},
        **_stored_tensors(),
    }


def _computed(operation: Operation, settings: Settings) -> dict[str, Any]:
    """Describe ``POST /<operation>``."""
    model = operation.request
    details = cleandoc(model.__doc__ or "").partition("\n")[2].strip()
    limits = {name: int(getattr(settings, form.limit)) for name, form in REQUEST_FORMATS.items()}
    listed = ", ".join(f"{limit:,} bytes of {name}" for name, limit in limits.items())
    return described(
        "operations",
        operation.name,
        operation.summary,
        {
            "description": "The computed tensors, and how they were computed.",
            "headers": ANSWER_HEADERS | _REPORT_HEADER,
            "content": {
                JSON: {"schema": answer_schema(operation)},
                **dict.fromkeys((SAFETENSORS, NPY, NPZ), BINARY),
            },
        },
        _ERROR_STATUSES,
        # Docstrings are laid out for a terminal; Markdown would join their lines.
        description=f"```text\n{details}\n```" if details else "",
        parameters=PARAMETERS,
        requestBody={
            "required": True,
            "description": f"At most {listed}.",
            "content": {
                JSON: {"schema": ref(model), "example": operation.example},
                SAFETENSORS: BINARY,
                MULTIPART: {"schema": form_schema(operation)},
            },
        },
    )


def _infer(settings: Settings) -> dict[str, Any]:
    """Describe the protocol's inference path; its own specification has the details."""
    return described(
        "open inference protocol",
        "infer",
        "Compute an operation by the Open Inference Protocol v2.",
        {
            "description": "The outputs, in JSON or behind it.",
            "headers": ANSWER_HEADERS,
            "content": {JSON: {"schema": {"type": "object"}}, "application/octet-stream": BINARY},
        },
        _ERROR_STATUSES,
        description="JSON, or JSON followed by the tensors' bytes (Triton's binary data "
        "extension): then `Inference-Header-Content-Length` is the length of the JSON. "
        "Parameters are scalars or, for lists, JSON text.",
        parameters=[
            parameter("model", "path", enum=list(OPERATIONS)),
            parameter(
                "Inference-Header-Content-Length",
                "header",
                "Bytes of JSON before the binary data.",
                type="integer",
                minimum=1,
            ),
            *PARAMETERS,
        ],
        requestBody={
            "required": True,
            "description": f"At most {int(settings.max_json_bytes):,} bytes of JSON, or "
            f"{int(settings.max_body_bytes):,} with binary data.",
            "content": {
                JSON: {"schema": {"type": "object"}, "example": _INFER_EXAMPLE},
                "application/octet-stream": BINARY,
            },
        },
    )


def _examination(operation: Operation, statuses: Iterable[int], **more: Any) -> dict[str, Any]:
    kind, _, name = operation.name.partition("/")
    answer, summary = _EXAMINATIONS[kind]
    success = {
        "description": "The report.",
        "headers": ANSWER_HEADERS,
        "content": {JSON: {"schema": ref(answer)}},
    }
    return described(kind, f"{kind}_{name}", summary.format(name), success, statuses, **more)


def _examined(operation: Operation) -> dict[str, Any]:
    """Describe ``POST /verify/<operation>``, which has tensors, or ``POST /time/<operation>``."""
    example = _with_results(operation) if operation.tensors else operation.example
    content: dict[str, Any] = {JSON: {"schema": ref(operation.request), "example": example}}
    if operation.tensors:
        content[SAFETENSORS] = BINARY
    body = {"required": True, "content": content}
    found = _examination(operation, _EXAMINATION_STATUSES, parameters=PARAMETERS, requestBody=body)
    if not operation.tensors:
        found["responses"]["202"] = {
            "description": "With `Accept: text/event-stream`: the events `queued`, `running`, and "
            "`result` with the answer or `error` with a problem. Closing the connection cancels.",
            "content": {EVENT_STREAM: {"schema": {"type": "string"}}},
        }
    return found


def _with_results(operation: Operation) -> dict[str, Any]:
    """Return an example of a verification: the operation's, with zeros as the caller's results."""
    computed = operation_examined(operation.name)
    example = {name: value for name, value in computed.example.items() if name != "response"}
    arrays = {
        name: decode_tensor(example[name], name=name)
        for name in computed.tensors
        if name in example
    }
    problem = problem_from(computed.name, validate(computed.request, {**example, **arrays}))
    for name, spec in problem.outputs.items():
        zeros = np.zeros(spec.shape, spec.dtype.numpy)
        example[f"result_{name}"] = encode_tensor(zeros, "values")
    return example


def _planned(operation: Operation) -> dict[str, Any]:
    """Describe ``GET /plan/<operation>``."""
    fields = operation.request.model_json_schema()["properties"]
    queried = [
        parameter(name, "query", f"{field.get('description', '')} Lists and objects are JSON text.")
        for name, field in fields.items()
        if name not in ("response", "stored", "store")
    ]
    return _examination(operation, _PLAN_STATUSES, parameters=[*queried, *PARAMETERS])


def _layers() -> dict[str, Any]:
    return described(
        "plan",
        "layers",
        "Describe a layer in every notation, or list the suites.",
        {
            "description": "The layer or the suite; without a query, the names of the suites.",
            "headers": ANSWER_HEADERS,
            "content": {JSON: {"schema": {"type": "object"}}},
        },
        (400,),
        parameters=[
            parameter(
                "layer",
                "query",
                "A layer in any notation; the answer has its sizes and all its notations.",
            ),
            parameter("batch", "query", "Number of samples; overrides the layer's."),
            parameter(
                "suite", "query", "The name of a suite or network; the answer lists its layers."
            ),
        ],
    )


def _stored_tensors() -> dict[str, Any]:
    """Return the path items of stored tensors."""

    def operation(
        name: str, summary: str, content: Mapping[str, Any], *statuses: int, **more: Any
    ) -> dict[str, Any]:
        success = {"description": "Done.", "content": content}
        return described("stored tensors", name, summary, success, statuses, **more)

    description = {"$ref": REF.format("StoredTensorDescription")}
    listed = {
        "type": "object",
        "properties": {"tensors": {"type": "array", "items": description}},
        "required": ["tensors"],
    }
    tensor = {JSON: {"schema": {"$ref": REF.format("Tensor")}}, SAFETENSORS: BINARY, NPY: BINARY}
    pattern = "^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$"
    name = parameter("name", "path", "The tensor's name on the server.", pattern=pattern)
    time_to_live = parameter(
        "X-Time-To-Live",
        "header",
        "Seconds since its last use after which it is deleted; at most the server's own limit.",
        type="number",
        exclusiveMinimum=0,
    )
    all_tensors = operation("list_tensors", "List the stored tensors.", {JSON: {"schema": listed}})
    return {
        "/tensors": {"get": all_tensors},
        "/tensors/{name}": {
            "parameters": [name],
            "put": operation(
                "put_tensor",
                "Store a tensor.",
                {JSON: {"schema": description}},
                *(400, 413, 415, 429),
                parameters=[time_to_live],
                requestBody={"required": True, "content": tensor},
            ),
            "get": operation("get_tensor", "Fetch a tensor.", tensor, 404, 406),
            "delete": operation(
                "drop_tensor", "Delete a tensor.", {JSON: {"schema": {"type": "object"}}}, 404
            ),
        },
    }


def _describe_keys(document: dict[str, Any], *, required: bool) -> None:
    """Add the refusals of a missing or restricted key to every path that may need a key.

    If this server requires keys, the document also says so, and the page at ``/docs`` then has a
    field for one.
    """
    for path, item in document["paths"].items():
        for method in item.keys() & _METHODS:
            if needs_no_key(path):
                if required:
                    item[method]["security"] = []
                continue
            refusals = {str(status): error_response(status) for status in (401, 403)}
            responses = item[method]["responses"] | refusals
            item[method]["responses"] = dict(sorted(responses.items()))
    if required:
        document["components"]["securitySchemes"] = {
            "apiKey": {
                "type": "http",
                "scheme": "bearer",
                "description": "An API key of this server.",
            }
        }
        document["security"] = [{"apiKey": []}]
