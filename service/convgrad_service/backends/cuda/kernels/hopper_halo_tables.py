"""What hopper_halo.cu's tables say: which boxes of the source a tile needs, and which products with
which weights make its results. Pure arithmetic over the axes of a gather."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from convgrad_service.backends.cuda.kernels.dense_axes import Axis, Phase
from convgrad_service.plans.cuda_works import Size3

__all__ = ["Halo", "HaloLoad", "HaloPass", "HaloStep", "HaloTap", "Tables", "halo_of", "tables_of"]

CHUNK = 32
"""Channels of the source in a box."""
HALF_BYTES, BLOCK_BYTES = 2048, 4096
"""Weights of one tap and a chunk: for 32 and for 64 of the result's channels."""


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
    """See ``hopper_halo_args.cuh``; ``to`` in bytes, ``tap`` along T, R, S."""

    to: int
    tap: Size3
    block: int


@dataclass(frozen=True, slots=True)
class Tables:
    """All of a tile's passes. ``slot_bytes`` is what the weights of the largest step take, or,
    where they stay, those of all steps."""

    passes: tuple[HaloPass, ...]
    steps: tuple[HaloStep, ...]
    taps: tuple[HaloTap, ...]
    loads: tuple[HaloLoad, ...]
    slot_bytes: int


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


def tables_of(
    axes: Sequence[Axis],
    halo: Halo,
    row_pixels: int,
    *,
    twice: bool,
    blocks: int,
    stay: bool,
    taps_a_step: int,
) -> Tables:
    """``blocks`` of 64 result channels a tile; ``stay`` where all weights are in shared memory, one
    step's behind another's."""
    passes: list[HaloPass] = []
    steps: list[HaloStep] = []
    taps: list[HaloTap] = []
    loads: list[HaloLoad] = []
    slot_bytes = 0
    at = 0  # where the weights of the next tap go
    for phases in product(*(axis.phases for axis in axes)):
        first_step = len(steps)
        for number, place in enumerate(halo.slices):
            met = _taps_of(axes, phases, place, halo, row_pixels, twice=twice)
            for start in range(0, len(met), taps_a_step):
                group = met[start : start + taps_a_step]
                first_tap, first_load = len(taps), len(loads)
                if not stay:
                    at = 0
                for pixel, boxes in group:
                    taps.append(HaloTap(pixel, at))
                    if twice:
                        halves = [at, at + HALF_BYTES]
                        loads += [
                            HaloLoad(to, tap, 0) for to, tap in zip(halves, boxes, strict=True)
                        ]
                        at += 2 * HALF_BYTES
                    else:
                        for block in range(blocks):
                            loads.append(HaloLoad(at, boxes[0], block))
                            at += BLOCK_BYTES
                slot_bytes = max(slot_bytes, at)
                steps.append(
                    HaloStep(
                        number,
                        len(group),
                        len(loads) - first_load,
                        False,
                        first_tap,
                        first_load,
                    )
                )
        y0 = phases[0].y0, phases[1].y0, phases[2].y0
        count = phases[0].count, phases[1].count, phases[2].count
        passes.append(HaloPass(first_step, len(steps) - first_step, y0, count))
    for number in range(len(halo.slices)):
        last = max(index for index, step in enumerate(steps) if step.slice == number)
        steps[last] = replace(steps[last], last=True)
    return Tables(tuple(passes), tuple(steps), tuple(taps), tuple(loads), slot_bytes)


def _taps_of(
    axes: Sequence[Axis],
    phases: Sequence[Phase],
    place: Size3,
    halo: Halo,
    row_pixels: int,
    *,
    twice: bool,
) -> list[tuple[int, list[Size3]]]:
    """The taps of a phase that meet a slice: a pixel of it, and the weight's tap, or the two of
    them, where one may lie outside the kernel."""
    depths = {offset: j for j, offset in enumerate(offsets_of(axes[0], phases[0]))}
    found = [depths.get(place[0])]
    if twice:
        found.append(depths.get(place[0] - axes[0].x_step))
    if all(j is None for j in found):
        return []
    along = [
        [
            (phase.r0 + j * axis.r_step, offset // axis.x_step - first)
            for j, offset in enumerate(offsets_of(axis, phase))
            if (offset - at) % axis.x_step == 0
        ]
        for axis, phase, at, first in zip(axes[1:], phases[1:], place[1:], halo.first, strict=True)
    ]
    taps: list[tuple[int, list[Size3]]] = []
    for (r, row), (s, pixel) in product(*along):
        boxes = [(-1 if j is None else phases[0].r0 + j * axes[0].r_step, r, s) for j in found]
        taps.append((row * row_pixels + pixel, boxes))
    return taps
