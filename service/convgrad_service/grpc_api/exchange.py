"""Around every call: its id and timings in the trailers, errors as status and code, log, metrics.

A failed call has the gRPC status of the error table, its sentence as details, and the trailers
``convgrad-code`` and, where it makes sense to come again, ``retry-after`` in seconds.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

from convgrad.errors import Internal, ServiceError
from convgrad_service.engine.hub import Engine
from convgrad_service.engine.telemetry.record import Record
from convgrad_service.engine.telemetry.request_context import TRACE_HEADERS, RequestContext
from convgrad_service.engine.telemetry.tracing import Traces
from convgrad_service.grpc_api.call import OK, Call
from convgrad_service.grpc_api.http2.stream import StreamGone
from convgrad_service.security.keys import KeyRing

__all__ = ["Exchanges", "status_of"]

_log = logging.getLogger("convgrad.grpc")
_access = logging.getLogger("convgrad.access")

# Asked every few seconds, by machines.
# What a platform asks has no key.
_OPEN = frozenset({"ServerLive", "ServerReady", "Check", "Watch"})
_QUIET = frozenset({"ServerLive", "ServerReady", "ModelReady"})
_REQUEST_ID, _SERVER_TIMING = "x-request-id", "server-timing"
_CODE, _RETRY_AFTER = "convgrad-code", "retry-after"

T = TypeVar("T")


def status_of(error: ServiceError) -> str:
    """The status of the error's row; an error that HTTP alone can make would be a fault of ours."""
    return error.row.grpc_status or "INTERNAL"


def _ending(
    context: RequestContext, error: ServiceError | None
) -> tuple[str, str, list[tuple[str, str]]]:
    """Status, details and trailers of a call."""
    trailers = [(_REQUEST_ID, context.request_id), (_SERVER_TIMING, context.server_timing())]
    if error is None:
        return OK, "", trailers
    trailers.append((_CODE, error.code))
    if error.retry_after_s is not None:
        trailers.append((_RETRY_AFTER, str(max(1, math.ceil(error.retry_after_s)))))
    return status_of(error), error.detail, trailers


class Exchanges:
    """Runs the calls of one server."""

    def __init__(
        self, engine: Engine, keys: KeyRing | None = None, traces: Traces | None = None
    ) -> None:
        self._engine = engine
        self._keys = keys
        self._traces = traces

    async def run(
        self, method: str, call: Call, work: Callable[[RequestContext], Awaitable[None]]
    ) -> None:
        """Do ``work``, which sends its answer; end the call with its status."""
        context = self.begin(call)

        async def allowed(context: RequestContext) -> None:
            if self._keys is not None and method not in _OPEN:
                call.caller = context.caller = self._keys.caller(call.first("authorization"))
            await work(context)

        # Recorded once the answer has left: the caller need not wait for that.
        try:
            _, error = await self.attempt(method, context, allowed)
            await call.finish(*_ending(context, error))
        finally:
            self.record(method, context)

    def begin(self, call: Call) -> RequestContext:
        """The context of a call, under the id that its metadata gives, and of whose it is."""
        context = RequestContext.begin(call.metadata(_REQUEST_ID))
        context.caller = call.caller
        if self._traces is not None:
            named = {name: call.first(name) for name in TRACE_HEADERS}
            context.trace = {name: value for name, value in named.items() if value}
        return context

    async def attempt(
        self, method: str, context: RequestContext, work: Callable[[RequestContext], Awaitable[T]]
    ) -> tuple[T | None, ServiceError | None]:
        """The result of ``work``, or what it failed with as the caller may know it."""
        try:
            return await work(context), None
        except ServiceError as error:
            context.code = error.code
            return None, error
        except (asyncio.CancelledError, StreamGone):
            # The client went away: nobody is left to be told.
            context.code = "client-gone"
            raise
        # Whatever went wrong, the caller gets an id and the log gets the rest.
        except Exception:  # noqa: BLE001
            _log.exception("request_id=%s %s failed", context.request_id, method)
            context.code = Internal.code
            return None, Internal(
                f"an internal error; the server's log has it under request {context.request_id}"
            )

    def record(self, method: str, context: RequestContext) -> None:
        """Log and count a call that has ended."""
        if context.operation is not None:
            self._engine.observe(
                Record(
                    context.operation,
                    "grpc",
                    context.code,
                    context.timings.total_s,
                    context.timings.stages_s,
                    context.received_bytes,
                    context.sent_bytes,
                    flops=context.timings.flops,
                    compulsory_bytes=context.timings.compulsory_bytes,
                    key=context.owner,
                )
            )
        if self._traces is not None:
            self._traces.record(context, "grpc")
        quiet = context.code == "ok" and method in _QUIET
        level = logging.DEBUG if quiet else logging.INFO
        if not _access.isEnabledFor(level):
            return
        stages = "".join(
            f" {name}_s={seconds:.6f}" for name, seconds in context.timings.stages_s.items()
        )
        _access.log(
            level,
            'request_id="%s" %smethod=%s code=%s received_bytes=%d sent_bytes=%d total_s=%.6f%s',
            context.request_id.replace('"', "'"),
            f"key={context.owner} " if context.owner else "",
            method,
            context.code,
            context.received_bytes,
            context.sent_bytes,
            context.timings.total_s,
            stages,
        )
