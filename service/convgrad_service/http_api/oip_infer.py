"""``POST /v2/models/<operation>/infer``: the Open Inference Protocol's way to compute over HTTP.

With ``Inference-Header-Content-Length`` that many bytes of JSON come first and the tensors' bytes
follow, each received straight into its place; without it the whole body is JSON.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from numpy.typing import NDArray
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from convgrad.errors import MalformedRequest
from convgrad.wire.shapes import data_view
from convgrad_service.engine.deadline import Deadline
from convgrad_service.engine.pipeline import SMALL_BYTES, ComputeRequest, Filler, Pipeline, Work
from convgrad_service.engine.scheduling.quotas import entered
from convgrad_service.http_api.body import Body, BodyLimits, Text
from convgrad_service.http_api.connection import connection_of
from convgrad_service.http_api.context import context_of
from convgrad_service.http_api.prepared_forms import remember
from convgrad_service.http_api.response import (
    refuse_encoded,
    requested_timeout_s,
    send_chunks,
    unless_gone,
)
from convgrad_service.oip.fields import described, operation_named, request_fields
from convgrad_service.oip.http_answer import HttpAnswer, encode_answer, refuse_in_json
from convgrad_service.oip.http_head import read_infer_head
from convgrad_service.oip.number_list import NumberList
from convgrad_service.oip.request import InferInput, InferRequest, Region, Span
from convgrad_service.oip.shared_memory import SharedMemory
from convgrad_service.server.settings import Settings

__all__ = ["InferEndpoint"]

_HEADER_LENGTH = "inference-header-content-length"
# The JSON before binary data is small, unless numbers stand in it after all.
_MAX_HEAD_BYTES = 4 * 2**20


class InferEndpoint:
    """An ASGI application that answers inference requests for the model that its path names."""

    def __init__(self, pipeline: Pipeline, settings: Settings, shared_memory: SharedMemory) -> None:
        self._pipeline = pipeline
        self._memory = shared_memory
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        named: Mapping[str, str] = scope["path_params"]
        operation = operation_named(named["model"], named.get("version", ""))
        context = context_of(scope)
        context.operation = operation.name
        headers = Headers(scope=scope)
        refuse_encoded(headers.get("content-encoding"))
        length = _content_length(headers)
        header_bytes = _header_bytes(headers, length)
        header_s = requested_timeout_s(headers.get("x-request-timeout"))
        longest_s = self._settings.max_timeout_s
        call = ComputeRequest(
            operation,
            Deadline.after(min(header_s or math.inf, longest_s)),
            context.timings,
            owner=context.owner,
        )
        self._pipeline.admit()
        body = Body.of(scope, receive, self._limits(header_bytes))
        async with AsyncExitStack() as held:
            call.ticket = await held.enter_async_context(
                entered(self._pipeline.engine, context.caller)
            )
            async with call.deadline.enforced() if header_s else contextlib.nullcontext():
                text = await self._text(call, body, header_bytes)
                held.callback(text.release)
                request = await self._request(call, text, length, header_bytes)
            # Only a client that set a deadline counts its own sending towards it.
            allowed_s = min(header_s or math.inf, request.timeout_s or math.inf)
            if math.isfinite(allowed_s):
                call.deadline = _from_the_start(call, min(allowed_s, longest_s))
            enforced = call.deadline.enforced() if math.isfinite(allowed_s) else None
            async with enforced or contextlib.nullcontext():
                work = await held.enter_async_context(
                    self._begin(call, request, body, text, _data_bytes(length, header_bytes))
                )
            if enforced is None:
                call.deadline = Deadline.after(longest_s)
            async with call.deadline.enforced():
                result = await unless_gone(work.compute(), receive)
            with context.timings.stage("encode"):
                answer = await self._pipeline.in_thread(
                    lambda: encode_answer(request, result.outputs, result.report),
                    work.lease,
                    inline=_is_quick(request, result.outputs),
                )
            await send_chunks(
                send,
                _answer_headers(answer),
                answer.chunks,
                connection=connection_of(scope),
                in_thread=self._pipeline.in_thread,
            )

    async def _text(self, call: ComputeRequest, body: Body, header_bytes: int | None) -> Text:
        """The request's JSON, and nothing of what follows it."""
        with call.timings.stage("receive"):
            if header_bytes is None:
                return await body.whole(self._pipeline.engine)
            if header_bytes > _MAX_HEAD_BYTES:
                raise MalformedRequest(
                    f"Inference-Header-Content-Length is {header_bytes:,}; at most "
                    f"{_MAX_HEAD_BYTES:,} bytes of JSON may stand before binary data"
                )
            shown = await body.at_least(header_bytes)
            if len(shown) < header_bytes:
                raise MalformedRequest(
                    f"Inference-Header-Content-Length is {header_bytes:,}, and the body has "
                    f"{len(shown):,} bytes"
                )
            return Text(memoryview(shown)[:header_bytes])

    async def _request(
        self, call: ComputeRequest, text: Text, length: int | None, header_bytes: int | None
    ) -> InferRequest:
        data_bytes = _data_bytes(length, header_bytes)
        with call.timings.stage("decode"):
            return await self._pipeline.in_thread(
                lambda: read_infer_head(text.data, call.operation, data_bytes),
                text.lease,
                inline=len(text.data) <= SMALL_BYTES,
            )

    @asynccontextmanager
    async def _begin(
        self,
        call: ComputeRequest,
        request: InferRequest,
        body: Body,
        text: Text,
        data_bytes: int | None,
    ) -> AsyncIterator[Work]:
        spans = [tensor for tensor in request.inputs if isinstance(tensor.source, Span)]
        body.refuse_over_limit(len(text.data) + sum(_span_bytes(tensor) for tensor in spans))
        call.refuse = lambda _, problem: refuse_in_json(request, problem)
        call.small = True  # shapes and parameters; the elements are filled in below
        remember(call, request, text.data, data_bytes)
        plane, regions = self._pipeline, self._memory.parts(call.owner, request)

        def decode() -> Mapping[str, Any]:
            return request_fields(request, described)

        async with plane.begin(call, decode, regions=regions) as work:
            with call.timings.stage("decode"):
                await work.fill(_numbers(request), holds=text.lease)
            if not body.ended or spans:
                targets = [
                    data_view(work.inputs[tensor.name])
                    if tensor.name in work.inputs
                    else _span_bytes(tensor)
                    for tensor in spans
                ]
                with call.timings.stage("receive"):
                    await body.into(targets, skip=len(text.data))
            text.release()
            yield work

    def _limits(self, header_bytes: int | None) -> BodyLimits:
        settings = self._settings
        return BodyLimits(
            settings.max_json_bytes if header_bytes is None else settings.max_body_bytes,
            settings.body_idle_timeout_s,
            settings.min_body_bytes_per_s,
        )


