"""Shared-memory regions as both forms of the protocol register, list and drop them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from convgrad.errors import UnsupportedProblem
from convgrad.wire.sentences import shown
from convgrad_service.engine.hub import Engine, Hub, call_hub
from convgrad_service.engine.shm.registry import RegionInfo, RegionPart, RegionRegistry
from convgrad_service.oip.request import Region
from convgrad_service.server.settings import Settings

__all__ = ["Kind", "SharedMemory"]

Kind = Literal["system", "cuda"]


class SharedMemory:
    """The regions that clients have registered; each belongs to the ``owner`` who registered it.

    Kinds that are not enabled are refused with UnsupportedProblem.
    """

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        enabled: dict[Kind, bool] = {
            "system": settings.system_shared_memory,
            "cuda": settings.cuda_shared_memory,
        }
        self._kinds: Collection[Kind] = [kind for kind, on in enabled.items() if on]
        self.extensions = tuple(f"{kind}_shared_memory" for kind in self._kinds)

    async def register(self, owner: str, info: RegionInfo) -> None:
        """Map a region; raises a ServiceError if it does not match the registration."""
        self._require("system" if info.device is None else "cuda")
        await call_hub(self._engine, Hub.register_region, owner, info)

    async def unregister(self, owner: str, kind: Kind, name: str) -> None:
        """Drop a region once nothing in flight uses it; a ``name`` of "" drops all of the kind."""
        # Triton's clients drop all regions of both kinds before they register any.
        if name or not self._kinds:
            self._require(kind)
        if kind in self._kinds:
            await call_hub(
                self._engine, RegionRegistry.unregister, owner, name, on_device=kind == "cuda"
            )

    async def status(self, owner: str, kind: Kind, name: str) -> list[dict[str, Any]]:
        """Describe the owner's regions of a kind, or the one named; raises NotFound if missing."""
        self._require(kind)
        listed = RegionRegistry.list_regions
        found = await call_hub(self._engine, listed, owner, name, on_device=kind == "cuda")
        return [_described(info) for info in found]

    def parts(self, owner: str, regions: Mapping[str, Region]) -> Mapping[str, RegionPart]:
        """Return the owner's regions for these tensors; raises UnsupportedProblem if disabled."""
        if regions and not self._kinds:
            name, region = next(iter(regions.items()))
            raise UnsupportedProblem(
                f"{name}: the region {shown(region.name)} cannot be used; shared memory is "
                "not enabled on this server"
            )
        return {
            name: RegionPart(owner, region.name, region.offset, region.size_bytes)
            for name, region in regions.items()
        }

    def _require(self, kind: Kind) -> None:
        if kind not in self._kinds:
            raise UnsupportedProblem(
                f"{kind} shared memory is not enabled on this server; "
                f"CONVGRAD_{kind.upper()}_SHARED_MEMORY=true enables it where the server is started"
            )


def _described(info: RegionInfo) -> dict[str, Any]:
    """Return a region as the protocol describes it, in JSON and in its messages."""
    where: dict[str, Any] = {"key": info.key, "offset": info.offset}
    if info.device is not None:
        where = {"device_id": info.device}
    return {"name": info.name, **where, "byte_size": info.size_bytes}
