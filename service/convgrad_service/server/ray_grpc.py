"""The gRPC service behind Ray Serve's gRPC proxy: every unary method.

The proxy passes one message to the front end and expects one back.

In a Serve configuration: ``grpc_options: {port: 8001, grpc_servicer_functions:
[convgrad_service.server.ray_grpc.add_open_inference]}``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc

from convgrad_service.engine.pipeline import Pipeline
from convgrad_service.grpc_api.server import GrpcServer
from convgrad_service.grpc_api.wire import SERVICE
from convgrad_service.server.settings import Settings

METHODS = [name for name in SERVICE.methods_by_name if name != "ModelStreamInfer"]


def add_open_inference(_: object, server: grpc.aio.Server) -> None:
    """Register the methods with Ray's proxy; messages stay bytes."""
    handlers = {name: grpc.unary_unary_rpc_method_handler(_replaced_by_ray) for name in METHODS}
    generic = grpc.method_handlers_generic_handler(SERVICE.full_name, handlers)
    server.add_generic_rpc_handlers((generic,))


async def _replaced_by_ray(*_: object) -> bytes:
    raise NotImplementedError("Ray's proxy replaces this handler with a call to the front end")


class Answer:
    """An encoded message in the form that Ray expects from a deployment."""

    def __init__(self, encoded: bytes) -> None:
        self._encoded = encoded

    def SerializeToString(self) -> bytes:  # noqa: N802 - protobuf's name
        """Return the encoded message."""
        return self._encoded


class GrpcIngress:
    """Serves the methods with the handlers of `GrpcServer`."""

    def __init__(self, pipeline: Pipeline, settings: Settings) -> None:
        server = GrpcServer(pipeline, settings)
        self._handlers: Mapping[str, Callable[[object, Any], Awaitable[bytes]]] = {
            name: server.handlers[f"/{SERVICE.full_name}/{name}"].stream_unary for name in METHODS
        }

    async def call(self, method: str, body: bytes, context: Any) -> Answer:
        """Serve one call; a failure is set on Ray's ``context``."""
        return Answer(await self._handlers[method](None, _Rpc(body, context)))


class _Rpc:
    """What `grpc_api.exchange.Call` uses of grpcio's context; the message is here already."""

    def __init__(self, body: bytes, context: Any) -> None:
        self._messages: list[Any] = [body]
        self._context = context

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return list(self._context.invocation_metadata())

    def time_remaining(self) -> None:
        return None  # Ray enforces the deadline and does not expose it

    def peer(self) -> str:
        return str(self._context.peer())

    def done(self) -> bool:
        return False

    def add_done_callback(self, callback: Callable[[object], None]) -> None:
        callback(self)  # Ray sends the response

    async def read(self) -> Any:
        return self._messages.pop() if self._messages else grpc.aio.EOF

    def set_trailing_metadata(self, trailers: tuple[tuple[str, str], ...]) -> None:
        self._context.set_trailing_metadata(list(trailers))

    async def abort(
        self, code: grpc.StatusCode, details: str, trailers: tuple[tuple[str, str], ...]
    ) -> None:
        self._context.set_code(code)
        self._context.set_details(details)
        self.set_trailing_metadata(trailers)
        raise grpc.aio.AbortError(details)
