"""Shared-memory regions as both forms of the protocol register, list and drop them.

A transport holds one `SharedMemory` and asks it; where shared memory is switched off that is
`NoSharedMemory`, which says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NoReturn, Protocol

from convgrad.errors import UnsupportedProblem
from convgrad.wire.sentences import shown
from convgrad_service.engine.shm.registry import ANONYMOUS, RegionPart
from convgrad_service.oip.request import Region

__all__ = ["ANONYMOUS", "Kind", "NoSharedMemory", "Registration", "SharedMemory"]

Kind = Literal["system", "cuda"]


@dataclass(frozen=True, slots=True)
class Registration:
    """A region under the name that requests call it by.

    ``key`` is the file below /dev/shm of a system region, ``handle`` the IPC handle of a CUDA one
    on ``device``; ``offset`` and ``size_bytes`` bound the part of it that is registered.
    """

    kind: Kind
    name: str
    size_bytes: int
    offset: int = 0
    key: str = ""
    handle: bytes = b""
    device: int = 0


class SharedMemory(Protocol):
    """The regions that clients have registered; each belongs to the ``owner`` who did."""

    @property
    def extensions(self) -> tuple[str, ...]:
        """The names of the protocol's extensions that are switched on."""
        ...

    async def register(self, owner: str, registration: Registration) -> None:
        """Map a region; raises a ServiceError if it is not what the registration says."""
        ...

    async def unregister(self, owner: str, kind: Kind, name: str) -> None:
        """Drop a region once nothing in flight uses it; a ``name`` of "" drops all of the kind."""
        ...

    async def status(self, owner: str, kind: Kind, name: str) -> list[Registration]:
        """The owner's regions of a kind, or the one named; raises NotFound if that is not there."""
        ...

    def parts(self, owner: str, regions: Mapping[str, Region]) -> Mapping[str, RegionPart]:
        """The owner's regions for these tensors; raises UnsupportedProblem if switched off."""
        ...


class NoSharedMemory:
    """Shared memory switched off."""

    extensions: tuple[str, ...] = ()

    async def register(self, owner: str, registration: Registration) -> None:
        """Refuse."""
        self._refuse(registration.kind)

    async def unregister(self, owner: str, kind: Kind, name: str) -> None:
        """Refuse."""
        self._refuse(kind)

    async def status(self, owner: str, kind: Kind, name: str) -> list[Registration]:
        """Refuse."""
        self._refuse(kind)

    def parts(self, owner: str, regions: Mapping[str, Region]) -> Mapping[str, RegionPart]:
        """Refuse, if there are any."""
        for name, region in regions.items():
            raise UnsupportedProblem(
                f"{name}: the region {shown(region.name)} cannot be used; shared memory is "
                "not enabled on this server"
            )
        return {}

    @staticmethod
    def _refuse(kind: Kind) -> NoReturn:
        raise UnsupportedProblem(
            f"{kind} shared memory is not enabled on this server; "
            f"CONVGRAD_{kind.upper()}_SHARED_MEMORY=true enables it where the server is started"
        )
