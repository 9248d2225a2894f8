"""gRPC server reflection under the names of both of its versions, v1alpha and v1.

The messages of the two are identical, but grpcio-reflection knows v1alpha only.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import aio

from convgrad_service.grpc_api.call import EOF, Call
from convgrad_service.grpc_api.exchange import Exchanges
from convgrad_service.grpc_api.health import HEALTH
from convgrad_service.grpc_api.messages import SERVICE, parsed

__all__ = ["reflection_handlers"]

_V1ALPHA, _V1 = "grpc.reflection.v1alpha", "grpc.reflection.v1"
_SERVICES = tuple(f"{package}.ServerReflection" for package in (_V1ALPHA, _V1))


def reflection_handlers(exchanges: Exchanges) -> Mapping[str, grpc.RpcMethodHandler]:
    """Return the handlers of ``ServerReflectionInfo``, by full method name."""
    servicer = aio.ReflectionServicer((SERVICE.full_name, HEALTH, *_SERVICES), pool=_Pool())

    async def requests(call: Call) -> AsyncIterator[Any]:
        while (body := await call.rpc.read()) is not EOF:
            exchanges.authenticate(call)
            yield parsed(body, reflection_pb2.ServerReflectionRequest)

    async def info(call: Call) -> None:
        with exchanges.arrivals.stream(call):
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
