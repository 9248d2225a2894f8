"""``POST /<operation>``: one endpoint for every operation of the contract."""

from __future__ import annotations

import contextlib
import math
from contextlib import AsyncExitStack

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from convgrad.contract import Operation
from convgrad_service.engine.deadline import Deadline
from convgrad_service.engine.pipeline import SMALL_BYTES, ComputeRequest, Pipeline
from convgrad_service.engine.scheduling.quotas import entered
from convgrad_service.http_api.body import Body, BodyLimits
from convgrad_service.http_api.codecs import CODECS, MEDIA_TYPES, Codec
from convgrad_service.http_api.connection import connection_of
from convgrad_service.http_api.context import context_of
from convgrad_service.http_api.negotiation import choose_accepted, match_content_type
from convgrad_service.http_api.response import (
    refuse_encoded,
    requested_timeout_s,
    send_chunks,
    unless_gone,
)
from convgrad_service.server.settings import Settings

__all__ = ["OperationEndpoint"]


class OperationEndpoint:
    """An ASGI application that answers requests for one operation."""

    def __init__(self, operation: Operation, pipeline: Pipeline, settings: Settings) -> None:
        self.operation = operation
        self.pipeline = pipeline
        self.settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = context_of(scope)
        context.operation = self.operation.name
        headers = Headers(scope=scope)
        wire_in, wire_out = _wires(headers)
        allowed_s = requested_timeout_s(headers.get("x-request-timeout"))
        longest_s = self.settings.max_timeout_s
        deadline = Deadline.after(min(allowed_s or math.inf, longest_s))
        connection = connection_of(scope)
        self.pipeline.admit()
        body = Body.of(scope, receive, self._limits(wire_in))
        call = ComputeRequest(
            self.operation, deadline, context.timings, wire_out.refuse, owner=context.owner
        )
        async with AsyncExitStack() as held:
            call.ticket = await held.enter_async_context(
                entered(self.pipeline.engine, context.caller)
            )
            # Only a client that set a deadline counts its own sending towards it.
            async with deadline.enforced() if allowed_s else contextlib.nullcontext():
                work = await held.enter_async_context(wire_in.begin(self.pipeline, call, body))
                if not allowed_s:
                    call.deadline = Deadline.after(longest_s)
                async with call.deadline.enforced():
                    computing = work.compute(streamed=wire_out.streams)
                    result = await unless_gone(computing, receive, connection)
            with context.timings.stage("encode"):
                small = sum(array.nbytes for array in result.outputs.values()) <= SMALL_BYTES
                chunks = await self.pipeline.in_thread(
                    lambda: wire_out.encode(result), work.lease, inline=small
                )
            await send_chunks(
                send,
                [(b"content-type", wire_out.media_type.encode()), (b"vary", b"accept")],
                chunks,
                connection=connection,
                in_thread=self.pipeline.in_thread,
                waiting=lambda coming: unless_gone(coming, receive, connection),
            )
            if result.progress is not None:
                await result.progress.end()

    def _limits(self, wire: Codec) -> BodyLimits:
        return BodyLimits(
            getattr(self.settings, wire.limit),
            self.settings.body_idle_timeout_s,
            self.settings.min_body_bytes_per_s,
        )


def _wires(headers: Headers) -> tuple[Codec, Codec]:
    refuse_encoded(headers.get("content-encoding"))
    came_in = match_content_type(headers.get("content-type"), MEDIA_TYPES)
    accept = ",".join(headers.getlist("accept"))
    return CODECS[came_in], CODECS[choose_accepted(accept, MEDIA_TYPES, came_in)]
