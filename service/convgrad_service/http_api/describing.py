"""What the server says of itself: operations and limits, layers, health, and metrics."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from convgrad import _version, layers
from convgrad.contract import OPERATIONS, Operation
from convgrad.errors import MalformedRequest
from convgrad_service.engine.hub import Hub, call_hub
from convgrad_service.engine.pipeline import Pipeline
from convgrad_service.http_api.codecs import ANSWER_FORMS, BODY_FORMS
from convgrad_service.server.settings import Settings

__all__ = ["answer_layers", "catalogue", "health_router"]
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
_NOT_LIVE: dict[int | str, dict[str, Any]] = {
    503: {"description": "No device has worked for a long time: the server must be restarted."}
}
_NOT_READY: dict[int | str, dict[str, Any]] = {
    503: {"description": "Requests are refused: the server shuts down, or its device has failed."}
}


def catalogue(pipeline: Pipeline, settings: Settings) -> dict[str, Any]:
    """Return the operations, formats and limits as JSON-compatible values."""
    return {
        "server": "convgrad",
        "version": _version.__version__,
        "backend": pipeline.engine.status.backend,
        "media_types": list(BODY_FORMS),
        "answer_media_types": list(ANSWER_FORMS),
        "limits": {
            "body_bytes": {
                media_type: int(getattr(settings, form.limit))
                for media_type, form in BODY_FORMS.items()
            },
            "problem_bytes": pipeline.limits.problem_bytes,
            "problem_flops": pipeline.limits.problem_flops,
            "output_ratio": pipeline.limits.output_ratio,
            "inflight_bytes": pipeline.engine.limit_bytes,
            "queue": settings.max_queue,
            "timeout_s": settings.max_timeout_s,
        },
        "operations": [_described(operation) for operation in OPERATIONS.values()],
    }


def _described(operation: Operation) -> dict[str, Any]:
    schema = operation.request.model_json_schema()
    parameters = {
        name: field for name, field in schema["properties"].items() if name not in operation.tensors
    }
    described: dict[str, Any] = {
        "name": operation.name,
        "path": f"/{operation.name}",
        "summary": operation.summary,
        "tensors": {
            name: {
                "required": name in operation.required_tensors,
                "description": schema["properties"][name].get("description", ""),
            }
            for name in operation.tensors
        },
        "outputs": list(operation.outputs),
        "dtypes": [dtype.value for dtype in operation.dtypes],
        "layouts": list(operation.layouts),
        "parameters": {
            "type": "object",
            "properties": parameters,
            "required": [name for name in schema.get("required", []) if name in parameters],
            "additionalProperties": False,
        },
        "example": operation.example,
    }
    if "$defs" in schema:
        described["parameters"]["$defs"] = schema["$defs"]
    return described


async def answer_layers(request: Request) -> Response:
    """Return a ``layer``'s sizes and notations, or a ``suite``'s layers, or the suites' names.

    ``batch`` overrides the layer's number of samples.
    """
    query = request.query_params
    for name in query:
        if name not in ("layer", "suite", "batch"):
            raise MalformedRequest(f'unknown field "{name[:64]}"; expected layer, batch or suite')
        if len(query.getlist(name)) > 1:
            raise MalformedRequest(f'the query has "{name}" twice')
    if "layer" in query:
        layer = layers.parse(query["layer"])
        if "batch" in query:
            layer = layer.with_batch(_number("batch", query["batch"]))
        return JSONResponse(_described_layer(layer))
    if "suite" in query:
        found = [
            {**_described_layer(each.layer), "suite": each.suite, "networks": dict(each.networks)}
            for each in layers.suite(query["suite"])
        ]
        return JSONResponse({"layers": found})
    return JSONResponse({"suites": list(layers.suite_names())})


def _number(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 12:
        raise MalformedRequest(f"{name} is {text[:32]!r}; expected a number")
    return int(text)


def _described_layer(layer: layers.Layer) -> dict[str, Any]:
    return {
        "title": layer.title,
        **asdict(layer),
        "output_size": layer.output_size,
        "operations": layers.operations_of(layer),
        "spellings": layers.spellings(layer),
    }


def health_router(pipeline: Pipeline) -> APIRouter:
    """Return the routes for health and metrics."""
    router = APIRouter(tags=["health"])

    @router.get("/v2/health/live", summary="Whether the process responds.", responses=_NOT_LIVE)
    async def live() -> JSONResponse:
        pipeline.require_live()
        return JSONResponse({"live": True})

    @router.get("/v2/health/ready", summary="Whether requests are accepted.", responses=_NOT_READY)
    async def ready() -> JSONResponse:
        pipeline.require_ready()
        return JSONResponse({"ready": True})

    @router.get("/metrics", summary="Metrics for Prometheus.", response_class=Response)
    async def prometheus() -> Response:
        return Response(await call_hub(pipeline.engine, Hub.exposition), media_type=_PROMETHEUS)

    return router
