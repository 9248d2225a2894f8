"""The standard services of a gRPC server: health checking, and reflection.

Of grpcio-health-checking only the messages are used: its servicer has no limit on watchers, and
when one leaves, the others get no more notifications (1.81). Reflection has the names of both of
its versions, v1alpha and v1, whose messages are identical; grpcio-reflection knows v1alpha only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import aio

from convgrad.errors import NotFound, Overloaded
from convgrad.wire.sentences import shown
from convgrad_service.engine.pipeline import Pipeline
from convgrad_service.grpc_api.exchange import EOF, Call, Exchanges
from convgrad_service.grpc_api.limits import MessageReader
from convgrad_service.grpc_api.wire import SERVICE, parsed

HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

# How often a watch looks whether the status has changed.
_INTERVAL_S = 0.5
_MAX_WATCHES = 1024
_Request, _Response = health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse
_V1ALPHA, _V1 = "grpc.reflection.v1alpha", "grpc.reflection.v1"
_SERVICES = tuple(f"{package}.ServerReflection" for package in (_V1ALPHA, _V1))


class HealthMethods:
    """``Check`` and ``Watch``, for the server as a whole ("") and the inference service."""

    def __init__(self, pipeline: Pipeline, exchanges: Exchanges, reader: MessageReader) -> None:
        self._pipeline, self._reader = pipeline, reader
        self._watches = 0
        self._closed = False
        self.handlers: Mapping[str, grpc.RpcMethodHandler] = {
            f"/{HEALTH}/Check": exchanges.unary("Check", self._check),
            f"/{HEALTH}/Watch": exchanges.streaming("Watch", self._watch),
        }

    async def _check(self, call: Call) -> bytes:
        request = parsed(await self._reader.message(call), _Request)
        status = self._status(request.service)
        if status == _Response.SERVICE_UNKNOWN:
            raise NotFound(f"there is no service {shown(request.service)}")
        return _answer(status)

    async def _watch(self, call: Call) -> None:
        if self._watches >= _MAX_WATCHES:
            raise Overloaded(
                f"{self._watches} clients watch this server's health, the maximum",
                retry_after_s=60.0,
            )
        request = parsed(await self._reader.message(call), _Request)
        self._watches += 1
        try:
            last = None
            # Or until the client leaves, which cancels this task.
            while not self._closed:
                if (status := self._status(request.service)) != last:
                    await call.rpc.write(_answer(status))
                    last = status
                await asyncio.sleep(_INTERVAL_S)
        finally:
            self._watches -= 1

    def close(self) -> None:
        """End all watches, because the server is about to stop."""
        self._closed = True

    def _status(self, service: str) -> int:
        if service not in ("", SERVICE.full_name):
            return int(_Response.SERVICE_UNKNOWN)
        ready = self._pipeline.unready_reason is None
        return int(_Response.SERVING if ready else _Response.NOT_SERVING)


def _answer(status: int) -> bytes:
    encoded: bytes = _Response(status=status).SerializeToString()
    return encoded


def reflection_handlers(
    exchanges: Exchanges, reader: MessageReader
) -> Mapping[str, grpc.RpcMethodHandler]:
    """Return the handlers of ``ServerReflectionInfo``, by full method name."""
    servicer = aio.ReflectionServicer((SERVICE.full_name, HEALTH, *_SERVICES), pool=_Pool())

    async def requests(call: Call) -> AsyncIterator[Any]:
        while (body := await call.rpc.read()) is not EOF:
            exchanges.authenticate(call)
            yield parsed(body, reflection_pb2.ServerReflectionRequest)

    async def info(call: Call) -> None:
        with reader.stream(call):
            async for answer in servicer.ServerReflectionInfo(requests(call), call.rpc):
                await call.rpc.write(answer.SerializeToString())

    handler = exchanges.streaming("ServerReflectionInfo", info)
    return {f"/{service}/ServerReflectionInfo": handler for service in _SERVICES}


class _Pool:
    """A descriptor pool that also finds methods by name, which protobuf's does not."""

    def __init__(self) -> None:
        self._pool = DescriptorPool()
        for file in (SERVICE.file, health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
            self._pool.AddSerializedFile(file.serialized_pb)
        self._pool.Add(_under_v1(FileDescriptorProto.FromString(file.serialized_pb)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def FindFileContainingSymbol(self, symbol: str) -> FileDescriptor:  # noqa: N802
        """See `DescriptorPool.FindFileContainingSymbol`."""
        try:
            return self._pool.FindFileContainingSymbol(symbol)
        except KeyError:
            return self._pool.FindMethodByName(symbol).containing_service.file


def _under_v1(file: FileDescriptorProto) -> FileDescriptorProto:
    """Rename the descriptor of the reflection service to v1."""
    file.name, file.package = f"v1/{file.name}", _V1
    for described in file.message_type:
        for field in described.field:
            if field.type_name:  # numbers and strings have none
                field.type_name = field.type_name.replace(_V1ALPHA, _V1)
    for service in file.service:
        for method in service.method:
            method.input_type = method.input_type.replace(_V1ALPHA, _V1)
            method.output_type = method.output_type.replace(_V1ALPHA, _V1)
    return file
