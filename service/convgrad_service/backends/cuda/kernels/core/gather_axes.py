"""What the dense gather does along each dimension: phases, and the taps that meet in each."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from convgrad_service.plans.cuda.program import ceil_div
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["MAX_PHASES", "Axis", "Phase", "axis_of", "divider", "may_skip"]

MAX_PHASES = 16
"""Along one dimension, in one launch."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Result positions y0 + m*y_step, m below ``count``, and the taps that meet them: position
    m's j-th tap is r0 + j*r_step, and meets the source at x0 + m*x_step + j*x_tap."""

    taps: int
    r0: int
    x0: int
    y0: int
    count: int


@dataclass(frozen=True, slots=True)
class Axis:
    """One dimension of a gather: its phases, the most taps first."""

    x_size: int
    x_step: int
    x_tap: int
    y_step: int
    r_step: int
    phases: tuple[Phase, ...]


def axis_of(work: ConvWork, dim: int) -> Axis:
    """Forward one phase; backward one for each residue of the stride, without inserted zeros."""
    stride, dilation, pad = work.stride[dim], work.dilation[dim], work.pad[dim]
    kernel, size_in, size_out = work.kernel[dim], work.input[dim], work.output[dim]
    if work.direction == "fwd":
        return Axis(size_in, stride, dilation, 1, 1, (Phase(kernel, 0, -pad, 0, size_out),))
    turn = gcd(stride, dilation)
    r_step = stride // turn
    phases = []
    for residue in range(min(stride, size_in)):
        meets = (
            r for r in range(min(r_step, kernel)) if (residue + pad - r * dilation) % stride == 0
        )
        r0 = next(meets, None)
        count = ceil_div(size_in - residue, stride)
        if r0 is None:
            phases.append(Phase(0, 0, 0, residue, count))
        else:
            x0 = (residue + pad - r0 * dilation) // stride
            phases.append(Phase(ceil_div(kernel - r0, r_step), r0, x0, residue, count))
    phases.sort(key=lambda phase: -phase.taps)
    return Axis(size_out, 1, -(dilation // turn), stride, r_step, tuple(phases))


def divider(count: int) -> tuple[int, int]:
    """(f, s) such that n // count == (n * f >> 32) >> s for all n below 2**31; count > 1.

    With 2**l >= count, f = ceil(2**(31 + l) / count) errs by less than 2**l / 2**(31 + l) of n.
    """
    if count == 1:
        return 0, 0
    log = (count - 1).bit_length()
    return ceil_div(2 ** (31 + log), count), log - 1


def may_skip(axes: list[Axis], pixels: int) -> bool:
    """Whether so many neighbouring pixels can lie outside one tap: then tiles look for it."""
    inner = 1
    for axis in reversed(axes):
        for phase in axis.phases:
            for j in range(phase.taps):
                first = phase.x0 + j * axis.x_tap
                before = ceil_div(max(0, -first), axis.x_step)
                reach = axis.x_size - first
                inside = max(0, min(phase.count, ceil_div(max(0, reach), axis.x_step)) - before)
                after = phase.count - before - inside
                if max(before, after) * inner >= pixels:
                    return True
        inner *= max(phase.count for phase in axis.phases)
    return False
