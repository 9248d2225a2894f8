"""Shared-memory regions as both forms of the protocol register, list and drop them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from convgrad.errors import UnsupportedProblem
from convgrad.wire.sentences import shown
from convgrad_service.engine.hub import Engine, Hub, call_hub
from convgrad_service.engine.shm.registry import RegionInfo, RegionPart, RegionRegistry
from convgrad_service.oip.request import Region
from convgrad_service.server.settings import Settings

__all__ = ["Kind", "Registration", "SharedMemory"]

Kind = Literal["system", "cuda"]


@dataclass(frozen=True, slots=True)
class Registration:
    """A region under the name that requests use for it.

    ``key`` is the file below /dev/shm of a system region, ``handle`` the IPC handle of a CUDA one
    on ``device``; ``offset`` and ``size_bytes`` bound the registered part.
    """

    kind: Kind
    name: str
    size_bytes: int
    offset: int = 0
    key: str = ""
    handle: bytes = b""
    device: int = 0


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

    async def register(self, owner: str, registration: Registration) -> None:
        """Map a region; raises a ServiceError if it does not match the registration."""
        self._require(registration.kind)
        await call_hub(
            self._engine,
            Hub.register_region,
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
        """Drop a region once nothing in flight uses it; a ``name`` of "" drops all of the kind."""
        # Triton's clients drop all regions of both kinds before they register any.
        if name or not self._kinds:
            self._require(kind)
        if kind in self._kinds:
            await call_hub(
                self._engine, RegionRegistry.unregister, owner, name, on_device=kind == "cuda"
            )

    async def status(self, owner: str, kind: Kind, name: str) -> list[Registration]:
        """Return the owner's regions of a kind, or the one named; raises NotFound if missing."""
        self._require(kind)
        return [
            Registration(
                kind,
                info.name,
                info.size_bytes,
                info.offset,
                info.key,
                device=info.device or 0,
            )
            for info in await call_hub(
                self._engine, RegionRegistry.list_regions, owner, name, on_device=kind == "cuda"
            )
        ]

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
