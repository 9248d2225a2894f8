"""The protocol's shared-memory extensions over HTTP: register, list and drop regions."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from convgrad.errors import MalformedRequest
from convgrad.wire import strict_json
from convgrad.wire.sentences import shown
from convgrad_service.engine.shm.registry import RegionInfo
from convgrad_service.http_api.body import small_body
from convgrad_service.http_api.context import context_of
from convgrad_service.oip.request import known_keys, size_of
from convgrad_service.oip.shared_memory import Kind, SharedMemory
from convgrad_service.server.settings import Settings

__all__ = ["shared_memory_router"]

_MAX_BODY_BYTES = 4096
_PATHS: tuple[tuple[str, Kind], ...] = (
    ("/v2/systemsharedmemory", "system"),
    ("/v2/cudasharedmemory", "cuda"),
)


def shared_memory_router(memory: SharedMemory, settings: Settings) -> APIRouter:
    """Return the routes of both extensions; those not enabled answer with an error."""
    router = APIRouter(tags=["open inference protocol"])
    for path, kind in _PATHS:
        _add(router, path, kind, memory, settings)
    return router


def _add(
    router: APIRouter, path: str, kind: Kind, memory: SharedMemory, settings: Settings
) -> None:
    region = f"{path}/region/{{name}}"

    @router.get(f"{path}/status", summary=f"The regions of {kind} shared memory.")
    @router.get(f"{region}/status", include_in_schema=False)
    async def status(request: Request, name: str = "") -> JSONResponse:
        return JSONResponse(await memory.status(context_of(request.scope).owner, kind, name))

    @router.post(f"{region}/register", summary=f"Register a region of {kind} shared memory.")
    async def register(name: str, request: Request) -> JSONResponse:
        body = await small_body(request, settings, _MAX_BODY_BYTES)
        info = _region(kind, name, strict_json.loads_object(body, "the request"))
        await memory.register(context_of(request.scope).owner, info)
        return JSONResponse({})

    @router.post(f"{path}/unregister", summary=f"Drop all regions of {kind} shared memory.")
    @router.post(f"{region}/unregister", include_in_schema=False)
    async def unregister(request: Request, name: str = "") -> JSONResponse:
        await memory.unregister(context_of(request.scope).owner, kind, name)
        return JSONResponse({})


def _region(kind: Kind, name: str, fields: dict[str, Any]) -> RegionInfo:
    size_bytes = size_of(fields.get("byte_size"), "byte_size")
    if kind == "cuda":
        known_keys(fields, ("raw_handle", "device_id", "byte_size"), "the request")
        device = size_of(fields.get("device_id"), "device_id")
        handle = _handle(fields.get("raw_handle"))
        return RegionInfo(name, "", 0, size_bytes, handle, device)
    known_keys(fields, ("key", "offset", "byte_size"), "the request")
    key = fields.get("key")
    if not isinstance(key, str):
        raise MalformedRequest(f"key: expected a string, got {shown(key)}")
    return RegionInfo(name, key, size_of(fields.get("offset", 0), "offset"), size_bytes)


def _handle(value: Any) -> bytes:
    text = value.get("b64") if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise MalformedRequest(f'raw_handle: expected {{"b64": "…"}}, got {shown(value)}')
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        raise MalformedRequest("raw_handle: b64 is not base64") from None
