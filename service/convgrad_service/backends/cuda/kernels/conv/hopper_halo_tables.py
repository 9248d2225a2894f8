"""What hopper_halo.cu's tables say: which boxes of the source a tile needs, and which products with
which weights make its results. Pure arithmetic over the axes of a gather."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import gcd

from convgrad_service.backends.cuda.kernels.core.gather_axes import Axis, Phase
from convgrad_service.plans.cuda.program import ceil_div
from convgrad_service.plans.cuda.works import Size3

__all__ = [
    "CHUNK",
    "TAP_BYTES",
    "Halo",
    "HaloLoad",
    "HaloPass",
    "HaloStep",
    "HaloTap",
    "Tables",
    "depth_step",
    "halo_of",
    "tables_of",
]

CHUNK = 32
"""Channels of the source in a box."""
TAP_BYTES = 4096
"""Weights of one tap and a chunk: for 64 of the result's channels, or for 32 of them with the tap
before it."""
MOST_RUN = 5
"""Taps of a load."""


@dataclass(frozen=True, slots=True)
class Halo:
    """Source positions that meet a tile, in slices along H and W, each of every so manyth position
    as the gather steps.

    ``slices`` are offsets from the tile's first position, along D of the slice, along H and W of
    its first row and pixel. ``first`` are the least numbers of the rows and pixels that any tap
    meets in its slice, and ``beyond`` how many more there are than a tile has positions.
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
    """See ``hopper_halo_args.cuh``; ``weight`` in bytes."""

    pixel: int
    weight: int


@dataclass(frozen=True, slots=True)
class HaloLoad:
    """See ``hopper_halo_args.cuh``; ``to`` in bytes, ``tap``, the first one, along T, R, S."""

    to: int
    tap: Size3
    block: int


@dataclass(frozen=True, slots=True)
class Tables:
    """All of a tile's passes.

    A load brings ``run`` taps along S, a step of ``s_step`` between them; where products have two
    depths, both their taps along T, ``t_step`` apart. ``slot_bytes`` is what a step's weights take,
    or, where they stay, those of all steps.
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
    """Of the source position that each tap of a phase meets."""
    return [phase.x0 + j * axis.x_tap for j in range(phase.taps)]


def halo_of(axes: Sequence[Axis], *, twice: bool) -> Halo:
    """``twice`` where a product has the results of two neighbouring depths."""
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
    # Of all that are met; that nothing meets a whole slice is rare.
    rests = [
        sorted({offset % step for offset in along})
        for along, step in zip(met[1:], steps, strict=True)
    ]
    slices = tuple(
        (d, h + first[0] * steps[0], w + first[1] * steps[1]) for d, h, w in product(met[0], *rests)
    )
    return Halo(slices, first, beyond)


def depth_step(axes: Sequence[Axis]) -> int | None:
    """From the tap of one depth to that with which the next one meets the same source; None where
    they meet none together."""
    shift, rest = divmod(axes[0].x_step, abs(axes[0].x_tap))
    return None if rest else shift * axes[0].r_step


def tables_of(
    axes: Sequence[Axis],
    halo: Halo,
    row_pixels: int,
    *,
    twice: bool,
    blocks: int,
    stay: bool,
) -> Tables:
    """``blocks`` of 64 result channels a tile; ``stay`` where all weights are in shared memory, one
    step's behind another's."""
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
    """The taps of a phase that meet a slice, those of a row together: a pixel of it, and the
    weight's tap, the lesser along T of two, one of which may lie outside the kernel."""
    axis, phase = axes[0], phases[0]
    depths = {offset: j for j, offset in enumerate(offsets_of(axis, phase))}
    here, before = depths.get(place[0]), depths.get(place[0] - axis.x_step) if twice else None
    if here is None and before is None:
        return []
    shift = axis.x_step // abs(axis.x_tap) if twice else 0
    # Of a deeper position the same source is at a tap before, or behind where taps run backwards.
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
