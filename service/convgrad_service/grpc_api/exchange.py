"""A call, and what surrounds every method: key, errors, trailers, log, metrics.

A failed call has the gRPC status of the error table, the error's sentence as details, and the
trailers ``convgrad-code`` and, if a retry makes sense, ``retry-after`` in seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import math
import os
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

import grpc

from convgrad.errors import CODES, DeadlineExceeded, Internal, ServiceError, UnsupportedProblem
from convgrad_service.engine.engine import Engine
from convgrad_service.engine.scheduling.quotas import ANYBODY
from convgrad_service.engine.telemetry.record import (
    TRACE_HEADERS,
    ExchangeLine,
    RequestContext,
    access,
)
from convgrad_service.engine.telemetry.tracing import Traces
from convgrad_service.grpc_api.wire import SERVICE
from convgrad_service.process import without_traceback
from convgrad_service.security.keys import KEY_REFUSALS, KeyRing, require_method

_log = logging.getLogger("convgrad.grpc")
# Health checks need no key.
_OPEN = frozenset({"ServerLive", "ServerReady", "Check", "Watch"})
# Polled by machines, so logged at debug level.
_QUIET = frozenset({"ServerLive", "ServerReady", "ModelReady"})
# OpenTelemetry's semantic conventions; other statuses are the caller's fault.
_SERVERS_FAULT = frozenset(
    grpc.StatusCode[name]
    for name in ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE")
)
T = TypeVar("T")

EOF = grpc.aio.EOF
"""What ``read`` returns after the last message."""

Trailers = tuple[tuple[str, str], ...]

_REQUEST_ID, _SERVER_TIMING = "x-request-id", "server-timing"
_CODE, _RETRY_AFTER = "convgrad-code", "retry-after"


def status_of(error: ServiceError) -> grpc.StatusCode:
    """Return the gRPC status of an error; INTERNAL for errors that only HTTP can have."""
    return grpc.StatusCode[error.row.grpc_status or "INTERNAL"]


class Call:
    """A call whose metadata has arrived; ``rpc`` is grpcio's servicer context."""

    def __init__(self, rpc: Any) -> None:
        self.rpc = rpc
        self.caller = ANYBODY
        self.ended_by: ServiceError | None = None
        self._metadata = rpc.invocation_metadata()
        # Read now: once a call has ended, grpcio crashes the process when it is asked.
        self.peer: str = rpc.peer()
        """The connection's remote end, such as ``ipv4:127.0.0.1:40000``."""
        self._aborting: asyncio.Task[None] | None = None
        self.context = RequestContext.begin(self.metadata(_REQUEST_ID))

    def metadata(self, name: str) -> list[str]:
        """Return all values of a metadata key."""
        return [value for key, value in self._metadata if key == name]

    def first(self, name: str) -> str:
        """Return the first value of a metadata key, or ""."""
        return next((value for key, value in self._metadata if key == name), "")

    @property
    def trace_headers(self) -> dict[str, str]:
        """The W3C trace context."""
        named = {name: self.first(name) for name in TRACE_HEADERS}
        return {name: value for name, value in named.items() if value}

    def begin(self) -> RequestContext:
        """Return a context for one request of a stream, with the client's request id if given."""
        context = RequestContext.begin(self.metadata(_REQUEST_ID))
        context.caller = self.caller
        return context

    @property
    def remaining_s(self) -> float:
        """Seconds until the caller's deadline; infinite without one."""
        remaining_s: float | None = self.rpc.time_remaining()
        return math.inf if remaining_s is None else remaining_s

    @property
    def address(self) -> str:
        """The client's IP address."""
        return unquote(self.peer).partition(":")[2].rpartition(":")[0].strip("[]")

    @property
    def client(self) -> str:
        """Who shares limits with other clients: the owner of the API key, or the IP address."""
        return self.caller.name or self.address

    def trailers(self, error: ServiceError | None = None) -> Trailers:
        """Return the trailing metadata."""
        found = [
            (_REQUEST_ID, self.context.request_id),
            (_SERVER_TIMING, self.context.server_timing()),
        ]
        if (span := self.context.traceresponse) is not None:
            found.append(("traceresponse", span))
        if error is not None:
            found.append((_CODE, error.code))
            if error.retry_after_s is not None:
                found.append((_RETRY_AFTER, str(max(1, math.ceil(error.retry_after_s)))))
        return tuple(found)

    async def fail(self, error: ServiceError) -> None:
        """End the call with an error.

        Raises
        ------
        grpc.aio.AbortError
            Always, which ends the handler too.
        """
        await self.rpc.abort(status_of(error), error.detail, self.trailers(error))

    def end_with(self, error: ServiceError) -> None:
        """End the call from outside its handler, whose pending read then raises AbortError.

        The handler is not cancelled, because grpcio would leak a message that arrives just then.
        """
        if self.ended_by is not None or self.rpc.done():
            return
        self.ended_by = error

        async def abort() -> None:
            # UsageError: the handler has just ended it with an error of its own.
            ended = (grpc.aio.AbortError, grpc.aio.InternalError, grpc.aio.UsageError)
            with contextlib.suppress(*ended):
                await self.fail(error)

        self._aborting = asyncio.ensure_future(abort())

    def disconnect(self) -> None:
        """Shut down the call's socket: grpcio cannot end a call whose answer waits to be read."""
        _log.warning("%s does not read its answers and is disconnected", self.peer)
        for entry in Path("/proc/self/fd").iterdir():
            # Descriptors may close meanwhile, and not all sockets have a peer.
            with contextlib.suppress(OSError, ValueError, IndexError):
                if not str(entry.readlink()).startswith("socket:"):
                    continue
                with socket.socket(fileno=os.dup(int(entry.name))) as found:
                    if _shown(found.getpeername()) == unquote(self.peer):
                        found.shutdown(socket.SHUT_RDWR)


