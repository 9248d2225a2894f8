"""gRPC's server reflection, by grpcio-reflection, under the names of both of its versions.

The messages of the two are the same; the package knows the earlier name alone.
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
    """The handlers of ``ServerReflectionInfo``: a stream of questions, each answered in turn."""
    servicer = aio.ReflectionServicer((SERVICE.full_name, HEALTH, *_SERVICES), pool=_Pool())

    async def questions(call: Call) -> AsyncIterator[Any]:
        while (body := await call.rpc.read()) is not EOF:
            exchanges.authenticate(call)
            yield parsed(body, reflection_pb2.ServerReflectionRequest)

    async def info(call: Call) -> None:
        with exchanges.arrivals.stream():
            async for answer in servicer.ServerReflectionInfo(questions(call), call.rpc):
                await call.rpc.write(answer.SerializeToString())

    handler = exchanges.streaming("ServerReflectionInfo", info)
    return {f"/{service}/ServerReflectionInfo": handler for service in _SERVICES}


class _Pool:
    """Describes every service, by the names of methods too, which protobuf's own does not find."""

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
    """Reflection's description under its later name."""
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
