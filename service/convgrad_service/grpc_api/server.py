"""The gRPC server: the protocol's service, health checking and reflection on one port.

In production it has a process of its own, so that a large message on its way in keeps nobody else
waiting.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from convgrad.errors import UnsupportedProblem
from convgrad_service.engine.pipeline import Pipeline
from convgrad_service.engine.telemetry.request_context import RequestContext
from convgrad_service.engine.telemetry.tracing import traces_to
from convgrad_service.grpc_api.call import Call
from convgrad_service.grpc_api.exchange import Exchanges
from convgrad_service.grpc_api.health import HealthMethods
from convgrad_service.grpc_api.http2.connection import Http2Connection
from convgrad_service.grpc_api.http2.limits import Limits, Patience
from convgrad_service.grpc_api.http2.stream import Stream, StreamGone
from convgrad_service.grpc_api.infer import InferMethods
from convgrad_service.grpc_api.messages import SERVICE, message
from convgrad_service.grpc_api.receiving import received
from convgrad_service.grpc_api.reflection import ReflectionMethods
from convgrad_service.grpc_api.service import DescribingMethods
from convgrad_service.oip.registered_memory import shared_memory_of
from convgrad_service.security.keys import KeyRing
from convgrad_service.server.settings import Settings
from convgrad_service.server.tls import server_context

__all__ = ["GrpcServer"]

_log = logging.getLogger("convgrad.grpc")

# Calls that one connection may have open; gRPC's clients wait with more.
_MAX_STREAMS = 256
_READ_BYTES = 256 * 1024
_BACKLOG = 1024
_CLOSING_S, _LAST_S = 0.02, 1.0

Handler = Callable[[Call], Awaitable[None]]


class GrpcServer:
    """Serves a dataplane over gRPC on the running event loop, from `start` to `stop`."""

    def __init__(self, pipeline: Pipeline, settings: Settings) -> None:
        self._settings = settings
        keys = KeyRing(settings.api_keys, settings.key_limits) if settings.api_keys else None
        self._traces = traces_to(settings.otlp_endpoint) if settings.otlp_endpoint else None
        self._exchanges = Exchanges(pipeline.engine, keys, self._traces)
        memory = shared_memory_of(
            pipeline.engine,
            system=settings.system_shared_memory,
            cuda=settings.cuda_shared_memory,
        )
        infer = InferMethods(pipeline, settings, self._exchanges, memory)
        describing = DescribingMethods(pipeline, memory)
        health = HealthMethods(pipeline, self._exchanges)
        reflection = ReflectionMethods(self._exchanges)
        self._handlers: Mapping[str, Handler] = {
            **{
                f"/{SERVICE.full_name}/{name}": self._unary(name, method)
                for name, method in describing.methods.items()
            },
            f"/{SERVICE.full_name}/ModelInfer": infer.infer,
            f"/{SERVICE.full_name}/ModelStreamInfer": infer.stream,
            **health.handlers,
            **reflection.handlers,
        }
        self._connections: set[Http2Connection] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> int:
        """Listen on the settings' host and gRPC port; the real port.

        Raises
        ------
        OSError
            It cannot listen there.
        """
        settings = self._settings
        limits = Limits(
            Patience(
                settings.body_idle_timeout_s,
                settings.min_body_bytes_per_s,
                settings.answer_idle_timeout_s,
            ),
            max_header_bytes=settings.max_header_bytes,
            max_connections=settings.max_connections,
            max_streams=_MAX_STREAMS,
            header_timeout_s=settings.header_timeout_s,
            ping_interval_s=settings.body_idle_timeout_s,
        )
        loop = asyncio.get_running_loop()
        scratch = memoryview(bytearray(_READ_BYTES))
        tls = server_context(settings, "h2")
        self._server = await loop.create_server(
            lambda: Http2Connection(self._serve, limits, self._connections, scratch),
            settings.http_host,
            settings.grpc_port,
            family=socket.AF_UNSPEC,
            ssl=tls,
            ssl_handshake_timeout=settings.header_timeout_s if tls else None,
            backlog=_BACKLOG,
        )
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def stop(self, grace_s: float) -> None:
        """Take no more calls, and end those that are still in work after ``grace_s``."""
        if self._server is None:
            return
        self._server.close()
        for connection in list(self._connections):
            connection.drain()
        loop = asyncio.get_running_loop()
        until_s = loop.time() + grace_s
        while any(not connection.idle for connection in self._connections):
            if loop.time() > until_s:
                break
            await asyncio.sleep(_CLOSING_S)
        for connection in list(self._connections):
            connection.close()
        if self._traces is not None:
            self._traces.close()
        # Their transports end in their own time.
        while self._connections and loop.time() < until_s + _LAST_S:  # noqa: ASYNC110
            await asyncio.sleep(_CLOSING_S)
        for connection in list(self._connections):
            connection.abort()
        await asyncio.sleep(0)

    async def _serve(self, stream: Stream) -> None:
        """Answer one stream."""
        call = Call(stream, int(self._settings.max_body_bytes))
        try:
            if not call.is_grpc:
                await call.refuse_http(405 if call.first(":method") != "POST" else 415)
                return
            handler = self._handlers.get(call.path)
            if handler is None:
                await self._exchanges.run("unknown", call, _no_such_method)
                return
            await handler(call)
        except StreamGone:
            pass
        # A stream's failure is its own; what can be told its caller has been.
        except Exception:  # noqa: BLE001
            _log.exception("the answer to %.200r could not be sent", call.path)
            call.abort()

    def _unary(self, name: str, method: Callable[[Any, str], Awaitable[Any]]) -> Handler:
        request_type = message(SERVICE.methods_by_name[name].input_type.name)

        async def handle(call: Call) -> None:
            async def work(context: RequestContext) -> None:
                request = await received(call, request_type)
                answer: bytes = (await method(request, context.owner)).SerializeToString()
                context.sent_bytes = len(answer)
                await call.send([answer])

            await self._exchanges.run(name, call, work)

        return handle


async def _no_such_method(_: RequestContext) -> None:
    raise UnsupportedProblem("this server has no such method")
