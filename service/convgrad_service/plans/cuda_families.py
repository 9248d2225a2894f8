"""What a kernel family is, and how the first one that applies is found.

A family is one kernel source and its host side: it says why it does not take a piece of work, or
which launches do it. Families of a role stand in order of preference; the last of each takes
everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from convgrad.errors import UnsupportedProblem
from convgrad_service.plans.cuda_device import CudaDevice
from convgrad_service.plans.cuda_program import Fragment, Instance
from convgrad_service.plans.cuda_works import ChannelSums, ConvWork, Copy, FusedWork, PoolWork

__all__ = ["Chosen", "Families", "Family", "Work", "choose"]

Work = ConvWork | FusedWork | ChannelSums | PoolWork | Copy
W = TypeVar("W", bound=Work, contravariant=True)
V = TypeVar("V", bound=Work)


class Family(Protocol[W]):
    """One kernel source and its host side. Pure: no GPU, no CuPy."""

    name: str

    def why_not(self, work: W, device: CudaDevice) -> str | None:
        """Why this family does not compute this work, in words; None where it does."""
        ...

    def launches(self, work: W, device: CudaDevice) -> Fragment:
        """The launches that compute it; only asked where `why_not` is None."""
        ...

    def instances(self) -> Iterable[Instance]:
        """Every instance that `launches` can name, each once."""
        ...


@dataclass(frozen=True, slots=True)
class Families:
    """The families of each role, in order of preference.

    ``fused`` may be empty: then two convolutions run.
    """

    fwd: Sequence[Family[ConvWork]]
    bwd_data: Sequence[Family[ConvWork]]
    bwd_weight: Sequence[Family[ConvWork]]
    fused: Sequence[Family[FusedWork]]
    channel_sums: Sequence[Family[ChannelSums]]
    pool_fwd: Sequence[Family[PoolWork]]
    pool_bwd: Sequence[Family[PoolWork]]
    copy: Sequence[Family[Copy]]

    def of(self, work: ConvWork) -> Sequence[Family[ConvWork]]:
        """Those of a convolution's direction."""
        roles = {"fwd": self.fwd, "bwd_data": self.bwd_data, "bwd_weight": self.bwd_weight}
        return roles[work.direction]

    def instances(self) -> list[Instance]:
        """Every instance of every family, each once."""
        found: dict[Instance, None] = {}
        for role in self.__slots__:
            for family in getattr(self, role):
                found |= dict.fromkeys(family.instances())
        return list(found)


@dataclass(frozen=True, slots=True)
class Chosen:
    """A family's launches, and the families before it with the reason for each."""

    family: str
    fragment: Fragment
    passed_over: tuple[tuple[str, str], ...]


def choose(families: Sequence[Family[V]], work: V, device: CudaDevice) -> Chosen:
    """The first family that takes this work.

    Raises:
        UnsupportedProblem: none does; the sentence has the reason of each.
    """
    passed_over: list[tuple[str, str]] = []
    for family in families:
        reason = family.why_not(work, device)
        if reason is None:
            return Chosen(family.name, family.launches(work, device), tuple(passed_over))
        passed_over.append((family.name, reason))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in passed_over)
    raise UnsupportedProblem(f"no GPU kernel computes this: {reasons}")
