"""Lookup tables of hopper_halo.cu: the boxes of the source that a tile needs, and the products and
weights of its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import gcd

from convgrad_service.backends.cuda.kernels.core.gather_axes import Axis, Phase
from convgrad_service.plans.cuda.program import ceil_div
from convgrad_service.problems.sizes import Size3

__all__ = ["CHUNK", "TAP_BYTES", "Halo", "Tables", "depth_step", "halo_of", "tables_of"]

CHUNK = 32
"""Source channels in a box."""
TAP_BYTES = 4096
"""Bytes of the weights of one tap and chunk: for 64 result channels, or for 32 at two depths."""
MOST_RUN = 5
"""The most taps per load."""


@dataclass(frozen=True, slots=True)
class Halo:
    """Source positions that a tile reads, as slices with the traversal stride along H and W.

    Attributes
    ----------
    slices
        Offsets (D, H, W) of each slice's first pixel from the tile's first position.
    first
        The lowest row and pixel that any tap reads, in units of the traversal stride.
    beyond
        Rows and pixels of a slice beyond the tile's own.
    """

    slices: tuple[Size3, ...]
    first: tuple[int, int]
    beyond: tuple[int, int]


@dataclass(frozen=True, slots=True)
class HaloPass:
    """See ``hopper_halo_args.cuh``."""

    first_step: int
    steps: int
    y0: Size3
    count: Size3


@dataclass(frozen=True, slots=True)
class HaloStep:
    """See ``hopper_halo_args.cuh``."""

    slice: int
    taps: int
    loads: int
    last: bool
    first_tap: int
    first_load: int


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
    block: int


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables of all passes over a tile.

    Attributes
    ----------
    slot_bytes
        Bytes of the weights of a step, or of all steps if weights are resident.
    run, s_step
        Taps along S per load, and the distance between them.
    t_step
        Distance along T between the taps of the two depths of a product.
    """

    passes: tuple[HaloPass, ...]
    steps: tuple[HaloStep, ...]
    taps: tuple[HaloTap, ...]
    loads: tuple[HaloLoad, ...]
    slot_bytes: int
    run: int
    s_step: int
    t_step: int


def offsets_of(axis: Axis, phase: Phase) -> list[int]:
    """Return the offset of the source position that each tap of a phase reads."""
    return [phase.x0 + j * axis.x_tap for j in range(phase.taps)]


def halo_of(axes: Sequence[Axis], *, twice: bool) -> Halo:
    """Return the halo of a tile; with ``twice``, a product covers two adjacent depths."""
    met = [
        sorted({offset for phase in axis.phases for offset in offsets_of(axis, phase)}) or [0]
        for axis in axes
    ]
    if twice:
        met[0] = sorted({*met[0], *(offset + axes[0].x_step for offset in met[0])})
    steps = axes[1].x_step, axes[2].x_step
    numbers = [
        [offset // step for offset in along] for along, step in zip(met[1:], steps, strict=True)
    ]
    first = min(numbers[0]), min(numbers[1])
    beyond = max(numbers[0]) - first[0], max(numbers[1]) - first[1]
    # The residues of all offsets. Some combinations may be unused, which is rare.
    rests = [
        sorted({offset % step for offset in along})
        for along, step in zip(met[1:], steps, strict=True)
    ]
    slices = tuple(
        (d, h + first[0] * steps[0], w + first[1] * steps[1]) for d, h, w in product(met[0], *rests)
    )
    return Halo(slices, first, beyond)


def depth_step(axes: Sequence[Axis]) -> int | None:
    """Return the distance along T between the taps with which adjacent depths read the same source
    position, or None if they share none."""
    shift, rest = divmod(axes[0].x_step, abs(axes[0].x_tap))
    return None if rest else shift * axes[0].r_step


def tables_of(
    axes: Sequence[Axis], halo: Halo, row_pixels: int, *, twice: bool, blocks: int, stay: bool
) -> Tables:
    """Return the tables of a tile.

    Parameters
    ----------
    row_pixels
        Pixels of a slice's row.
    twice
        Whether a product covers two adjacent depths.
    blocks
        Blocks of 64 result channels per tile.
    stay
        Whether all weights are resident in shared memory, step after step.
    """
    passes: list[HaloPass] = []
    steps: list[HaloStep] = []
    taps: list[HaloTap] = []
    loads: list[HaloLoad] = []
    s_step = axes[2].x_step // gcd(axes[2].x_step, axes[2].x_tap) * axes[2].r_step
    longest = max(ceil_div(phase.taps * axes[2].r_step, s_step) for phase in axes[2].phases)
    run = ceil_div(longest, ceil_div(longest, MOST_RUN))
    slot_bytes = blocks * run * TAP_BYTES
    for phases in product(*(axis.phases for axis in axes)):
        first_step = len(steps)
        for number, place in enumerate(halo.slices):
            for row in _rows_of(axes, phases, place, halo, row_pixels, twice=twice):
                for start in range(0, len(row), run):
                    group = row[start : start + run]
                    at = len(steps) * slot_bytes if stay else 0
                    first_load, first_tap = len(loads), len(taps)
                    for block in range(blocks):
                        to = at + block * run * TAP_BYTES
                        loads.append(HaloLoad(to, group[0][1], block))
                    taps += [
                        HaloTap(pixel, at + i * TAP_BYTES) for i, (pixel, _) in enumerate(group)
                    ]
                    steps.append(HaloStep(number, len(group), blocks, False, first_tap, first_load))
        y0 = phases[0].y0, phases[1].y0, phases[2].y0
        count = phases[0].count, phases[1].count, phases[2].count
        passes.append(HaloPass(first_step, len(steps) - first_step, y0, count))
    for number in range(len(halo.slices)):
        last = max(index for index, step in enumerate(steps) if step.slice == number)
        steps[last] = replace(steps[last], last=True)
    return Tables(
        tuple(passes),
        tuple(steps),
        tuple(taps),
        tuple(loads),
        len(steps) * slot_bytes if stay else slot_bytes,
        run,
        s_step,
        (depth_step(axes) or 1) if twice else 1,
    )


def _rows_of(
    axes: Sequence[Axis],
    phases: Sequence[Phase],
    place: Size3,
    halo: Halo,
    row_pixels: int,
    *,
    twice: bool,
) -> list[list[tuple[int, Size3]]]:
    """Return the taps of a phase that read a slice, grouped by kernel row.

    Each is the pixel of the slice and the tap (T, R, S). With ``twice``, T is the lower one of two,
    of which one may be outside the kernel.
    """
    axis, phase = axes[0], phases[0]
    depths = {offset: j for j, offset in enumerate(offsets_of(axis, phase))}
    here, before = depths.get(place[0]), depths.get(place[0] - axis.x_step) if twice else None
    if here is None and before is None:
        return []
    shift = axis.x_step // abs(axis.x_tap) if twice else 0
    # The deeper position reads the same source with an earlier tap, or with a later one if x_tap is
    # negative.
    if here is None:
        here = (before or 0) + (shift if axis.x_tap > 0 else -shift)
    t = phase.r0 + (here - shift if axis.x_tap > 0 else here) * axis.r_step
    along = [
        [
            (phase.r0 + j * axis.r_step, offset // axis.x_step - first)
            for j, offset in enumerate(offsets_of(axis, phase))
            if (offset - at) % axis.x_step == 0
        ]
        for axis, phase, at, first in zip(axes[1:], phases[1:], place[1:], halo.first, strict=True)
    ]
    rows = [[(row * row_pixels + pixel, (t, r, s)) for s, pixel in along[1]] for r, row in along[0]]
    return [row for row in rows if row]
