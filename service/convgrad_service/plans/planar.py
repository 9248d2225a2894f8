"""The plan of the grouped kernels, which express a convolution as unit-stride plane correlations.

Each tensor is split into stride phases. In each spatial dimension, a tap multiplies result position
t with source position u = t + offset(tap), both counted within their phases. The forward pass reads
x, so the source has the stride's phases; bwd_data writes x, so the result has them. Pure functions
of sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod

import numpy as np
from numpy.typing import NDArray

from convgrad_service.plans.base import round_up
from convgrad_service.plans.cpu_worth import direct_steps, worth_tiling
from convgrad_service.problems.geometry import ConvShape
from convgrad_service.problems.sizes import Size3 as Triple
from convgrad_service.problems.sizes import size3
from convgrad_service.problems.sizes import size3 as triple

__all__ = ["PLANS_KEPT", "PlanarPlan", "Triple", "bwd_data_plan", "bwd_weight_plan", "forward_plan"]
__all__ += ["triple"]

# Target size of a task's planes, to fit the L2 cache. Above the hard limit another kernel runs.
TILE_BYTES = 256 * 1024
SCRATCH_LIMIT_BYTES = 8 * 1024 * 1024
# Small planes share a task, to amortise the cost of claiming it.
TASK_BYTES = 24 * 1024
ENOUGH_TASKS = 64
WORKSPACE_LIMIT_BYTES = 32 * 1024 * 1024
SLACK_VECTORS = 9
# Limits on the tables, which Python builds with one row per tap and phase. Real layers are far
# smaller; beyond the limits, building would take seconds and gigabytes. The plan cache takes a
# hundred megabytes if all plans are of the largest size.
MOST_TAPS, MOST_PHASES, MOST_PAIRS = 8 * 1024, 4 * 1024, 64 * 1024
PLANS_KEPT = 128
# Cost of one phase of one result tile: its loop and its stores.
PHASE_STEPS = 50.0
TAP_WORDS = 5


@dataclass(frozen=True, slots=True, eq=False)
class PlanarPlan:
    """The parameters of one launch, with the names of ``kernels/planar_args.hpp``."""

    src_size: Triple
    dst_size: Triple
    src_step: Triple
    dst_step: Triple
    origin: Triple
    tile: Triple
    tiles: Triple
    box: Triple
    group_block: int
    src_phase: NDArray[np.int64]
    dst_phase: NDArray[np.int64]
    first_tap: NDArray[np.int64]
    taps: NDArray[np.int64]
    """One row per tap: source phase, three offsets, and row-major index in the kernel."""
    splits: int
    tasks: int
    scratch_bytes: int
    workspace_bytes: int
    paired: bool
    """Whether scratch has room for the sums of two phases."""


@dataclass(frozen=True, slots=True)
class _Line:
    """One dimension: the phases of source and result, and the taps of each result phase."""

    src_size: int
    dst_size: int
    src_step: int
    dst_step: int
    src_phases: tuple[int, ...]
    dst_phases: tuple[int, ...]
    taps: tuple[tuple[tuple[int, int, int], ...], ...]
    """For each result phase: (index of the source phase, offset, tap)."""

    @property
    def extent(self) -> int:
        return -(-self.dst_size // self.dst_step)

    @property
    def offsets(self) -> tuple[int, int]:
        values = [offset for taps in self.taps for _, offset, _ in taps] or [0]
        return min(values), max(values)


def _lines(conv: ConvShape) -> list[tuple[int, int, int, int, int, int]]:
    sizes = conv.input_size, conv.kernel_size, conv.output_size, conv.stride, conv.dilation
    before = size3(tuple(pad for pad, _ in conv.padding), 0)
    return list(zip(*map(size3, sizes), before, strict=True))


def _forward_line(
    size: int, kernel: int, out: int, step: int, dilation: int, pad: int, *, keep: bool
) -> _Line:
    met = []
    for tap in range(kernel):
        offset, phase = divmod(tap * dilation - pad, step)
        # Source elements are phase + u * step with u = t + offset: is any t inside?
        last = (size - 1 - phase) // step
        if keep or (offset <= last and offset + out - 1 >= 0):
            met.append((phase, offset, tap))
    phases = tuple(sorted({phase for phase, _, _ in met})) or (0,)
    taps = tuple((phases.index(phase), offset, tap) for phase, offset, tap in met)
    return _Line(size, out, step, 1, phases, (0,), (taps,))


def _bwd_data_line(size: int, kernel: int, out: int, step: int, dilation: int, pad: int) -> _Line:
    phases = tuple(range(min(step, size)))
    taps = []
    for phase in phases:
        met = []
        for tap in range(kernel):
            offset, rest = divmod(phase + pad - tap * dilation, step)
            last = (size - 1 - phase) // step
            if rest == 0 and offset < out and offset + last >= 0:
                met.append((0, offset, tap))
        taps.append(tuple(met))
    return _Line(out, size, 1, step, (0,), phases, tuple(taps))


@lru_cache(maxsize=PLANS_KEPT)
def forward_plan(conv: ConvShape, acc_bytes: int, lanes: int, swap: bool) -> PlanarPlan | None:
    """Plan a forward pass; None if another kernel should run.

    Parameters
    ----------
    acc_bytes, lanes : int
        Size of the accumulator type, and number of accumulators in a vector.
    swap : bool
        Whether channels are contiguous, so that blocks are transposed.
    """
    return _plan(conv, partial(_forward_line, keep=False), acc_bytes, lanes, "fwd", swap=swap)


@lru_cache(maxsize=PLANS_KEPT)
def bwd_data_plan(conv: ConvShape, acc_bytes: int, lanes: int, swap: bool) -> PlanarPlan | None:
    """Plan an input gradient; see `forward_plan`."""
    return _plan(conv, _bwd_data_line, acc_bytes, lanes, "bwd_data", swap=swap)


@lru_cache(maxsize=PLANS_KEPT)
def bwd_weight_plan(conv: ConvShape, acc_bytes: int, lanes: int, swap: bool) -> PlanarPlan | None:
    """Plan a weight gradient; see `forward_plan`."""
    return _plan(conv, partial(_forward_line, keep=True), acc_bytes, lanes, "bwd_weight", swap=swap)


def _tables_fit(direction: str, conv: ConvShape) -> bool:
    """Whether the tables of a plan are small enough to build in Python."""
    kernel = conv.kernel_size
    phases = [
        min(step, size if direction == "bwd_data" else taps)
        for step, size, taps in zip(conv.stride, conv.input_size, kernel, strict=True)
    ]
    # The table of a dimension pairs its taps with the result's phases.
    paired = phases if direction == "bwd_data" else [1] * len(phases)
    pairs = sum(taps * phase for taps, phase in zip(kernel, paired, strict=True))
    return prod(kernel) <= MOST_TAPS and prod(phases) <= MOST_PHASES and pairs <= MOST_PAIRS


def _plan(
    conv: ConvShape,
    line_of: Callable[..., _Line],
    acc_bytes: int,
    lanes: int,
    direction: str,
    *,
    swap: bool,
) -> PlanarPlan | None:
    if not _tables_fit(direction, conv):
        return None
    lines = [line_of(*line) for line in _lines(conv)]
    weight = direction == "bwd_weight"
    channels = conv.in_channels_per_group, conv.out_channels_per_group
    if direction == "bwd_data":
        channels = channels[::-1]
    if prod(len(line.src_phases) for line in lines) * channels[0] > SCRATCH_LIMIT_BYTES:
        return None
    if prod(conv.kernel_size) * channels[0] * 8 > SCRATCH_LIMIT_BYTES:
        return None
    kernel = triple(conv.kernel_size, 1)
    src_phase = list(itertools.product(*(line.src_phases for line in lines)))
    dst_phase = list(itertools.product(*(line.dst_phases for line in lines)))
    counts = [len(line.src_phases) for line in lines]
    origin = [line.offsets[0] for line in lines]
    reach = [line.offsets[1] - line.offsets[0] for line in lines]
    rows: list[tuple[int, ...]] = []
    first = [0]
    for taps in itertools.product(*(line.taps for line in lines)):
        for meeting in itertools.product(*taps):
            phase = (meeting[0][0] * counts[1] + meeting[1][0]) * counts[2] + meeting[2][0]
            offsets = [meeting[d][1] - origin[d] for d in range(3)]
            tap = (meeting[0][2] * kernel[1] + meeting[1][2]) * kernel[2] + meeting[2][2]
            rows.append((phase, *offsets, tap))
        first.append(len(rows))

    # Two phases of contiguous columns are written together.
    paired = len(lines[2].dst_phases) == 2 and not swap

    def scratch(tile: list[int], block: int) -> int:
        box = [t + r for t, r in zip(tile, reach, strict=True)]
        plane = round_up(prod(box), lanes)
        source = _up64((block * len(src_phase) * channels[0] * plane + SLACK_VECTORS * lanes) * a)
        terms = channels[0] * len(rows)
        if weight:
            pitch = round_up(tile[0] * box[1] * box[2], lanes)
            return _up64(8 * terms) + source + _up64(block * channels[1] * pitch * a)
        positions = ((tile[0] - 1) * box[1] + tile[1] - 1) * box[2] + tile[2]
        sums = _up64((1 + paired) * block * channels[1] * round_up(positions, lanes) * a)
        return 2 * _up64(8 * terms) + _up64(block * channels[1] * terms * a) + source + sums

    a = acc_bytes
    extent = [line.extent for line in lines]
    tile = list(extent)
    # A block of groups should fill the squares of `lanes` channels that are transposed.
    block = min(conv.groups, -(-lanes // min(channels))) if swap else 1
    while scratch(tile, block) > TILE_BYTES:
        longest = next((d for d in (0, 1) if tile[d] > 1), 2)
        if longest == 2 and tile[2] <= 4 * lanes:
            if block == 1:
                break
            block = -(-block // 2)
            continue
        tile[longest] = -(-tile[longest] // 2)
    if scratch(tile, block) > SCRATCH_LIMIT_BYTES:
        return None
    tiles = [-(-e // t) for e, t in zip(extent, tile, strict=True)]
    tile = [-(-e // n) for e, n in zip(extent, tiles, strict=True)]
    units = conv.batch * prod(tiles)
    while (
        scratch(tile, 2 * block) <= TASK_BYTES
        and conv.groups // (2 * block) * (1 if weight else units) >= ENOUGH_TASKS
    ):
        block *= 2
    blocks = -(-conv.groups // block)
    # Whole vectors are multiplied, including the padding between rows.
    box = [t + r for t, r in zip(tile, reach, strict=True)]
    positions = ((tile[0] - 1) * box[1] + tile[1] - 1) * box[2] + tile[2]
    copied = len(src_phase) * channels[0] * prod(box)
    multiplied = len(rows) * prod(channels) * (positions / lanes + 1)
    steps = units * (conv.groups * (copied + multiplied) + blocks * len(dst_phase) * PHASE_STEPS)
    if not worth_tiling(steps, direct_steps(direction, conv)):
        return None
    weights = conv.out_channels * channels[0] * prod(conv.kernel_size)
    splits = 1
    if weight:
        splits = min(units, -(-ENOUGH_TASKS // blocks))
        splits = max(1, min(splits, WORKSPACE_LIMIT_BYTES // (weights * a)))
    # A weight gradient has a vector of zeros after each plane.
    ends = _up64(block * len(src_phase) * channels[0] * lanes * a) if weight else 0
    return PlanarPlan(
        src_size=size3(tuple(line.src_size for line in lines)),
        dst_size=size3(tuple(line.dst_size for line in lines)),
        src_step=size3(tuple(line.src_step for line in lines)),
        dst_step=size3(tuple(line.dst_step for line in lines)),
        origin=size3(tuple(origin)),
        tile=size3(tuple(tile)),
        tiles=size3(tuple(tiles)),
        box=size3(tuple(box)),
        group_block=block,
        src_phase=np.array(src_phase, np.int64),
        dst_phase=np.array(dst_phase, np.int64),
        first_tap=np.array(first, np.int64),
        taps=np.array(rows, np.int64).reshape(-1, TAP_WORDS),
        splits=splits,
        tasks=blocks * (splits if weight else units),
        scratch_bytes=scratch(tile, block) + ends,
        workspace_bytes=splits * weights * a if weight else 0,
        paired=paired,
    )


def _up64(size_bytes: int) -> int:
    return round_up(size_bytes, 64)
