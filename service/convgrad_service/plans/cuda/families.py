"""What a kernel family is, and how the first one that applies is found.

A family is one kernel source and its host side: it says why it does not take a piece of work, or
which launches do it. Families of a role stand in order of preference; the last of each takes
everything.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from convgrad.errors import UnsupportedProblem
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import Fragment, Instance
from convgrad_service.plans.cuda.works import ChannelSums, ConvWork, Copy, FusedWork, PoolWork

__all__ = ["Chosen", "Families", "Family", "LeastExpected", "Overhead", "Work", "choose"]

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

    def without(self, names: Collection[str]) -> Families:
        """The same but for the families of these names."""
        kept = {
            role: tuple(
                left
                for family in getattr(self, role)
                for left in (
                    family.without(names)
                    if isinstance(family, LeastExpected)
                    else (() if family.name in names else (family,))
                )
            )
            for role in self.__slots__
        }
        return Families(**kept)


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
        if isinstance(family, LeastExpected):
            chosen, reasons = family.choice(work, device)
            passed_over += reasons
            if chosen is not None:
                return replace(chosen, passed_over=tuple(passed_over))
            continue
        reason = family.why_not(work, device)
        if reason is None:
            return Chosen(family.name, family.launches(work, device), tuple(passed_over))
        passed_over.append((family.name, reason))
    sentences = "; ".join(f"{name}: {reason}" for name, reason in passed_over)
    raise UnsupportedProblem(f"no GPU kernel computes this: {sentences}")


@dataclass(frozen=True, slots=True)
class Overhead:
    """What a family's launches take in a graph, from what its kernel is expected to take.

    ``start_s`` is the launch itself, and ``scale`` what the family's model is off by; ``copy_s`` is
    each launch beside the kernel, with its bytes, where the model does not count them.
    """

    start_s: float
    scale: float = 1.0
    copy_s: float = 0.0

    def total_s(self, fragment: Fragment) -> float | None:
        """None where the family has no model."""
        if fragment.expected_s is None:
            return None
        total = self.start_s + self.scale * fragment.expected_s
        if self.copy_s:
            copied = 2 * sum(item.size_bytes for item in fragment.workspace)
            total += self.copy_s * (len(fragment.steps) - 1) + copied / COPY_BYTES_S
        return total


COPY_BYTES_S = 3e12


class LeastExpected(Generic[V]):
    """Of several sequences of families, each in order of preference, the one whose first family
    that applies is expected to take the least time.

    Only work that the first sequence computes is considered.
    """

    name = "least_expected"

    def __init__(self, *sides: Sequence[Family[V]], overheads: Mapping[str, Overhead]) -> None:
        """``overheads`` are the families', by name; one without is not compared."""
        self._sides = sides
        self._overheads = overheads

    def without(self, names: Collection[str]) -> tuple[Family[V], ...]:
        """What is left of it but for the families of these names."""
        sides = [tuple(one for one in side if one.name not in names) for side in self._sides]
        left = [side for side in sides if side]
        if len(left) < 2 or not sides[0]:
            return tuple(family for side in left for family in side)
        return (LeastExpected(*left, overheads=self._overheads),)

    def choice(self, work: V, device: CudaDevice) -> tuple[Chosen | None, list[tuple[str, str]]]:
        """What is chosen, unless nothing applies, and why not each of the others."""
        reasons: list[tuple[str, str]] = []
        found: list[Chosen] = []
        for side in self._sides:
            try:
                found.append(choose(side, work, device))
            except UnsupportedProblem:
                reasons += [(one.name, one.why_not(work, device) or "") for one in side]
                if not found:
                    return None, reasons
                continue
            reasons += found[-1].passed_over
        times = [self._total_s(one) for one in found]
        if times[0] is None:
            unknown = f"no time is expected of {found[0].family}"
            return found[0], [*reasons, *((one.family, unknown) for one in found[1:])]
        timed = [
            (time_s, one) for time_s, one in zip(times, found, strict=True) if time_s is not None
        ]
        least_s, winner = min(timed, key=lambda each: each[0])
        for time_s, one in timed:
            if one is not winner:
                expected = f"expected to take {time_s * 1e6:.1f} us"
                reasons.append((one.family, f"{expected}, {winner.family} {least_s * 1e6:.1f}"))
        return winner, reasons

    def _total_s(self, chosen: Chosen) -> float | None:
        overhead = self._overheads.get(chosen.family)
        return None if overhead is None else overhead.total_s(chosen.fragment)

    def why_not(self, work: V, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        chosen, reasons = self.choice(work, device)
        return "; ".join(reason for _, reason in reasons) if chosen is None else None

    def launches(self, work: V, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        chosen, _ = self.choice(work, device)
        if chosen is None:
            raise ValueError("work that why_not refuses")
        return chosen.fragment

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        return [instance for side in self._sides for one in side for instance in one.instances()]
