"""``POST /<operation>``: one endpoint for every operation of the contract."""

from __future__ import annotations

import math

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from convgrad.contract import Operation
from convgrad_service.engine.dataplane import Call, Dataplane
from convgrad_service.engine.deadline import Deadline
from convgrad_service.http_api.answering import (
    refuse_encoded,
    requested_timeout_s,
    send_chunks,
    unless_gone,
)
from convgrad_service.http_api.body import BodyLimits, read_body
from convgrad_service.http_api.context import context_of
from convgrad_service.http_api.negotiation import choose_accepted, match_content_type
from convgrad_service.http_api.wires import MEDIA_TYPES, WIRES, Wire
from convgrad_service.settings import Settings

__all__ = ["OperationEndpoint"]


class OperationEndpoint:
    """An ASGI application that answers requests for one operation."""

    def __init__(self, operation: Operation, dataplane: Dataplane, settings: Settings) -> None:
        self.operation = operation
        self.dataplane = dataplane
        self.settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = context_of(scope)
        context.operation = self.operation.name
        headers = Headers(scope=scope)
        wire_in, wire_out = _wires(headers)
        allowed_s = requested_timeout_s(headers.get("x-request-timeout"))
        deadline = Deadline.after(min(allowed_s or math.inf, self.settings.max_timeout_s))
        self.dataplane.admit()
        with self.dataplane.memory.reservation() as reservation:
            length = headers.get("content-length")
            reading = read_body(
                receive, None if length is None else int(length), self._limits(wire_in), reservation
            )
            with context.timings.stage("receive"):
                if allowed_s is None:
                    # Only a client that set a deadline counts its own sending towards it.
                    body = await reading
                    deadline = Deadline.after(self.settings.max_timeout_s)
                else:
                    async with deadline.enforced():
                        body = await reading
            call = Call(
                self.operation,
                reservation,
                deadline,
                context.timings,
                decoded_bytes=math.ceil(wire_in.decoded_share * len(body)),
                encoded_share=wire_out.encoded_share,
                refuse=wire_out.refuse,
            )
            # Handed over, not shared: a JSON body can go once its arrays have been made from it.
            handed = [body]
            del body
            work = self.dataplane.answer(
                call, lambda: wire_in.decode(handed.pop(), self.operation), wire_out.encode
            )
            chunks = await unless_gone(work, receive)
            headers_out = [(b"content-type", wire_out.media_type.encode()), (b"vary", b"accept")]
            await send_chunks(send, headers_out, chunks)

    def _limits(self, wire: Wire) -> BodyLimits:
        return BodyLimits(
            getattr(self.settings, wire.limit),
            self.settings.body_idle_timeout_s,
            self.settings.min_body_bytes_per_s,
        )


def _wires(headers: Headers) -> tuple[Wire, Wire]:
    refuse_encoded(headers.get("content-encoding"))
    came_in = match_content_type(headers.get("content-type"), MEDIA_TYPES)
    accept = ",".join(headers.getlist("accept"))
    return WIRES[came_in], WIRES[choose_accepted(accept, MEDIA_TYPES, came_in)]
