"""Shared memory switched on: the protocol's calls for regions, answered by the engine."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from convgrad.errors import UnsupportedProblem
from convgrad_service.engine.hub import Engine
from convgrad_service.engine.shm.registry import RegionInfo, RegionPart
from convgrad_service.oip.request import Region
from convgrad_service.oip.shared_memory import Kind, NoSharedMemory, Registration, SharedMemory

__all__ = ["RegisteredMemory", "shared_memory_of"]


class RegisteredMemory:
    """Regions of the ``kinds`` that are switched on: files below /dev/shm, or GPUs' memory."""

    def __init__(self, engine: Engine, kinds: Collection[Kind]) -> None:
        self._engine, self._kinds = engine, kinds
        self.extensions = tuple(f"{kind}_shared_memory" for kind in kinds)

    async def register(self, owner: str, registration: Registration) -> None:
        """See `SharedMemory.register`."""
        self._refuse_other(registration.kind)
        await self._engine.register_region(
            owner,
            RegionInfo(
                registration.name,
                registration.key,
                registration.offset,
                registration.size_bytes,
                registration.handle,
                registration.device if registration.kind == "cuda" else None,
            ),
        )

    async def unregister(self, owner: str, kind: Kind, name: str) -> None:
        """See `SharedMemory.unregister`."""
        # Triton's clients drop the regions of both kinds before they register any.
        if name:
            self._refuse_other(kind)
        if kind in self._kinds:
            await self._engine.unregister_region(owner, name, kind == "cuda")

    async def status(self, owner: str, kind: Kind, name: str) -> list[Registration]:
        """See `SharedMemory.status`."""
        self._refuse_other(kind)
        return [
            Registration(
                kind,
                info.name,
                info.size_bytes,
                info.offset,
                info.key,
                device=info.device or 0,
            )
            for info in await self._engine.list_regions(owner, name, kind == "cuda")
        ]

    def parts(self, owner: str, regions: Mapping[str, Region]) -> Mapping[str, RegionPart]:
        """See `SharedMemory.parts`."""
        return {
            name: RegionPart(owner, region.name, region.offset, region.size_bytes)
            for name, region in regions.items()
        }

    def _refuse_other(self, kind: Kind) -> None:
        if kind not in self._kinds:
            raise UnsupportedProblem(
                f"{kind} shared memory is not enabled on this server; "
                f"CONVGRAD_{kind.upper()}_SHARED_MEMORY=true enables it where the server is started"
            )


def shared_memory_of(engine: Engine, *, system: bool, cuda: bool) -> SharedMemory:
    """What is switched on."""
    kinds: dict[Kind, bool] = {"system": system, "cuda": cuda}
    chosen = [kind for kind, is_on in kinds.items() if is_on]
    return RegisteredMemory(engine, chosen) if chosen else NoSharedMemory()