def _data_bytes(length: int | None, header_bytes: int | None) -> int | None:
    """How much follows the JSON; None where that is not known yet."""
    if header_bytes is None:
        return 0
    return None if length is None else length - header_bytes


def _content_length(headers: Headers) -> int | None:
    length = headers.get("content-length")
    return None if length is None else int(length)


def _header_bytes(headers: Headers, length: int | None) -> int | None:
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


def _from_the_start(call: ComputeRequest, allowed_s: float) -> Deadline:
    return Deadline(call.timings.started_s + allowed_s, allowed_s)


def _numbers(request: InferRequest) -> dict[str, NDArray[Any] | Filler]:
    """What fills the inputs whose elements stood in the JSON."""
    sources: dict[str, NDArray[Any] | Filler] = {}
    for tensor in request.inputs:
        if isinstance(tensor.source, NumberList):
            sources[tensor.name] = _filler(tensor, tensor.source)
        elif not isinstance(tensor.source, Span | Region):
            sources[tensor.name] = tensor.source
    return sources


def _filler(tensor: InferInput, numbers: NumberList) -> Filler:
    return lambda target: numbers.fill(target, tensor.dtype, name=tensor.name)


def _span_bytes(tensor: InferInput) -> int:
    return tensor.source.size_bytes if isinstance(tensor.source, Span) else 0


def _is_quick(request: InferRequest, outputs: Mapping[str, NDArray[Any]]) -> bool:
    """Whether no more than a few numbers are to be spelt out."""
    spelt = [
        array.nbytes
        for name, array in outputs.items()
        if request.sends(name) and not request.wants_binary(name)
    ]
    return sum(spelt) <= SMALL_BYTES


def _answer_headers(answer: HttpAnswer) -> list[tuple[bytes, bytes]]:
    if answer.header_bytes is None:
        return [(b"content-type", b"application/json")]
    return [
        (b"content-type", b"application/octet-stream"),
        (_HEADER_LENGTH.encode(), str(answer.header_bytes).encode()),
    ]
