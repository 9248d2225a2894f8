"""The Open Inference Protocol over HTTP: inference, descriptions, statistics and shared memory.

In a request, ``Inference-Header-Content-Length`` is the size of the JSON that precedes the tensors'
bytes, which are received straight into place. Without it the whole body is JSON.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, get_args

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from convgrad.contract import OPERATIONS
from convgrad.errors import MalformedRequest, NotFound, UnsupportedProblem
from convgrad.wire import strict_json
from convgrad.wire.sentences import shown
from convgrad_service.engine.engine import call_hub
from convgrad_service.engine.execution import Execution, Source, json_seconds
from convgrad_service.engine.pipeline import Pipeline
from convgrad_service.engine.request import Decoded
from convgrad_service.engine.shm.registry import RegionInfo, RegionPart
from convgrad_service.engine.telemetry.record import RequestMetrics
from convgrad_service.http_api.body import Body, small_body
from convgrad_service.http_api.middleware import Endpoints, context_of
from convgrad_service.http_api.openapi_parts import json_body
from convgrad_service.http_api.problem_details import Headers
from convgrad_service.http_api.transport import Chunk, Content, Endpoint, HttpTransport
from convgrad_service.oip.fields import (
    Kind,
    SharedMemory,
    array_or_blank,
    operation_named,
    request_fields,
)
from convgrad_service.oip.http_json import (
    binary_outputs,
    encode_answer,
    read_infer_head,
    refuse_in_json,
)
from convgrad_service.oip.models import (
    model_config,
    model_metadata,
    model_statistics,
    repository_index,
    server_metadata,
)
from convgrad_service.oip.request import (
    InferRequest,
    Span,
    refuse_unknown_keys,
    require_size,
    require_type,
)
from convgrad_service.server.settings import Settings

_HEADER_LENGTH = b"inference-header-content-length"
# The JSON before binary data is small, unless it contains numbers too.
_MAX_HEAD_BYTES = 4 * 2**20
# An id in first position, as clients write it, without escapes.
_ID = re.compile(rb'\{"id":"([!#-\[\]-~ ]{0,256})",')
_MODEL = "/v2/models/{model}"
_VERSION = "/v2/models/{model}/versions/{version}"
_MAX_BODY_BYTES = 4096
_SIZE = {"type": "integer", "minimum": 0}
# The fields of a region's registration, as JSON Schema.
_REGIONS: Mapping[Kind, dict[str, Any]] = {
    "system": {"key": {"type": "string"}, "byte_size": _SIZE, "offset": {**_SIZE, "default": 0}},
    "cuda": {
        "raw_handle": {
            "type": "object",
            "properties": {"b64": {"type": "string", "contentEncoding": "base64"}},
            "required": ["b64"],
        },
        "device_id": _SIZE,
        "byte_size": _SIZE,
    },
}


class InferTransport(HttpTransport):
    """An inference request for the model that its path names."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._id = b""
        self._header_bytes = _header_bytes(self.headers, self.request.body_bytes)

    async def head(self) -> Hashable | None:
        await self.receive(None if self._header_bytes is None else self._head_end)
        if (key := self.key()) is None:
            return None
        # All of the request but its id, if that can be found.
        text, data_bytes = key
        if (found := _ID.match(text)) is not None:
            self._id, text = found[1], text[found.end() :]
        return text, found is None, data_bytes, self.owner

    async def _head_end(self, body: Body) -> int:
        header_bytes = self._header_bytes or 0
        if header_bytes > _MAX_HEAD_BYTES:
            raise MalformedRequest(
                f"Inference-Header-Content-Length is {header_bytes:,}; at most "
                f"{_MAX_HEAD_BYTES:,} bytes of JSON may precede binary data"
            )
        found = len(await body.peek(header_bytes))
        if found < header_bytes:
            raise MalformedRequest(
                f"Inference-Header-Content-Length is {header_bytes:,}, and the body has "
                f"{found:,} bytes"
            )
        return header_bytes

    def decode(self) -> Decoded:
        try:
            request = read_infer_head(self.text.data, self.operation, self.data_bytes)
        except MalformedRequest as error:
            if self._header_bytes is None and b'"binary_data_size"' in bytes(self.text.data):
                raise MalformedRequest(
                    f"{error.detail}; binary data needs the header Inference-Header-Content-Length"
                ) from None
            raise
        sources: dict[str, Source] = {}
        spans = []
        for tensor in request.inputs:
            if isinstance(tensor.source, Span):
                spans.append((tensor.name, tensor.source.size_bytes))
            elif not isinstance(tensor.source, RegionPart):
                sources[tensor.name] = tensor.source
        content = Content(sources, spans, replace(request, id="") if self._id else request)
        self.refuse_over_limit(content)
        memory = SharedMemory(self.pipeline.engine, self._settings)
        binary = [wanted.binary or wanted.region is not None for wanted in request.outputs]
        return Decoded(
            request_fields(request, array_or_blank),
            regions=memory.parts(self.owner, request.regions),
            refuse=lambda _, problem: refuse_in_json(request, problem),
            timeout_s=request.timeout_s,
            transport_data=content,
            repeatable=not sources and all(binary or [request.binary_by_default]),
        )

    def encode(self, execution: Execution) -> tuple[Headers, Sequence[Chunk]]:
        request: InferRequest = execution.transport_data.request
        outputs = execution.outputs
        text = execution.text(partial(encode_answer, request, outputs), json_seconds)
        if self._id:
            text = b'{"id":"' + self._id + b'",' + text[1:]
        binary = binary_outputs(request, outputs)
        return _answer_headers(text, binary), [text, *binary]


