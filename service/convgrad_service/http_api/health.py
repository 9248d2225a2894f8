"""``/v2/health/live``, ``/v2/health/ready`` and ``/metrics``, for the platform."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from convgrad_service.engine.hub import Hub, call_hub
from convgrad_service.engine.pipeline import Pipeline

__all__ = ["health_router"]

_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
_NOT_LIVE: dict[int | str, dict[str, Any]] = {
    503: {"description": "No device has worked for a long time: the server must be restarted."}
}
_NOT_READY: dict[int | str, dict[str, Any]] = {
    503: {"description": "Requests are refused: the server shuts down, or its device has failed."}
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
