"""The gRPC server: the protocol's service, health checking and reflection on one port.

In production it has a process of its own: taking a large message off the wire keeps a process busy
for as long as copying it takes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from convgrad.errors import DeviceUnavailable, MalformedRequest
from convgrad_service.engine.dataplane import Dataplane
from convgrad_service.grpc_api.exchange import Exchanges
from convgrad_service.grpc_api.infer import MAX_MESSAGE_BYTES, InferMethods
from convgrad_service.grpc_api.messages import POOL, SERVICE, message
from convgrad_service.grpc_api.service import DescribingMethods
from convgrad_service.oip.registered_memory import shared_memory_of
from convgrad_service.request_context import RequestContext
from convgrad_service.settings import Settings

__all__ = ["GrpcServer"]

_HEALTH_INTERVAL_S = 0.5
_REFUSED_BYTES = 2**20


class GrpcServer:
    """Serves a dataplane over gRPC on the running event loop, from `start` to `stop`."""

    def __init__(self, dataplane: Dataplane, settings: Settings) -> None:
        self._dataplane = dataplane
        self._settings = settings
        self._exchanges = Exchanges(dataplane.engine)
        memory = shared_memory_of(dataplane.engine, system=settings.system_shared_memory)
        self._infer = InferMethods(dataplane, settings, self._exchanges, memory)
        self._describing = DescribingMethods(dataplane, memory)
        self._server: Any = None
        self._health: Any = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Listen on the settings' host and gRPC port; the real port.

        Raises
        ------
        OSError
            It cannot listen there.
        """
        self._server = grpc.aio.server(options=self._options())
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE.full_name, self._handlers()),)
        )
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE.full_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server, POOL)
        host, port = self._settings.http_host, self._settings.grpc_port
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}: {error}") from None
        await self._server.start()
        await self._tell_health()
        self._watching = asyncio.create_task(self._watch_health())
        return int(port)

    async def stop(self, grace_s: float) -> None:
        """Take no more calls, and end those that are still in work after ``grace_s``."""
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
            await self._health.enter_graceful_shutdown()
        if self._server is not None:
            await self._server.stop(grace_s)

    def _options(self) -> list[tuple[str, Any]]:
        settings = self._settings
        return [
            # gRPC itself refuses what is far too large, in its words; a little above, in ours.
            (
                "grpc.max_receive_message_length",
                min(settings.max_body_bytes + _REFUSED_BYTES, MAX_MESSAGE_BYTES),
            ),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_metadata_size", settings.max_header_bytes),
            # Two servers on one port would each get half of the calls.
            ("grpc.so_reuseport", 0),
            # A client that has vanished is noticed, and what it held is freed.
            ("grpc.keepalive_time_ms", round(settings.body_idle_timeout_s * 1e3)),
            ("grpc.keepalive_timeout_ms", round(settings.body_idle_timeout_s * 1e3)),
            # Clients may ask in turn; Triton's are often set to once a second.
            ("grpc.http2.min_ping_interval_without_data_ms", 1000),
            ("grpc.http2.max_ping_strikes", 0),
        ]

    def _handlers(self) -> dict[str, Any]:
        """Every method of the service, on messages as bytes: none is parsed behind our back."""
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(self._unary(name, method))
            for name, method in self._describing.methods.items()
        }
        # As if of a stream, which is the same on the wire: it reads its message when it wants to.
        handlers["ModelInfer"] = grpc.stream_unary_rpc_method_handler(self._infer.infer)
        handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(self._infer.stream)
        return handlers

    def _unary(
        self, name: str, method: Callable[[Any], Awaitable[Any]]
    ) -> Callable[[bytes, Any], Awaitable[bytes]]:
        request_type = message(SERVICE.methods_by_name[name].input_type.name)

        async def work(body: bytes) -> bytes:
            try:
                request = request_type.FromString(body)
            except DecodeError:
                raise MalformedRequest(
                    f"the message is no {request_type.DESCRIPTOR.name}"
                ) from None
            answer: bytes = (await method(request)).SerializeToString()
            return answer

        async def handle(body: bytes, call: Any) -> bytes:
            def with_context(_: RequestContext) -> Awaitable[bytes]:
                return work(body)

            return await self._exchanges.run(name, call, with_context)

        return handle

    async def _watch_health(self) -> None:
        while True:
            await asyncio.sleep(_HEALTH_INTERVAL_S)
            await self._tell_health()

    async def _tell_health(self) -> None:
        status = health_pb2.HealthCheckResponse.SERVING
        try:
            self._dataplane.require_ready()
        except DeviceUnavailable:
            status = health_pb2.HealthCheckResponse.NOT_SERVING
        for name in (health.OVERALL_HEALTH, SERVICE.full_name):
            await self._health.set(name, status)
