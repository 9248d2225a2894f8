"""Kernel families, and how one is chosen for a piece of work.

A family is one kernel source and its host side: for a piece of work it returns the launches that
compute it, or the reason why it does not apply. The families of a role are in order of preference;
the last one applies to everything.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Generic, Protocol, TypeVar

from convgrad.errors import UnsupportedProblem
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch
from convgrad_service.plans.cuda.works import (
    ChannelSums,
    ConvWork,
    Copy,
    FusedWork,
    PoolWork,
    UnpoolWork,
    WindowWork,
)

__all__ = ["Chosen", "Families", "Family", "FastestExpected", "Overhead", "Selector", "Work"]
__all__ += ["COPY_BYTES_S", "Solver", "choose", "first_of"]

Work = ConvWork | FusedWork | ChannelSums | PoolWork | WindowWork | UnpoolWork | Copy
W = TypeVar("W", bound=Work, contravariant=True)
V = TypeVar("V", bound=Work)
C = TypeVar("C")


class Family(Protocol[W]):
    """One kernel source and its host side. Pure: no GPU, no CuPy."""

    name: str

    def why_not(self, work: W, device: CudaDevice) -> str | None:
        """Return in words why this family does not compute this work; None if it does."""
        ...

    def launches(self, work: W, device: CudaDevice) -> Fragment:
        """Return the launches that compute it; called only if `why_not` returned None."""
        ...

    def instances(self) -> Iterable[Instance]:
        """Return every instance that `launches` can use, each once."""
        ...


class Solver(ABC, Generic[V, C]):
    """A family that chooses a configuration for a piece of work, from which its launches follow.

    A configuration is a tile and how the work is divided among blocks: with the work, all that
    decides the launches, and so the order of additions.
    """

    name: str
    _solved: tuple[V, CudaDevice, Fragment | str] | None = None

    @abstractmethod
    def solve(self, work: V, device: CudaDevice) -> C | str:
        """Return the configuration with the least cost, or why the family does not compute this."""

    @abstractmethod
    def fragment(self, work: V, device: CudaDevice, config: C) -> Fragment:
        """Return the launches with a configuration: the chosen one, or another for a test.

        They may be more than the device can run; the work is then refused.
        """

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`; none of its own if the launches are those of other families."""
        return ()

    def why_not(self, work: V, device: CudaDevice) -> str | None:
        found = self._solution(work, device)
        return found if isinstance(found, str) else None

    def launches(self, work: V, device: CudaDevice) -> Fragment:
        found = self._solution(work, device)
        if isinstance(found, str):
            raise ValueError(found)
        return found

    def _solution(self, work: V, device: CudaDevice) -> Fragment | str:
        """Return the launches, or why there are none; kept for `launches` after `why_not`."""
        solved = self._solved
        if solved is None or solved[0] is not work or solved[1] is not device:
            config = self.solve(work, device)
            found = config if isinstance(config, str) else self._launchable(work, device, config)
            solved = self._solved = work, device, found
        return solved[2]

    def _launchable(self, work: V, device: CudaDevice, config: C) -> Fragment | str:
        """Return the launches of a configuration, or why the device cannot run one of them."""
        fragment = self.fragment(work, device, config)
        steps = (step for step in fragment.steps if isinstance(step, Launch))
        refused = (device.why_not_launched(step.grid, step.shared_bytes) for step in steps)
        return next(filter(None, refused), fragment)


@dataclass(frozen=True, slots=True)
class Families:
    """The families of each role, in order of preference; ``fused`` may be empty."""

    fwd: Sequence[Family[ConvWork]]
    bwd_data: Sequence[Family[ConvWork]]
    bwd_weight: Sequence[Family[ConvWork]]
    fused: Sequence[Family[FusedWork]]
    channel_sums: Sequence[Family[ChannelSums]]
    pool_bwd: Sequence[Family[PoolWork]]
    windows: Sequence[Family[WindowWork]]
    unpool: Sequence[Family[UnpoolWork]]
    copy: Sequence[Family[Copy]]

    def of(self, work: ConvWork) -> Sequence[Family[ConvWork]]:
        """Return the families of a convolution's direction."""
        roles = {"fwd": self.fwd, "bwd_data": self.bwd_data, "bwd_weight": self.bwd_weight}
        return roles[work.direction]

    def instances(self) -> list[Instance]:
        """Return every instance of every family, each once."""
        found: dict[Instance, None] = {}
        for role in self.__slots__:
            for family in getattr(self, role):
                found |= dict.fromkeys(family.instances())
        return list(found)

    def without(self, names: Collection[str]) -> Families:
        """Return a copy without the families of these names."""
        roles = {role: getattr(self, role) for role in self.__slots__}
        return Families(**{role: _without(families, names) for role, families in roles.items()})


@dataclass(frozen=True, slots=True)
class Chosen:
    """A family's launches, and the families passed over, each with the reason."""

    family: str
    fragment: Fragment
    passed_over: tuple[tuple[str, str], ...]


def choose(families: Sequence[Family[V]], work: V, device: CudaDevice) -> Chosen:
    """Return the launches of the first family that computes this work.

    Raises
    ------
    UnsupportedProblem
        No family does; the message has the reason of each.
    """
    chosen, passed_over = first_of(families, work, device)
    if chosen is None:
        sentences = "; ".join(f"{name}: {reason}" for name, reason in passed_over)
        raise UnsupportedProblem(f"no GPU kernel computes this: {sentences}")
    return chosen


