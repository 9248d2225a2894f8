"""The methods that describe the server and its models, and manage shared memory."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, get_args

from convgrad.contract import OPERATIONS
from convgrad.errors import DeviceUnavailable, NotFound, UnsupportedProblem
from convgrad.wire.sentences import shown
from convgrad_service.engine.hub import call_hub
from convgrad_service.engine.pipeline import Pipeline
from convgrad_service.engine.shm.registry import RegionInfo
from convgrad_service.engine.telemetry.request_metrics import RequestMetrics
from convgrad_service.oip.fields import operation_named
from convgrad_service.oip.models import (
    model_config,
    model_metadata,
    model_statistics,
    repository_index,
    server_metadata,
)
from convgrad_service.oip.shared_memory import Kind, SharedMemory

__all__ = ["DescribingMethods", "Method"]

Fields = Mapping[str, Any]
"""The fields of a response, as in JSON; those that its message does not have are left out."""
Method = Callable[[Any, str], Awaitable[Fields]]


class DescribingMethods:
    """Every method that does not compute, from parsed request to the fields of the response."""

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

    async def _server_live(self, _: Any, __: str) -> Fields:
        try:
            self._pipeline.require_live()
        except DeviceUnavailable:
            return {"live": False}
        return {"live": True}

    async def _server_ready(self, _: Any, __: str) -> Fields:
        return {"ready": self._pipeline.unready_reason is None}

    async def _server_metadata(self, _: Any, __: str) -> Fields:
        return server_metadata(self._memory.extensions)

    async def _model_ready(self, request: Any, owner: str) -> Fields:
        # The protocol reports an unknown model as not ready.
        try:
            if request.name != self._service_name:
                operation_named(request.name, request.version)
        except NotFound:
            return {"ready": False}
        return await self._server_ready(request, owner)

    async def _model_metadata(self, request: Any, _: str) -> Fields:
        return model_metadata(operation_named(request.name, request.version).name)

    async def _model_config(self, request: Any, _: str) -> Fields:
        return {"config": model_config(operation_named(request.name, request.version).name)}

    async def _model_statistics(self, request: Any, _: str) -> Fields:
        names = (
            [operation_named(request.name, request.version).name] if request.name else OPERATIONS
        )
        counts = await call_hub(self._pipeline.engine, RequestMetrics.statistics)
        return model_statistics(counts, names)

    async def _repository_index(self, request: Any, _: str) -> Fields:
        if request.repository_name:
            raise NotFound(
                f"there is no repository {shown(request.repository_name)}; the only one has no name"
            )
        reason = self._pipeline.unready_reason
        return {"models": repository_index(reason, only_ready=request.ready)}

    async def _refuse_control(self, _: Any, __: str) -> Fields:
        raise UnsupportedProblem(
            "models are this server's operations, which cannot be loaded or unloaded"
        )

    async def _region_status(self, kind: Kind, request: Any, owner: str) -> Fields:
        found = await self._memory.status(owner, kind, request.name)
        return {"regions": {region["name"]: region for region in found}}

    async def _register_region(self, kind: Kind, request: Any, owner: str) -> Fields:
        if kind == "cuda":
            handle, device = request.raw_handle, request.device_id
            info = RegionInfo(request.name, "", 0, request.byte_size, handle, device)
        else:
            info = RegionInfo(request.name, request.key, request.offset, request.byte_size)
        await self._memory.register(owner, info)
        return {}

    async def _unregister_region(self, kind: Kind, request: Any, owner: str) -> Fields:
        await self._memory.unregister(owner, kind, request.name)
        return {}
