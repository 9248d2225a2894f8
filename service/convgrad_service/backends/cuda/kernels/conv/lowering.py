"""Families that lower a convolution to another one, which other families compute."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import COPY_BYTES_S, Family, Solver, choose
from convgrad_service.plans.cuda.program import Fragment, Instance, Step, Workspace
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["Lowered", "LoweringFamily"]


@dataclass(frozen=True, slots=True)
class Lowered:
    """A convolution that computes another one's result, or what a last launch makes it from.

    Attributes
    ----------
    work : ConvWork
    before : tuple of Step
        Make its operands.
    workspace : tuple of Workspace
        Of ``before``, and between the launches.
    """

    work: ConvWork
    before: tuple[Step, ...] = ()
    workspace: tuple[Workspace, ...] = ()


class LoweringFamily(Solver[ConvWork, Lowered]):
    """The first of ``families`` that takes the lowered convolution, between launches of its own.

    The order of additions is that family's.
    """

    copy_s: float | None = None
    """Of each launch of its own, besides its workspace's bytes; None if predicted times are those
    of the lowered convolution, without these."""
    suffix: str | None = None
    """Follows the name of that family's kernel; None if the name of this one precedes it."""

    def __init__(self, families: Sequence[Family[ConvWork]]) -> None:
        self._families = families

    @abstractmethod
    def lowered(self, work: ConvWork, device: CudaDevice) -> Lowered | str:
        """Return the convolution to compute instead, or why there is none."""

    def after(
        self, work: ConvWork, device: CudaDevice, lowered: Lowered, last: Step
    ) -> Iterable[Step]:
        """Return the steps that follow the ``last`` one of the lowered convolution."""
        return ()

    def families_of(self, work: ConvWork) -> Sequence[Family[ConvWork]]:
        """Return the families for such work."""
        return self._families

    def solve(self, work: ConvWork, device: CudaDevice) -> Lowered | str:
        lowered = self.lowered(work, device)
        if isinstance(lowered, str):
            return lowered
        reasons = []
        for family in self.families_of(work):
            reason = family.why_not(lowered.work, device)
            if reason is None:
                return lowered
            reasons.append(reason)
        return "; ".join(reasons)

    def fragment(self, work: ConvWork, device: CudaDevice, lowered: Lowered) -> Fragment:
        chosen = choose(self.families_of(work), lowered.work, device)
        inner = chosen.fragment
        after = tuple(self.after(work, device, lowered, inner.steps[-1]))
        expected_s = inner.expected_s
        if expected_s is not None and self.copy_s is not None:
            copied = 2 * sum(one.size_bytes for one in lowered.workspace)
            expected_s += self.copy_s * len((*lowered.before, *after)) + copied / COPY_BYTES_S
        own = f"{self.name}_{inner.kernel}"
        return replace(
            inner,
            kernel=f"{inner.kernel}_{self.suffix}" if self.suffix else own,
            steps=(*lowered.before, *inner.steps, *after),
            workspace=(*lowered.workspace, *inner.workspace),
            expected_s=expected_s,
            order=f"{chosen.family} {inner.order}",
        )

    def instances(self) -> Iterable[Instance]:
        """Return those of ``families``."""
        return [instance for family in self._families for instance in family.instances()]