def _header_bytes(headers: Mapping[bytes, str], length: int | None) -> int | None:
    given = headers.get(_HEADER_LENGTH)
    if given is None:
        return None
    if not (given.isascii() and given.isdigit() and len(given) < 20):
        raise MalformedRequest(
            f"Inference-Header-Content-Length is {given[:64]!r}; expected a number of bytes"
        )
    header_bytes = int(given)
    if header_bytes == 0:
        raise MalformedRequest(
            "Inference-Header-Content-Length is 0; a request of raw bytes alone is for models "
            "whose input's shape follows from its size, which no operation's does"
        )
    if length is not None and header_bytes > length:
        raise MalformedRequest(
            f"Inference-Header-Content-Length is {header_bytes:,}, more than the {length:,} of "
            "Content-Length"
        )
    return header_bytes


def _answer_headers(text: bytes, binary: Sequence[object]) -> Headers:
    if not binary:
        return [(b"content-type", b"application/json")]
    return [
        (b"content-type", b"application/octet-stream"),
        (_HEADER_LENGTH, str(len(text)).encode()),
    ]


def add_oip(app: FastAPI, pipeline: Pipeline, settings: Settings) -> Endpoints:
    """Add the protocol's routes but for health to ``app``; return its inference endpoints."""
    memory = SharedMemory(pipeline.engine, settings)
    router = APIRouter(tags=["open inference protocol"])
    _add_descriptions(router, pipeline, memory, settings)
    for kind in get_args(Kind):
        _add_regions(router, f"/v2/{kind}sharedmemory", kind, memory, settings)
    app.include_router(router)
    infer = {
        name: Endpoint(InferTransport, operation, pipeline, settings)
        for name, operation in OPERATIONS.items()
    }
    for path in (_MODEL, _VERSION):
        route = Route(f"{path}/infer", _ByModel(infer), methods=["POST"], name="infer")
        app.router.routes.append(route)
    return {f"/v2/models/{name}/infer": endpoint for name, endpoint in infer.items()}


class _ByModel:
    """An ASGI application that calls the endpoint of the model that the path names."""

    def __init__(self, endpoints: Mapping[str, Endpoint]) -> None:
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        named: Mapping[str, str] = scope["path_params"]
        operation = operation_named(named["model"], named.get("version", ""))
        await self._endpoints[operation.name](scope, receive, send)


