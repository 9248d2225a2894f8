"""``/tensors``: put, get, delete and list tensors stored on the server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from convgrad.errors import MalformedRequest
from convgrad.wire import npy, safetensors
from convgrad.wire.json_tensors import encode_tensor
from convgrad.wire.shapes import data_view, dtype_of
from convgrad_service.engine.engine import call_hub
from convgrad_service.engine.execution import abandon
from convgrad_service.engine.memory.arena import Lease
from convgrad_service.engine.pipeline import Pipeline
from convgrad_service.engine.scheduling.quotas import Ticket
from convgrad_service.engine.shm.stored import TensorStore
from convgrad_service.http_api.body import Body
from convgrad_service.http_api.codecs import JSON, SAFETENSORS, described_tensor, parse_json_body
from convgrad_service.http_api.content_types import (
    choose_accepted,
    match_content_type,
    refuse_encoded,
)
from convgrad_service.http_api.middleware import context_of
from convgrad_service.http_api.numpy_files import NPY, npy_content_type, npy_dtype
from convgrad_service.http_api.transport import Chunk, seconds_in, send_chunks
from convgrad_service.problems.base import TensorSpec
from convgrad_service.server.settings import Settings

_MEDIA_TYPES = (JSON, SAFETENSORS, NPY)
_WHAT = "the tensor"


def stored_routes(pipeline: Pipeline, settings: Settings) -> list[BaseRoute]:
    """Return the routes."""

    async def listed(request: Request) -> Response:
        owner = context_of(request.scope).owner
        tensors = [
            {
                **_described(info.name, info.spec),
                "bytes": info.spec.size_bytes,
                "expires_in_s": round(info.expires_in_s, 3),
            }
            for info in await call_hub(pipeline.engine, TensorStore.list_tensors, owner)
        ]
        return JSONResponse({"tensors": tensors})

    one = _StoredTensor(pipeline, settings)
    return [
        Route("/tensors", listed, methods=["GET"], name="tensors"),
        # One route, so that a 405 names all methods.
        Route("/tensors/{name}", one, methods=["GET", "PUT", "DELETE"], name="tensor"),
    ]


class _StoredTensor:
    """An ASGI application that stores, sends or deletes the tensor that the path names."""

    def __init__(self, pipeline: Pipeline, settings: Settings) -> None:
        self._pipeline, self._engine, self._settings = pipeline, pipeline.engine, settings
        self._methods = {"GET": self._get, "PUT": self._put, "DELETE": self._delete}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = self._methods[scope["method"]]
        await method(Request(scope, receive), send)

    async def _delete(self, request: Request, send: Send) -> None:
        owner, name = context_of(request.scope).owner, request.path_params["name"]
        await call_hub(self._engine, TensorStore.drop, owner, name)
        await JSONResponse({})(request.scope, request.receive, send)

    async def _put(self, request: Request, send: Send) -> None:
        name, headers, context = (
            request.path_params["name"],
            request.headers,
            context_of(request.scope),
        )
        refuse_encoded(headers.get("content-encoding", ""))
        content_type = headers.get("content-type")
        media_type = match_content_type(content_type, _MEDIA_TYPES)
        lives_s = seconds_in(headers.get("x-time-to-live"), "X-Time-To-Live")
        settings = self._settings
        max_bytes = settings.max_json_bytes if media_type == JSON else settings.max_body_bytes
        body = Body(request.scope, request.receive, settings, max_bytes, self._engine)
        ticket = await self._engine.acquire_ticket(context.caller)
        try:
            if media_type == JSON:
                taken = self._from_json(body, ticket)
            else:
                taken = self._from_file(body, ticket, media_type, content_type or "")
            async with taken as (spec, lease):
                made = await call_hub(self._engine, TensorStore.allocate, {name: spec}, lives_s)
                try:
                    await call_hub(self._engine, TensorStore.write, made[name], lease.offset)
                    await call_hub(self._engine, TensorStore.commit, context.owner, made)
                except BaseException:
                    await abandon(self._engine, made)
                    raise
        finally:
            if ticket is not None:
                ticket.release()
        await JSONResponse(_described(name, spec))(request.scope, request.receive, send)

    @asynccontextmanager
    async def _from_file(
        self, body: Body, ticket: Ticket | None, media_type: str, content_type: str
    ) -> AsyncIterator[tuple[TensorSpec, Lease]]:
        """Receive a safetensors or .npy file straight into memory."""
        fortran_order = False
        if media_type == NPY:
            dtype = npy_dtype(content_type, _WHAT)
            head_bytes = npy.header_bytes(await body.peek(12), name=_WHAT)
            head = memoryview(await body.peek(head_bytes))[:head_bytes]
            found = npy.layout(head, name=_WHAT, dtype=dtype)
            spec, fortran_order = TensorSpec(found.shape, found.dtype), found.fortran_order
        else:
            head_bytes = safetensors.header_bytes(await body.peek(8))
            head = memoryview(await body.peek(head_bytes))[:head_bytes]
            tensors = safetensors.layout(head, None).tensors
            if len(tensors) != 1:
                raise MalformedRequest(
                    f"expected a body with exactly one tensor, got {len(tensors)} tensors"
                )
            (placed,) = tensors.values()
            spec = TensorSpec(placed.shape, placed.dtype)
        body.refuse_over_limit(head_bytes + spec.size_bytes)
        async with self._room(spec, ticket) as (lease, array):
            await body.read_into([data_view(array)], skip=head_bytes)
            if fortran_order:
                await self._pipeline.in_thread(lambda: _put_in_c_order(array), lease)
            yield spec, lease

    @asynccontextmanager
    async def _from_json(
        self, body: Body, ticket: Ticket | None
    ) -> AsyncIterator[tuple[TensorSpec, Lease]]:
        text = await body.read_all(self._engine)
        try:
            described, fill = described_tensor(parse_json_body(text.data), _WHAT)
            spec = TensorSpec(described.shape, dtype_of(described))
            async with self._room(spec, ticket) as (lease, array):
                await self._pipeline.in_thread(
                    lambda: np.copyto(array, described) if fill is None else fill(array),
                    lease,
                    text.lease,
                )
                text.release()
                yield spec, lease
        finally:
            text.release()

    @asynccontextmanager
    async def _room(
        self, spec: TensorSpec, ticket: Ticket | None
    ) -> AsyncIterator[tuple[Lease, NDArray[np.generic]]]:
        """Reserve memory for a tensor until it has been copied to the store."""
        if spec.size_bytes == 0:
            raise MalformedRequest(
                f"a tensor of shape {list(spec.shape)} is empty; expected at least one element"
            )
        if ticket is not None:
            await ticket.charge(spec.size_bytes)
        lease = await self._engine.reserve(spec.size_bytes)
        try:
            yield lease, self._engine.arena.array(lease.offset, spec)
        finally:
            lease.release()

    async def _get(self, request: Request, send: Send) -> None:
        name, in_thread = request.path_params["name"], self._pipeline.in_thread
        accept = ",".join(request.headers.getlist("accept"))
        media_type = choose_accepted(accept, _MEDIA_TYPES, SAFETENSORS)
        owner = context_of(request.scope).owner
        spec, part = (await call_hub(self._engine, TensorStore.find, owner, [name]))[name]
        lease = await self._engine.reserve(spec.size_bytes)
        try:
            await call_hub(self._engine, TensorStore.read, part, lease.offset)
            array = self._engine.arena.array(lease.offset, spec)
            chunks: list[Chunk]
            if media_type == SAFETENSORS:
                chunks = [*safetensors.encode({name: array}, {})]
            elif media_type == NPY:
                media_type, chunks = npy_content_type(array), [*npy.encode(array)]
            else:
                chunks = await in_thread(
                    lambda: [JSONResponse(encode_tensor(array, "npy")).body], lease
                )
            headers = [(b"content-type", media_type.encode()), (b"vary", b"accept")]
            await send_chunks(request.scope, send, headers, chunks, in_thread)
        finally:
            lease.release()


def _described(name: str, spec: TensorSpec) -> dict[str, object]:
    return {"name": name, "dtype": spec.dtype.value, "shape": list(spec.shape)}


def _put_in_c_order(array: NDArray[np.generic]) -> None:
    """Reorder elements that were sent in Fortran order."""
    as_it_came = array.reshape(array.shape[::-1])
    array[...] = as_it_came.T.copy()
