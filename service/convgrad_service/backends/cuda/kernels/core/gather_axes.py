"""The phases of a gather (implicit GEMM of fprop or dgrad) along one dimension, and their taps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import gcd

import numpy as np

from convgrad_service.plans.cuda.program import ceil_div
from convgrad_service.plans.cuda.works import ConvWork
from convgrad_service.problems.sizes import Size3

__all__ = ["MAX_PHASES", "Axes", "Axis", "Combined", "Phase", "divider", "gather_axes"]
__all__ += ["gather_axis", "least_taps", "may_skip_taps"]

MAX_PHASES = 16
"""The most phases along one dimension in one launch."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Result positions y0 + m*y_step, m < ``count``, that use the same taps.

    The j-th of the ``taps`` of position m is r0 + j*r_step, and reads the source at
    x0 + m*x_step + j*x_tap.
    """

    taps: int
    r0: int
    x0: int
    y0: int
    count: int


@dataclass(frozen=True, slots=True)
class Axis:
    """One dimension of a gather. ``phases`` are sorted by taps, the most first."""

    x_size: int
    x_step: int
    x_tap: int
    y_step: int
    r_step: int
    phases: tuple[Phase, ...]


Combined = tuple[Phase, Phase, Phase]
"""A phase along D, H and W."""


class Axes(tuple[Axis, Axis, Axis]):
    """The axes D, H and W of a gather, with what follows from all of them."""

    @cached_property
    def phases(self) -> list[Combined]:
        """The phases of the convolution in descending order of taps."""
        d, h, w = (axis.phases for axis in self)
        every = product(d, h, w)
        return sorted(every, key=lambda each: -each[0].taps * each[1].taps * each[2].taps)

    @cached_property
    def reads_padding(self) -> bool:
        """Whether some tap of some position is outside the source."""
        return any(
            first < 0 or first + (along.count - 1) * axis.x_step >= axis.x_size
            for axis in self
            for along in axis.phases
            for first in (along.x0 + j * axis.x_tap for j in range(along.taps))
        )

    @cached_property
    def _hash(self) -> int:
        return tuple.__hash__(self)

    def __hash__(self) -> int:
        return self._hash


def gather_axes(work: ConvWork) -> Axes:
    """Return the axes of fprop or dgrad; wgrad reads the input as fprop does."""
    sizes = work.kernel, work.stride, work.dilation, work.pad, work.input, work.output
    return _gather_axes(work.direction == "bwd_data", *sizes)


@lru_cache(maxsize=64)
def _gather_axes(backward: bool, *sizes: Size3) -> Axes:
    """Return `gather_axes`. Cached, as the families that one plan compares share them."""
    return Axes(_axis(backward, *(size[dim] for size in sizes)) for dim in range(3))


def gather_axis(work: ConvWork, dim: int) -> Axis:
    """Return one of `gather_axes`."""
    return gather_axes(work)[dim]


def _axis(
    backward: bool,
    kernel: int,
    stride: int,
    dilation: int,
    pad: int,
    size_in: int,
    size_out: int,
) -> Axis:
    """One phase for fprop; for dgrad one per residue of the stride, without inserted zeros."""
    if not backward:
        return Axis(size_in, stride, dilation, 1, 1, (Phase(kernel, 0, -pad, 0, size_out),))
    common = gcd(stride, dilation)
    r_step = stride // common
    phases = []
    for residue in range(min(stride, size_in)):
        taps = (
            r for r in range(min(r_step, kernel)) if (residue + pad - r * dilation) % stride == 0
        )
        r0 = next(taps, None)
        count = ceil_div(size_in - residue, stride)
        if r0 is None:
            phases.append(Phase(0, 0, 0, residue, count))
        else:
            x0 = (residue + pad - r0 * dilation) // stride
            phases.append(Phase(ceil_div(kernel - r0, r_step), r0, x0, residue, count))
    phases.sort(key=lambda phase: -phase.taps)
    return Axis(size_out, 1, -(dilation // common), stride, r_step, tuple(phases))


@lru_cache(maxsize=64)
def least_taps(axis: Axis) -> int:
    """Return the fewest taps, but at least one, with which a position reads inside the source."""
    step, least = abs(axis.x_tap), axis.x_size
    for phase in axis.phases:
        first = phase.x0 + min(0, (phase.taps - 1) * axis.x_tap)
        at = first + axis.x_step * np.arange(phase.count, dtype=np.int64)
        below, reach = -(at // step), (axis.x_size - 1 - at) // step + 1
        inside = np.minimum(reach, phase.taps) - np.maximum(below, 0)
        least = min(least, int(inside.min(where=inside > 0, initial=least)))
    return least


def divider(count: int) -> tuple[int, int]:
    """``Divider`` (divider.cuh) by ``count``: n // count == (n * factor >> 32) >> shift, n < 2**31.

    With 2**l >= count, ceil(2**(31 + l) / count) has a relative error below 2**-31.
    """
    if count == 1:
        return 0, 0
    log = (count - 1).bit_length()
    return ceil_div(2 ** (31 + log), count), log - 1


def may_skip_taps(axes: Axes, pixels: int) -> bool:
    """Whether some tap may read only padding for ``pixels`` consecutive pixels."""
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
