"""The methods that describe the server and its models, and manage shared memory."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, get_args

from google.protobuf.json_format import ParseDict

from convgrad.contract import OPERATIONS
from convgrad.errors import DeviceUnavailable, NotFound, UnsupportedProblem
from convgrad.wire.sentences import shown
from convgrad_service.engine.hub import call_hub
from convgrad_service.engine.pipeline import Pipeline
from convgrad_service.engine.telemetry.request_metrics import RequestMetrics
from convgrad_service.grpc_api.messages import message
from convgrad_service.oip.fields import operation_named
from convgrad_service.oip.models import (
    model_config,
    model_metadata,
    model_statistics,
    repository_index,
    server_metadata,
)
from convgrad_service.oip.shared_memory import Kind, Registration, SharedMemory

__all__ = ["DescribingMethods"]

Method = Callable[[Any, str], Awaitable[Any]]


class DescribingMethods:
    """Every method that does not compute, from parsed request to response message."""

    def __init__(
        self, pipeline: Pipeline, shared_memory: SharedMemory, service_name: str | None = None
    ) -> None:
        self._pipeline, self._service_name = pipeline, service_name
        self._memory = shared_memory
        self.methods: dict[str, Method] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ServerMetadata": self._server_metadata,
            "ModelReady": self._model_ready,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._model_config,
            "ModelStatistics": self._model_statistics,
            "RepositoryIndex": self._repository_index,
            "RepositoryModelLoad": self._refuse_control,
            "RepositoryModelUnload": self._refuse_control,
        }
        for kind in get_args(Kind):
            self.methods |= {
                f"{kind.title()}SharedMemoryStatus": partial(self._region_status, kind),
                f"{kind.title()}SharedMemoryRegister": partial(self._register_region, kind),
                f"{kind.title()}SharedMemoryUnregister": partial(self._unregister_region, kind),
            }

    async def _server_live(self, _: Any, __: str) -> Any:
        try:
            self._pipeline.require_live()
        except DeviceUnavailable:
            return message("ServerLiveResponse")(live=False)
        return message("ServerLiveResponse")(live=True)

    async def _server_ready(self, _: Any, __: str) -> Any:
        return message("ServerReadyResponse")(ready=self._pipeline.unready_reason is None)

    async def _server_metadata(self, _: Any, __: str) -> Any:
        metadata = server_metadata(self._memory.extensions)
        return message("ServerMetadataResponse")(**metadata)

    async def _model_ready(self, request: Any, __: str) -> Any:
        # The protocol reports an unknown model as not ready.
        try:
            if request.name != self._service_name:
                operation_named(request.name, request.version)
        except NotFound:
            return message("ModelReadyResponse")(ready=False)
        return message("ModelReadyResponse")(ready=self._pipeline.unready_reason is None)

    async def _model_metadata(self, request: Any, __: str) -> Any:
        operation = operation_named(request.name, request.version)
        answer = message("ModelMetadataResponse")()
        return ParseDict(model_metadata(operation.name), answer)

    async def _model_config(self, request: Any, __: str) -> Any:
        operation = operation_named(request.name, request.version)
        answer = message("ModelConfigResponse")()
        # The message has only some of the JSON's fields.
        ParseDict(model_config(operation.name), answer.config, ignore_unknown_fields=True)
        return answer

    async def _model_statistics(self, request: Any, __: str) -> Any:
        names = (
            [operation_named(request.name, request.version).name] if request.name else OPERATIONS
        )
        counts = await call_hub(self._pipeline.engine, RequestMetrics.statistics)
        answer = message("ModelStatisticsResponse")()
        return ParseDict(model_statistics(counts, names), answer, ignore_unknown_fields=True)

    async def _repository_index(self, request: Any, __: str) -> Any:
        if request.repository_name:
            raise NotFound(
                f"there is no repository {shown(request.repository_name)}; the only one has no name"
            )
        index = repository_index(self._pipeline.unready_reason, only_ready=request.ready)
        return message("RepositoryIndexResponse")(models=index)

    async def _refuse_control(self, _: Any, __: str) -> Any:
        raise UnsupportedProblem(
            "models are this server's operations, which cannot be loaded or unloaded"
        )

    async def _region_status(self, kind: Kind, request: Any, owner: str) -> Any:
        answer = _shared_memory_response(kind, "Status")
        for found in await self._memory.status(owner, kind, request.name):
            region = answer.regions[found.name]
            region.name, region.byte_size = found.name, found.size_bytes
            if kind == "cuda":
                region.device_id = found.device
            else:
                region.key, region.offset = found.key, found.offset
        return answer

    async def _register_region(self, kind: Kind, request: Any, owner: str) -> Any:
        region = Registration(kind, request.name, request.byte_size)
        if kind == "cuda":
            region = replace(region, handle=request.raw_handle, device=request.device_id)
        else:
            region = replace(region, key=request.key, offset=request.offset)
        await self._memory.register(owner, region)
        return _shared_memory_response(kind, "Register")

    async def _unregister_region(self, kind: Kind, request: Any, owner: str) -> Any:
        await self._memory.unregister(owner, kind, request.name)
        return _shared_memory_response(kind, "Unregister")


def _shared_memory_response(kind: Kind, method: str) -> Any:
    return message(f"{kind.title()}SharedMemory{method}Response")()