def first_of(
    families: Sequence[Family[V]], work: V, device: CudaDevice
) -> tuple[Chosen | None, list[tuple[str, str]]]:
    """Return what `choose` does, None if no family computes this work; and why others do not."""
    passed_over: list[tuple[str, str]] = []
    for family in families:
        if isinstance(family, Selector):
            chosen, reasons = family.choice(work, device)
            passed_over += reasons
            if chosen is not None:
                return replace(chosen, passed_over=tuple(passed_over)), passed_over
            continue
        reason = family.why_not(work, device)
        if reason is None:
            chosen = Chosen(family.name, family.launches(work, device), tuple(passed_over))
            return chosen, passed_over
        passed_over.append((family.name, reason))
    return None, passed_over


@dataclass(frozen=True, slots=True)
class Overhead:
    """Converts a family's predicted kernel time into its time within a CUDA graph.

    Attributes
    ----------
    start_s : float
        Time of the launch itself.
    scale : float
        Factor on the model's prediction.
    copy_s : float
        Time of each further launch; that of copying its bytes is added. 0 if the model includes
        both.
    """

    start_s: float
    scale: float = 1.0
    copy_s: float = 0.0

    def total_s(self, fragment: Fragment) -> float | None:
        """Return the corrected time; None if the family has no performance model."""
        if fragment.expected_s is None:
            return None
        total = self.start_s + self.scale * fragment.expected_s
        if self.copy_s:
            copied = 2 * sum(item.size_bytes for item in fragment.workspace)
            total += self.copy_s * (len(fragment.steps) - 1) + copied / COPY_BYTES_S
        return total


COPY_BYTES_S = 3e12


class Selector(ABC, Generic[V]):
    """Stands for several families, one of which it chooses for each piece of work."""

    name: str

    @abstractmethod
    def choice(self, work: V, device: CudaDevice) -> tuple[Chosen | None, list[tuple[str, str]]]:
        """Return the chosen family's launches, if any, and why each other one was passed over."""

    @abstractmethod
    def without(self, names: Collection[str]) -> tuple[Family[V], ...]:
        """Return what remains of it without the families of these names."""

    @abstractmethod
    def instances(self) -> Iterable[Instance]:
        """Return the instances of its families; see `Family.instances`."""

    def why_not(self, work: V, device: CudaDevice) -> str | None:
        chosen, reasons = self.choice(work, device)
        return "; ".join(reason for _, reason in reasons) if chosen is None else None

    def launches(self, work: V, device: CudaDevice) -> Fragment:
        chosen, _ = self.choice(work, device)
        if chosen is None:
            raise ValueError("work that why_not refuses")
        return chosen.fragment


def _without(families: Iterable[Any], names: Collection[str]) -> tuple[Any, ...]:
    """Return families without those of these names, here and among those of a selector."""

    def left(family: Any) -> tuple[Any, ...]:
        if isinstance(family, Selector):
            return family.without(names)
        return () if family.name in names else (family,)

    return tuple(chain(*map(left, families)))


class FastestExpected(Selector[V]):
    """Chooses between several sequences of families by predicted time.

    In each of the ``alternatives``, sequences in order of preference, the first family that applies
    is a candidate. The candidate with the least predicted time is chosen. Work that the first
    sequence does not compute is refused, unless that sequence is ``optional``.
    """

    name = "fastest_expected"

    def __init__(
        self,
        *alternatives: Sequence[Family[V]],
        overheads: Mapping[str, Overhead],
        optional: bool = False,
    ) -> None:
        """``overheads`` are by family name; a family without one is chosen only as the first."""
        self.alternatives = alternatives
        self._overheads = overheads
        self._optional = optional

    def without(self, names: Collection[str]) -> tuple[Family[V], ...]:
        reduced = [_without(families, names) for families in self.alternatives]
        left = [families for families in reduced if families]
        if len(left) < 2 or not (reduced[0] or self._optional):
            return tuple(chain(*left))
        return (FastestExpected(*left, overheads=self._overheads, optional=self._optional),)

    def choice(self, work: V, device: CudaDevice) -> tuple[Chosen | None, list[tuple[str, str]]]:
        """See `Selector.choice`: the fastest candidate."""
        reasons: list[tuple[str, str]] = []
        found: list[Chosen] = []
        for families in self.alternatives:
            chosen, passed_over = first_of(families, work, device)
            reasons += passed_over
            if chosen is not None:
                found.append(chosen)
            elif not found and not self._optional:
                return None, reasons
        if not found:
            return None, reasons
        times = [self._total_s(one) for one in found]
        if times[0] is None:
            unknown = f"no time is predicted for {found[0].family}"
            return found[0], [*reasons, *((one.family, unknown) for one in found[1:])]
        timed = [
            (time_s, one) for time_s, one in zip(times, found, strict=True) if time_s is not None
        ]
        least_s, winner = min(timed, key=lambda each: each[0])
        for time_s, one in timed:
            if one.family != winner.family:
                expected = f"expected to take {time_s * 1e6:.1f} us"
                reasons.append((one.family, f"{expected}, {winner.family} {least_s * 1e6:.1f}"))
        return winner, reasons

    def _total_s(self, chosen: Chosen) -> float | None:
        overhead = self._overheads.get(chosen.family)
        return None if overhead is None else overhead.total_s(chosen.fragment)

    def instances(self) -> Iterable[Instance]:
        return [instance for one in chain(*self.alternatives) for instance in one.instances()]
