"""``/tensors``: put, get, delete and list tensors stored on the server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

import numpy as np
from numpy.typing import NDArray
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from convgrad.dtypes import DType
from convgrad.errors import MalformedRequest
from convgrad.wire import npy, safetensors
from convgrad.wire.json_tensors import encode_tensor
from convgrad.wire.shapes import data_view, dtype_of
from convgrad_service.engine.execution import abandon
from convgrad_service.engine.hub import call_hub
from convgrad_service.engine.memory.lease import Lease, leased
from convgrad_service.engine.pipeline import Pipeline
from convgrad_service.engine.scheduling.quotas import Ticket, acquired
from convgrad_service.engine.shm.stored import TensorStore
from convgrad_service.http_api.body import Body, BodyLimits
from convgrad_service.http_api.codecs import JSON, NPY, SAFETENSORS, npy_content_type
from convgrad_service.http_api.context import connection_of, context_of
from convgrad_service.http_api.json_forms import described_tensor, parse_json_body
from convgrad_service.http_api.multipart_body import npy_dtype
from convgrad_service.http_api.negotiation import choose_accepted, match_content_type
from convgrad_service.http_api.response import Chunk, refuse_encoded, seconds_in, send_chunks
from convgrad_service.problems.base import TensorSpec
from convgrad_service.server.settings import Settings

__all__ = ["stored_routes"]

_MEDIA_TYPES = (JSON, SAFETENSORS, NPY)
_Reader = Callable[[Body, Ticket | None], AbstractAsyncContextManager[tuple[TensorSpec, Lease]]]


def stored_routes(pipeline: Pipeline, settings: Settings) -> list[BaseRoute]:
    """Return the routes."""

    async def listed(request: Request) -> Response:
        owner = context_of(request.scope).owner
        tensors = [
            {
                "name": info.name,
                "dtype": info.spec.dtype.value,
                "shape": list(info.spec.shape),
                "bytes": info.spec.size_bytes,
                "expires_in_s": round(info.expires_in_s, 3),
            }
            for info in await call_hub(pipeline.engine, TensorStore.list_tensors, owner)
        ]
        return JSONResponse({"tensors": tensors})

    async def drop(request: Request) -> Response:
        owner = context_of(request.scope).owner
        await call_hub(pipeline.engine, TensorStore.drop, owner, request.path_params["name"])
        return JSONResponse({})

    one = "/tensors/{name}"
    return [
        Route("/tensors", listed, methods=["GET"], name="tensors"),
        Route(one, drop, methods=["DELETE"], name="drop"),
        Route(one, _Put(pipeline, settings), methods=["PUT"], name="put"),
        Route(one, _Get(pipeline), methods=["GET"], name="get"),
    ]


class _Put:
    """An ASGI application that stores the tensor in a body."""

    def __init__(self, pipeline: Pipeline, settings: Settings) -> None:
        self._pipeline, self._settings = pipeline, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = scope["path_params"]["name"]
        headers = Headers(scope=scope)
        refuse_encoded(headers.get("content-encoding"))
        content_type = headers.get("content-type")
        media_type = match_content_type(content_type, _MEDIA_TYPES)
        lives_s = seconds_in(headers.get("x-time-to-live"), "X-Time-To-Live")
        settings = self._settings
        max_bytes = settings.max_json_bytes if media_type == JSON else settings.max_body_bytes
        limits = BodyLimits.of(settings, max_bytes, self._pipeline.engine)
        length = headers.get("content-length")
        body = Body.of(scope, receive, limits, None if length is None else int(length))
        engine = self._pipeline.engine
        readers: Mapping[str, _Reader] = {
            JSON: self._from_json,
            SAFETENSORS: self._from_safetensors,
            NPY: partial(self._from_npy, dtype=npy_dtype(content_type or "", "the tensor")),
        }
        taken = readers[media_type]
        caller = context_of(scope).caller
        async with (
            acquired(engine, caller) as ticket,
            taken(body, ticket) as (spec, lease),
        ):
            made = await call_hub(engine, TensorStore.allocate, {name: spec}, lives_s)
            try:
                await call_hub(engine, TensorStore.write, made[name], lease.offset)
                await call_hub(engine, TensorStore.commit, context_of(scope).owner, made)
            except BaseException:
                await abandon(engine, made)
                raise
        stored = {"name": name, "dtype": spec.dtype.value, "shape": list(spec.shape)}
        await JSONResponse(stored)(scope, receive, send)

    @asynccontextmanager
    async def _from_safetensors(
        self, body: Body, ticket: Ticket | None
    ) -> AsyncIterator[tuple[TensorSpec, Lease]]:
        data_offset = safetensors.header_bytes(await body.at_least(8))
        head = memoryview(await body.at_least(data_offset))[:data_offset]
        layout = safetensors.layout(head, None)
        if len(layout.tensors) != 1:
            raise MalformedRequest(
                f"expected a body with exactly one tensor, got {len(layout.tensors)} tensors"
            )
        body.refuse_over_limit(data_offset + layout.data_bytes)
        (placed,) = layout.tensors.values()
        async with self._room(TensorSpec(placed.shape, placed.dtype), ticket) as (lease, array):
            await body.into([data_view(array)], skip=data_offset)
            yield TensorSpec(placed.shape, placed.dtype), lease

    @asynccontextmanager
    async def _from_npy(
        self, body: Body, ticket: Ticket | None, dtype: DType | None
    ) -> AsyncIterator[tuple[TensorSpec, Lease]]:
        data_offset = npy.header_bytes(await body.at_least(12), name="the tensor")
        head = memoryview(await body.at_least(data_offset))[:data_offset]
        found = npy.layout(head, name="the tensor", dtype=dtype)
        spec = TensorSpec(found.shape, found.dtype)
        body.refuse_over_limit(data_offset + spec.size_bytes)
        async with self._room(spec, ticket) as (lease, array):
            await body.into([data_view(array)], skip=data_offset)
            if found.fortran_order:
                await self._pipeline.in_thread(lambda: _put_in_c_order(array), lease)
            yield spec, lease

    @asynccontextmanager
    async def _from_json(
        self, body: Body, ticket: Ticket | None
    ) -> AsyncIterator[tuple[TensorSpec, Lease]]:
        text = await body.whole(self._pipeline.engine)
        try:
            described, fill = described_tensor(parse_json_body(text.data), "the tensor")
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
        engine = self._pipeline.engine
        lease = await leased(engine.reserve(spec.size_bytes))
        try:
            yield lease, engine.arena.array(lease.offset, spec)
        finally:
            lease.release()


class _Get:
    """An ASGI application that answers with a stored tensor."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name, plane = scope["path_params"]["name"], self._pipeline
        accept = ",".join(Headers(scope=scope).getlist("accept"))
        media_type = choose_accepted(accept, _MEDIA_TYPES, SAFETENSORS)
        owner = context_of(scope).owner
        spec, part = (await call_hub(plane.engine, TensorStore.find, owner, [name]))[name]
        lease = await leased(plane.engine.reserve(spec.size_bytes))
        try:
            await call_hub(plane.engine, TensorStore.read, part, lease.offset)
            array = plane.engine.arena.array(lease.offset, spec)
            chunks: list[Chunk]
            if media_type == SAFETENSORS:
                chunks = [*safetensors.encode({name: array}, {})]
            elif media_type == NPY:
                media_type, chunks = npy_content_type(array), [*npy.encode(array)]
            else:
                chunks = await plane.in_thread(lambda: _as_json(array), lease)
            await send_chunks(
                send,
                [(b"content-type", media_type.encode()), (b"vary", b"accept")],
                chunks,
                connection=connection_of(scope),
                in_thread=plane.in_thread,
            )
        finally:
            lease.release()


def _put_in_c_order(array: NDArray[np.generic]) -> None:
    """Reorder elements that were sent in Fortran order."""
    as_it_came = array.reshape(array.shape[::-1])
    array[...] = as_it_came.T.copy()


def _as_json(array: NDArray[np.generic]) -> list[Chunk]:
    return [JSONResponse(encode_tensor(array, "npy")).body]
