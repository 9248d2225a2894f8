"""gRPC's server reflection: which services there are, and the files that describe them.

Answered under the names of both of its versions, whose messages are the same.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from google.protobuf import descriptor_pb2

from convgrad_service.engine.telemetry.request_context import RequestContext
from convgrad_service.grpc_api.call import Call
from convgrad_service.grpc_api.exchange import Exchanges
from convgrad_service.grpc_api.messages import (
    HEALTH,
    POOL,
    REFLECTION,
    REFLECTION_V1,
    SERVICE,
    message,
)
from convgrad_service.grpc_api.receiving import parsed

__all__ = ["ReflectionMethods"]

_SERVICES = (REFLECTION.full_name, f"{REFLECTION_V1}.ServerReflection")
_LISTED = (SERVICE.full_name, HEALTH.full_name, *_SERVICES)
_Request = message("ServerReflectionRequest", REFLECTION)
_Response = message("ServerReflectionResponse", REFLECTION)
_NOT_FOUND, _UNIMPLEMENTED = 5, 12


class ReflectionMethods:
    """``ServerReflectionInfo``: a stream of questions, each answered in turn."""

    def __init__(self, exchanges: Exchanges) -> None:
        self._exchanges = exchanges
        self.handlers: Mapping[str, Callable[[Call], Awaitable[None]]] = {
            f"/{service}/ServerReflectionInfo": self._info for service in _SERVICES
        }

    async def _info(self, call: Call) -> None:
        async def work(_: RequestContext) -> None:
            while (incoming := await call.message(patiently=True)) is not None:
                asked = await parsed(incoming, _Request)
                await call.send([_answer(asked).SerializeToString()])
                await call.flush()

        await self._exchanges.run("ServerReflectionInfo", call, work)


def _file_containing(symbol: str) -> Any:
    """Of a message, an enumeration, a service, one of its methods, or a field; raises KeyError."""
    try:
        return POOL.FindFileContainingSymbol(symbol)
    except KeyError:
        return POOL.FindMethodByName(symbol).containing_service.file


def _answer(asked: Any) -> Any:
    answer = _Response(original_request=asked)
    kind = asked.WhichOneof("message_request")
    if kind == "list_services":
        for name in sorted(_LISTED):
            answer.list_services_response.service.add(name=name)
        return answer
    find = {
        "file_by_filename": POOL.FindFileByName,
        "file_containing_symbol": _file_containing,
    }.get(kind or "")
    if find is None:
        answer.error_response.error_code = _UNIMPLEMENTED
        answer.error_response.error_message = "there are no extensions here"
        return answer
    try:
        file = find(getattr(asked, kind))
    except KeyError:
        answer.error_response.error_code = _NOT_FOUND
        answer.error_response.error_message = "there is no such file or symbol"
        return answer
    described = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(described)
    answer.file_descriptor_response.file_descriptor_proto.append(described.SerializeToString())
    return answer
