"""A call from its metadata to its answer: what surrounds all methods, and those that compute.

A failed call has the gRPC status of the error table, the error's sentence as details, and the
trailers ``convgrad-code`` and, if a retry makes sense, ``retry-after`` in seconds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import grpc

from convgrad.errors import CODES, DeadlineExceeded, Internal, ServiceError, UnsupportedProblem
from convgrad_service.engine.engine import Engine
from convgrad_service.engine.pipeline import Pipeline
from convgrad_service.engine.request import TRACE_HEADERS, Deadline, RequestContext, log_exchange
from convgrad_service.engine.request import access as _access
from convgrad_service.engine.telemetry.tracing import Traces
from convgrad_service.grpc_api.call import EOF, Call
from convgrad_service.grpc_api.infer_transport import InferTransport, Message
from convgrad_service.grpc_api.limits import Answers, Arrivals
from convgrad_service.grpc_api.wire import SERVICE, Part, encode_stream_error
from convgrad_service.oip.fields import SharedMemory
from convgrad_service.process import without_traceback
from convgrad_service.security.keys import KEY_REFUSALS, KeyRing, require_method
from convgrad_service.server.settings import Settings

__all__ = [
    "Exchanges",
    "InferMethods",
    "MethodHandlers",
]

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
Unary = Callable[[Call], Awaitable[bytes]]
Streaming = Callable[[Call], Awaitable[None]]
_UNKNOWN = "unknown"
"""The operation logged for a request that was refused before its message was read."""

# Requests of one stream in progress at once; no further one is read meanwhile.
_STREAM_AHEAD = 8


class Exchanges:
    """Wraps methods into grpcio handlers.

    A method reads its messages itself, so that limits are checked before a message is in memory.
    """

    def __init__(
        self, engine: Engine, settings: Settings, keys: KeyRing | None, traces: Traces | None
    ) -> None:
        self._engine, self._keys, self._traces = engine, keys, traces
        self.arrivals = Arrivals(settings)
        self.open_arrivals = Arrivals(settings, needs_key=False)
        self.answers = Answers(settings)

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
            asyncio.get_running_loop().call_soon(self.record, method, context)

    def trace(self, call: Call, context: RequestContext) -> None:
        """Set the client's address and trace context."""
        context.client = call.address
        named = {name: call.first(name) for name in TRACE_HEADERS}
        context.trace = {name: value for name, value in named.items() if value}
        if self._traces is not None:
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

    def record(self, method: str, context: RequestContext) -> None:
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
                "client.address": context.client,
                "rpc.request.size": context.received_bytes,
                "rpc.response.size": context.sent_bytes,
            }
            name = f"{SERVICE.full_name}/{method}"
            self._traces.end(context, name, attributes, failed=status in _SERVERS_FAULT)
        quiet = context.code == "ok" and method in _QUIET
        level = logging.DEBUG if quiet else logging.INFO
        if _access.isEnabledFor(level):
            log_exchange(level, context, {"method": method})


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


class InferMethods:
    """The methods that compute."""

    def __init__(
        self,
        pipeline: Pipeline,
        settings: Settings,
        exchanges: Exchanges,
        shared_memory: SharedMemory,
    ) -> None:
        self._settings, self._exchanges = settings, exchanges
        self._transport = partial(InferTransport, pipeline, shared_memory, exchanges.arrivals)

    async def infer(self, call: Call) -> bytes:
        """ModelInfer."""
        context, sent = call.context, b""
        deadline = Deadline.after(self._allowed_s(call))

        async def send(parts: list[Part]) -> None:
            nonlocal sent
            sent = await self._exchanges.answers.joined(call, parts)

        async def receive() -> bytes:
            context.operation = None
            return await self._exchanges.arrivals.message(call, deadline)

        context.operation = _UNKNOWN
        message = Message(receive=receive)
        await self._transport(context, deadline, message, send, in_stream=False).run()
        return sent

    async def stream(self, call: Call) -> None:
        """ModelStreamInfer: responses come in the order of the requests.

        The next request is received while one is computed. A request that fails gets a response
        with ``error_message``, and the stream goes on.
        """
        with self._exchanges.arrivals.stream(call):
            await self._answer_all(call)

    async def _answer_all(self, call: Call) -> None:
        slots, places = asyncio.Semaphore(_STREAM_AHEAD), self._exchanges.arrivals.streams
        running: set[asyncio.Task[None]] = set()
        previous: asyncio.Task[None] | None = None

        def done(task: asyncio.Task[None]) -> None:
            running.discard(task)
            slots.release()
            if not running:
                places.rest(call)

        try:
            while (body := await call.rpc.read()) is not EOF:
                places.work(call)
                self._exchanges.authenticate(call)
                await slots.acquire()
                message = Message(bytes(body))
                del body
                previous = asyncio.ensure_future(self._one_of_stream(call, message, previous))
                running.add(previous)
                previous.add_done_callback(done)
                await message.filled.wait()
            await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _one_of_stream(
        self, call: Call, message: Message, previous: asyncio.Task[None] | None
    ) -> None:
        context = call.begin()
        self._exchanges.trace(call, context)
        deadline = Deadline.after(self._allowed_s(call))
        began = False

        async def send(parts: list[Part]) -> None:
            nonlocal began
            if previous is not None:
                await asyncio.wait([previous])
            began = True
            counted = await self._exchanges.answers.counted(call, sum(map(len, parts)))
            try:
                # A cancelled write would leak its message in grpcio.
                writing = asyncio.ensure_future(call.rpc.write(b"".join(parts)))
                writing.add_done_callback(_retrieved)
                await asyncio.shield(writing)
            finally:
                counted.left()

        transport = self._transport(context, deadline, message, send, in_stream=True)
        try:
            _, error = await self._exchanges.attempt(
                "ModelStreamInfer", call, context, transport.run()
            )
            if error is not None and began:
                # Part of the answer has been sent, so only ending the stream can report the error.
                call.end_with(error)
            elif error is not None:
                message.filled.set()
                detail = f"{error.detail} ({error.code})"
                await send([encode_stream_error(message.model, message.id, detail)])
        finally:
            message.filled.set()
            self._exchanges.record("ModelStreamInfer", context)

    def _allowed_s(self, call: Call) -> float:
        return min(max(call.remaining_s, 0.0), self._settings.max_timeout_s)


def _retrieved(done: asyncio.Future[None]) -> None:
    """Mark an error as retrieved: whoever awaited it may be gone, and asyncio would log it."""
    if not done.cancelled():
        done.exception()
