"""Lookup tables of hopper_halo.cu: the boxes of the source that a tile needs, and the products and
weights of its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from convgrad_service.backends.cuda.kernels.core.gather_axes import Axis
from convgrad_service.plans.cuda.program import ceil_div
from convgrad_service.problems.sizes import Size3

__all__ = ["CHUNK", "TAP_BYTES", "Halo", "Tables", "halo_of", "tables_of"]

CHUNK = 32
"""Source channels in a box."""
TAP_BYTES = 4096
"""Bytes of the weights of one tap and chunk: for 64 result channels, or for 32 at two depths."""
MOST_RUN = 5
"""The most taps per load."""


@dataclass(frozen=True, slots=True)
class Halo:
    """Source positions that a tile reads, a slice for each depth.

    Attributes
    ----------
    depths
        Offset of each slice from the tile's first position along D.
    first
        Offsets of the slices' first row and pixel from it along H and W.
    beyond
        Rows and pixels of a slice beyond the tile's own.
    """

    depths: tuple[int, ...]
    first: tuple[int, int]
    beyond: tuple[int, int]


@dataclass(frozen=True, slots=True)
class HaloStep:
    """See ``hopper_halo_args.cuh``."""

    taps: int
    last: bool
    first_tap: int


@dataclass(frozen=True, slots=True)
class HaloTap:
    """See ``hopper_halo_args.cuh``; ``pixel`` is in pixels and ``weight`` in bytes."""

    pixel: int
    weight: int


@dataclass(frozen=True, slots=True)
class HaloLoad:
    """See ``hopper_halo_args.cuh``; ``to`` is in bytes, ``tap`` the first tap (T, R, S)."""

    to: int
    tap: Size3


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables of a tile.

    Attributes
    ----------
    slot_bytes
        Bytes of the weights of a step, or of all steps if weights are resident.
    run
        Taps along S per load.
    """

    steps: tuple[HaloStep, ...]
    taps: tuple[HaloTap, ...]
    loads: tuple[HaloLoad, ...]
    slot_bytes: int
    run: int


def offsets_of(axis: Axis) -> list[int]:
    """Return the offset of the source position that each tap reads."""
    (phase,) = axis.phases
    return [phase.x0 + j * axis.x_tap for j in range(phase.taps)]


def halo_of(axes: Sequence[Axis], *, twice: bool) -> Halo:
    """Return the halo of a tile; with ``twice``, a product covers two adjacent depths."""
    depths, *beside = (offsets_of(axis) for axis in axes)
    rows, pixels = ((min(along), max(along) - min(along)) for along in beside)
    both = {*depths, *(offset + 1 for offset in depths)} if twice else {*depths}
    return Halo(tuple(sorted(both)), (rows[0], pixels[0]), (rows[1], pixels[1]))


def tables_of(
    axes: Sequence[Axis], halo: Halo, row_pixels: int, *, twice: bool, stay: bool
) -> Tables:
    """Return the tables of a tile.

    Parameters
    ----------
    row_pixels
        Pixels of a slice's row.
    twice
        Whether a product covers two adjacent depths.
    stay
        Whether all weights are resident in shared memory, step after step.
    """
    steps: list[HaloStep] = []
    taps: list[HaloTap] = []
    loads: list[HaloLoad] = []
    rows, pixels = (
        [offset - first for offset in offsets_of(axis)]
        for axis, first in zip(axes[1:], halo.first, strict=True)
    )
    run = ceil_div(len(pixels), ceil_div(len(pixels), MOST_RUN))
    slot_bytes = run * TAP_BYTES
    for depth in halo.depths:
        t = _tap_at(axes[0], depth, twice=twice)
        for r, row in enumerate(rows):
            for s in range(0, len(pixels), run):
                group = pixels[s : s + run]
                at = len(steps) * slot_bytes if stay else 0
                steps.append(HaloStep(len(group), False, len(taps)))
                loads.append(HaloLoad(at, (t, r, s)))
                taps += [
                    HaloTap(row * row_pixels + pixel, at + i * TAP_BYTES)
                    for i, pixel in enumerate(group)
                ]
        steps[-1] = replace(steps[-1], last=True)
    every = len(steps) * slot_bytes if stay else slot_bytes
    return Tables(tuple(steps), tuple(taps), tuple(loads), every, run)


def _tap_at(axis: Axis, depth: int, *, twice: bool) -> int:
    """Return the tap along T that reads a slice; with ``twice``, the lower one of two, of which
    one may be outside the kernel."""
    tap = (depth - axis.phases[0].x0) // axis.x_tap
    # The deeper position reads the same source with an earlier tap, or with a later one if x_tap
    # is negative.
    return tap - 1 if twice and axis.x_tap > 0 else tap
