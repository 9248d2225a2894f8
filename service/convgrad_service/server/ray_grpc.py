"""The gRPC service behind Ray Serve's own gRPC proxy, which hands one message to the front end and
takes one back: every method but the streams.

In a Serve configuration: ``grpc_options: {port: 8001, grpc_servicer_functions:
[convgrad_service.server.ray_grpc.add_open_inference]}``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc

from convgrad_service.engine.pipeline import Pipeline
from convgrad_service.grpc_api.messages import SERVICE
from convgrad_service.grpc_api.server import GrpcServer
from convgrad_service.server.settings import Settings

__all__ = ["Answer", "GrpcIngress", "add_open_inference"]

METHODS = [name for name in SERVICE.methods_by_name if name != "ModelStreamInfer"]


def add_open_inference(_: object, server: grpc.aio.Server) -> None:
    """What Ray's proxy calls to hear which methods there are; messages stay bytes."""
    handlers = {name: grpc.unary_unary_rpc_method_handler(_not_here) for name in METHODS}
    generic = grpc.method_handlers_generic_handler(SERVICE.full_name, handlers)
    server.add_generic_rpc_handlers((generic,))


async def _not_here(*_: object) -> bytes:
    raise NotImplementedError("Ray's proxy puts its own way to the front end in this place")


class Answer:
    """An encoded message, as Ray takes one from a deployment."""

    def __init__(self, encoded: bytes) -> None:
        self._encoded = encoded

    def SerializeToString(self) -> bytes:  # noqa: N802 - protobuf's name
        """The message."""
        return self._encoded


class GrpcIngress:
    """Answers the methods with what serves them without Ray too."""

    def __init__(self, pipeline: Pipeline, settings: Settings) -> None:
        server = GrpcServer(pipeline, settings)
        self._work: Mapping[str, Callable[[object, Any], Awaitable[bytes]]] = {
            name: server.handlers[f"/{SERVICE.full_name}/{name}"].stream_unary for name in METHODS
        }

    async def call(self, method: str, body: bytes, context: Any) -> Answer:
        """One call; how it failed is in Ray's ``context``."""
        return Answer(await self._work[method](None, _Rpc(body, context)))


class _Rpc:
    """What `grpc_api.call.Call` needs of grpcio, of a message that has come already."""

    def __init__(self, body: bytes, context: Any) -> None:
        self._messages: list[Any] = [body]
        self._context = context

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return list(self._context.invocation_metadata())

    def time_remaining(self) -> None:
        return None  # Ray keeps the deadline, and does not say how much of it is left

    def peer(self) -> str:
        return str(self._context.peer())

    def done(self) -> bool:
        return False

    def add_done_callback(self, callback: Callable[[object], None]) -> None:
        callback(self)  # the answer is Ray's from here on

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
