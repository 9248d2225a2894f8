"""Shared memory switched on: the protocol's calls for regions, answered by the engine."""

from __future__ import annotations

from collections.abc import Mapping

from convgrad.errors import UnsupportedProblem
from convgrad_service.engine.hub import Engine
from convgrad_service.engine.regions import RegionInfo, RegionPart
from convgrad_service.oip.request import InferRequest, Region
from convgrad_service.oip.shared_memory import Kind, NoSharedMemory, Registration, SharedMemory

__all__ = ["SystemSharedMemory", "shared_memory_of"]


class SystemSharedMemory:
    """Regions of files below /dev/shm; those of a GPU's memory are refused."""

    extensions = ("system_shared_memory",)

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def register(self, owner: str, registration: Registration) -> None:
        """See `SharedMemory.register`."""
        _refuse_cuda(registration.kind)
        await self._engine.register_region(
            owner,
            RegionInfo(
                registration.name, registration.key, registration.offset, registration.size_bytes
            ),
        )

    async def unregister(self, owner: str, kind: Kind, name: str) -> None:
        """See `SharedMemory.unregister`."""
        # Triton's clients drop the regions of both kinds before they register any.
        if kind == "system" or name:
            _refuse_cuda(kind)
            await self._engine.unregister_region(owner, name)

    async def status(self, owner: str, kind: Kind, name: str) -> list[Registration]:
        """See `SharedMemory.status`."""
        _refuse_cuda(kind)
        return [
            Registration("system", info.name, info.size_bytes, info.offset, info.key)
            for info in await self._engine.list_regions(owner, name)
        ]

    def parts(self, owner: str, request: InferRequest) -> Mapping[str, RegionPart]:
        """See `SharedMemory.parts`."""
        regions = {tensor.name: tensor.source for tensor in request.inputs}
        regions.update((output.name, output.region) for output in request.outputs if output.region)
        return {
            name: RegionPart(owner, region.name, region.offset, region.size_bytes)
            for name, region in regions.items()
            if isinstance(region, Region)
        }


def shared_memory_of(engine: Engine, *, system: bool) -> SharedMemory:
    """What is switched on."""
    return SystemSharedMemory(engine) if system else NoSharedMemory()


def _refuse_cuda(kind: Kind) -> None:
    if kind == "cuda":
        raise UnsupportedProblem("cuda shared memory is not enabled on this server")