def _add_descriptions(
    router: APIRouter, pipeline: Pipeline, shared_memory: SharedMemory, settings: Settings
) -> None:
    @router.get("/v2", name="server_metadata", summary="The server's name, version and extensions.")
    async def server() -> JSONResponse:
        return JSONResponse(server_metadata(shared_memory.extensions))

    # Before the models' routes, which would take it for a model's name.
    @router.get("/v2/models/stats", summary="Statistics of all models.")
    async def all_statistics() -> JSONResponse:
        return JSONResponse(
            model_statistics(await call_hub(pipeline.engine, RequestMetrics.statistics), OPERATIONS)
        )

    @router.get(_VERSION, include_in_schema=False)
    @router.get(_MODEL, name="model_metadata", summary="A model's inputs and outputs.")
    async def metadata(model: str, version: str = "") -> JSONResponse:
        return JSONResponse(model_metadata(operation_named(model, version).name))

    @router.get(f"{_VERSION}/ready", include_in_schema=False)
    @router.get(f"{_MODEL}/ready", name="model_ready", summary="Whether a model accepts requests.")
    async def ready(model: str, version: str = "") -> JSONResponse:
        if model != settings.service_name:
            operation_named(model, version)
        pipeline.require_ready()
        return JSONResponse({"name": model, "ready": True})

    @router.get(f"{_VERSION}/config", include_in_schema=False)
    @router.get(
        f"{_MODEL}/config",
        name="model_config",
        summary="A model's configuration, in Triton's format.",
    )
    async def config(model: str, version: str = "") -> JSONResponse:
        return JSONResponse(model_config(operation_named(model, version).name))

    @router.get(f"{_VERSION}/stats", include_in_schema=False)
    @router.get(f"{_MODEL}/stats", name="model_statistics", summary="Statistics of one model.")
    async def statistics(model: str, version: str = "") -> JSONResponse:
        operation = operation_named(model, version)
        counts = await call_hub(pipeline.engine, RequestMetrics.statistics)
        return JSONResponse(model_statistics(counts, [operation.name]))

    @router.post(
        "/v2/repository/index",
        name="repository_index",
        summary="All models, and whether they accept requests.",
        openapi_extra=json_body({"ready": {"type": "boolean", "default": False}}),
    )
    async def index(request: Request) -> JSONResponse:
        only_ready = _only_ready(await small_body(request, settings, _MAX_BODY_BYTES))
        return JSONResponse(repository_index(pipeline.unready_reason, only_ready=only_ready))

    @router.post("/v2/repository/models/{model}/load", include_in_schema=False)
    @router.post("/v2/repository/models/{model}/unload", include_in_schema=False)
    async def control(model: str) -> JSONResponse:
        operation_named(model)
        raise UnsupportedProblem(
            "models are this server's operations, which cannot be loaded or unloaded"
        )


def _only_ready(body: bytes) -> bool:
    """Return whether only ready models are requested."""
    fields: dict[str, Any] = strict_json.loads_object(body, "the request") if body else {}
    if repository := fields.get("repository_name"):
        raise NotFound(f"there is no repository {shown(repository)}; the only one has no name")
    return require_type(fields.get("ready", False), bool, "ready: expected true or false")


def _add_regions(
    router: APIRouter, path: str, kind: Kind, memory: SharedMemory, settings: Settings
) -> None:
    region = f"{path}/region/{{name}}"
    named = f"{kind}_shared_memory_{{}}"

    @router.get(
        f"{path}/status",
        name=named.format("status"),
        summary=f"The regions of {kind} shared memory.",
    )
    @router.get(f"{region}/status", include_in_schema=False)
    async def status(request: Request, name: str = "") -> JSONResponse:
        return JSONResponse(await memory.status(context_of(request.scope).owner, kind, name))

    @router.post(
        f"{region}/register",
        name=named.format("register"),
        summary=f"Register a region of {kind} shared memory.",
        openapi_extra=json_body(_REGIONS[kind]),
    )
    async def register(name: str, request: Request) -> JSONResponse:
        body = await small_body(request, settings, _MAX_BODY_BYTES)
        info = _region(kind, name, strict_json.loads_object(body, "the request"))
        await memory.register(context_of(request.scope).owner, info)
        return JSONResponse({})

    @router.post(
        f"{path}/unregister",
        name=named.format("unregister"),
        summary=f"Drop all regions of {kind} shared memory.",
    )
    @router.post(f"{region}/unregister", include_in_schema=False)
    async def unregister(request: Request, name: str = "") -> JSONResponse:
        await memory.unregister(context_of(request.scope).owner, kind, name)
        return JSONResponse({})


def _region(kind: Kind, name: str, fields: dict[str, Any]) -> RegionInfo:
    size_bytes = require_size(fields.get("byte_size"), "byte_size")
    if kind == "cuda":
        refuse_unknown_keys(fields, ("raw_handle", "device_id", "byte_size"), "the request")
        device = require_size(fields.get("device_id"), "device_id")
        handle = _handle(fields.get("raw_handle"))
        return RegionInfo(name, "", 0, size_bytes, handle, device)
    refuse_unknown_keys(fields, ("key", "offset", "byte_size"), "the request")
    key = require_type(fields.get("key"), str, "key: expected a string")
    return RegionInfo(name, key, require_size(fields.get("offset", 0), "offset"), size_bytes)


def _handle(value: Any) -> bytes:
    text = value.get("b64") if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise MalformedRequest(f'raw_handle: expected {{"b64": "…"}}, got {shown(value)}')
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        raise MalformedRequest("raw_handle: b64 is not base64") from None