def _shown(address: Sequence[Any]) -> str:
    """Format a socket address as grpcio does."""
    host = ipaddress.ip_address(address[0])
    if isinstance(host, ipaddress.IPv6Address) and host.ipv4_mapped is not None:
        host = host.ipv4_mapped
    port = address[1]
    return f"ipv4:{host}:{port}" if host.version == 4 else f"ipv6:[{host}]:{port}"


Unary = Callable[[Call], Awaitable[bytes]]
Streaming = Callable[[Call], Awaitable[None]]


class Exchanges:
    """Wraps methods into grpcio handlers.

    A method reads its messages itself, so that limits are checked before a message is in memory.
    """

    def __init__(self, engine: Engine, keys: KeyRing | None, traces: Traces | None) -> None:
        self._engine, self._keys, self._traces = engine, keys, traces

    def unary(self, method: str, work: Unary) -> grpc.RpcMethodHandler:
        """Return the handler of a method for which ``work`` returns the one response."""

        async def serve(_: object, rpc: Any) -> bytes:
            return await self._run(method, Call(rpc), work)

        return grpc.stream_unary_rpc_method_handler(serve)

    def streaming(self, method: str, work: Streaming) -> grpc.RpcMethodHandler:
        """Return the handler of a method for which ``work`` writes the responses."""

        async def serve(_: object, rpc: Any) -> None:
            await self._run(method, Call(rpc), work)

        return grpc.stream_stream_rpc_method_handler(serve)

    async def _run(self, method: str, call: Call, work: Callable[[Call], Awaitable[T]]) -> T:
        context = call.context
        self.trace(call, context)

        async def allowed() -> T:
            if self._keys is not None and method not in _OPEN:
                self.authenticate(call)
                require_method(call.caller, method)
            return await work(call)

        # Recorded after the answer has been sent, so that the caller does not wait for it.
        try:
            answer, error = await self.attempt(method, call, context, allowed())
            if error is not None:
                await call.fail(error)
            call.rpc.set_trailing_metadata(call.trailers())
            return answer  # type: ignore[return-value]
        finally:
            asyncio.get_running_loop().call_soon(self.record, method, call, context)

    def trace(self, call: Call, context: RequestContext) -> None:
        """Begin the span of a request, if requests are traced."""
        if self._traces is not None:
            context.trace = call.trace_headers
            self._traces.begin(context)

    def authenticate(self, call: Call) -> None:
        """Identify the caller by its key. Streams repeat this, since a key may be revoked.

        Raises
        ------
        Unauthenticated
            A key is required, and the call has none that this server knows.
        """
        if self._keys is not None:
            call.caller = call.context.caller = self._keys.caller(call.first("authorization"))

    async def attempt(
        self, method: str, call: Call, context: RequestContext, work: Awaitable[T]
    ) -> tuple[T | None, ServiceError | None]:
        """Return the result of ``work``, or the error to report to the caller."""
        try:
            return await work, None
        except ServiceError as error:
            context.code = error.code
            return None, without_traceback(error)
        except grpc.aio.AbortError:
            # Already ended by `Call.end_with`, or by another request of its stream.
            context.code = Internal.code if call.ended_by is None else call.ended_by.code
            raise
        except (asyncio.CancelledError, grpc.aio.InternalError):
            # The client has gone, or its deadline has passed, which grpcio reports itself.
            context.code = "client-gone" if call.remaining_s > 0 else DeadlineExceeded.code
            raise
        # The caller learns only the request id; the log has the rest.
        except Exception:  # noqa: BLE001
            _log.exception("request_id=%s %s failed", context.request_id, method)
            context.code = Internal.code
            return None, Internal(
                f"an internal error; the server's log has it under request {context.request_id}"
            )

    def record(self, method: str, call: Call, context: RequestContext) -> None:
        """Log and count a call that has ended."""
        if context.operation is not None or context.code in KEY_REFUSALS:
            self._engine.observe(context.record("grpc"))
        if self._traces is not None:
            status = _status(context.code)
            attributes = {
                "rpc.system": "grpc",
                "rpc.service": SERVICE.full_name,
                "rpc.method": method,
                "rpc.grpc.status_code": status.value[0],
                "client.address": call.address,
                "rpc.request.size": context.received_bytes,
                "rpc.response.size": context.sent_bytes,
            }
            name = f"{SERVICE.full_name}/{method}"
            self._traces.end(context, name, attributes, failed=status in _SERVERS_FAULT)
        quiet = context.code == "ok" and method in _QUIET
        level = logging.DEBUG if quiet else logging.INFO
        if access.isEnabledFor(level):
            context.client, context.trace = call.address, call.trace_headers
            access.log(level, ExchangeLine(context, {"method": method}))


def _status(code: str) -> grpc.StatusCode:
    """Return the status of a call that ended with this code."""
    if code == "ok":
        return grpc.StatusCode.OK
    row = CODES.get(code)
    return (
        grpc.StatusCode.CANCELLED if row is None else grpc.StatusCode[row.grpc_status or "INTERNAL"]
    )


class MethodHandlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Handlers by method name, and one for all other names."""

    def __init__(self, handlers: Mapping[str, grpc.RpcMethodHandler], exchanges: Exchanges) -> None:
        self._handlers = handlers
        self._other = exchanges.unary("unknown", _no_such_method)

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        """See `grpc.GenericRpcHandler`."""
        return self._handlers.get(details.method, self._other)


async def _no_such_method(_: Call) -> bytes:
    raise UnsupportedProblem("this server has no such method")
