"""Choice of hopper_gather's tile by a cost model.

The scheduling of tiles to SMs, and the taps that each tile reads, are known before a launch. The
model counts the k-tiles of the busiest SM, at the rate measured for the tile shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd, prod

import numpy as np
from numpy.typing import NDArray

from convgrad_service.backends.cuda.kernels.conv.hopper_gather_maps import Combined, combined
from convgrad_service.backends.cuda.kernels.conv.hopper_gather_tiles import (
    MOST_HALO,
    ROW_BYTES,
    HopperTile,
    tiles_of,
)
from convgrad_service.backends.cuda.kernels.core.gather_axes import Axis
from convgrad_service.backends.cuda.kernels.layout.channels_last import in_whole_chunks
from convgrad_service.backends.cuda.tuning.correction import MOST_CORRECTED, correction_of
from convgrad_service.backends.cuda.tuning.features import features
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import ceil_div
from convgrad_service.plans.cuda.works import ConvWork

__all__ = [
    "Schedule",
    "candidates",
    "choose_schedule",
    "expected_s",
    "finishes_rows",
    "is_plain",
    "kept_taps",
    "launch_s",
    "lines",
    "may_pingpong",
    "may_start_with_images",
    "pixels_beside",
    "stores_planes",
]

# Activations that the plain epilogue supports: clamps, which do not round.
CLAMPING = ("none", "relu", "relu6")
# Bytes of the source that the phases of a round read, so that they stay in the L2 cache.
ROUND_BYTES = 8 * 2**20
# The fewest waves of a round.
ROUND_TURNS = 3
MOST_COUNTED = 1 << 16
# Slowdown of PINGPONG with images as the fastest coordinate (1.1 to 1.4 as measured).
PINGPONG_BY_IMAGE = 1.13
# PINGPONG addresses results in 32-bit units of 16 bytes; the largest value marks no result.
MOST_CHUNKS = 2**32 - 1
# From the time of the busiest SM to that of a launch in a graph, fitted on an H200.
START_S, SCALE = 5.9e-6, 1.09
# Bytes of a row that a wgmma multiplies.
MMA_BYTES = 32
# With a larger stride, pixels of a phase are not contiguous in the result.
MOST_STRIDE = 1


@dataclass(frozen=True, slots=True)
class Schedule:
    """The tile, whether images are the fastest coordinate of pixels, and the number of rounds over
    the phases."""

    tile: HopperTile
    images_first: bool = False
    rounds: int = 1

    def __str__(self) -> str:
        return f"{self.tile}_by_image" if self.images_first else str(self.tile)


def stores_planes(work: ConvWork) -> bool:
    """Return whether results are stored as runs of pixels: channels first, with adjacent pixels of
    a tile contiguous in the result."""
    stride = work.stride if work.direction == "bwd_data" else (1, 1, 1)
    return (
        work.epilogue_free
        and work.result.strides[2] != 1
        and pixels_beside(work) > 0
        and max(stride) <= MOST_STRIDE
    )


def pixels_beside(work: ConvWork) -> int:
    """Return the number of pixels per vector store, or 0 if pixels are not contiguous.

    The vectors are aligned, and evenly divide each channel of each image.
    """
    result, inner = work.result, 1
    for extent, stride in zip(reversed(work.sizes[1]), reversed(result.strides[3:]), strict=True):
        if extent > 1 and stride != inner:
            return 0
        inner *= extent
    if work.direction == "bwd_data" and max(work.stride) > 1:
        return 1
    most = 16 // result.dtype.itemsize
    return gcd(inner, result.strides[0] if work.batch > 1 else 0, result.strides[2], most)


def may_start_with_images(work: ConvWork, axes: Sequence[Axis]) -> bool:
    """Return whether images can be the fastest coordinate of pixels.

    They cannot with a stride along the slowest dimension, which has no traversal stride in TMA.
    """
    return axes[3 - work.conv.ndim].x_step == 1


def may_split(work: ConvWork, axes: Sequence[Axis], device: CudaDevice, tile: HopperTile) -> bool:
    """Return whether all tiles can run at once, one cluster each."""
    waves = 3 if tile.single and tile.split == 1 else 1
    return count_tiles(work, axes, tile) <= tile.clusters(device) * waves


def is_plain(work: ConvWork) -> bool:
    """Return whether results are sums without an epilogue, in whole, aligned chunks of channels."""
    extents = (work.batch, 1, work.channels[1], *work.sizes[1])
    return work.epilogue_free and in_whole_chunks(work.result, extents, 2)


def finishes_rows(work: ConvWork, axes: Sequence[Axis]) -> bool:
    """Return whether results with a bias or a clamping activation can be stored like plain ones.

    This requires 16-bit types, whole, aligned chunks of channels, and a single phase.
    """
    plain = replace(work, bias=None, activation="none")
    return (
        is_plain(plain)
        and not work.epilogue_free
        and work.activation in CLAMPING
        and work.dtype.itemsize == work.result_dtype.itemsize == 2
        and all(len(axis.phases) == 1 for axis in axes)
    )


def may_pingpong(work: ConvWork, axes: Sequence[Axis]) -> bool:
    """Return whether tiles can run ping-pong.

    Results must be plain, or stored like plain ones, and addressable in 32-bit units of chunks.
    """
    result = work.result
    extents = (work.batch, *work.sizes[1])
    strides = (result.strides[0], *result.strides[3:])
    reach = sum((count - 1) * stride for count, stride in zip(extents, strides, strict=True))
    rows = is_plain(work) or finishes_rows(work, axes)
    return rows and reach * result.dtype.itemsize // 16 < MOST_CHUNKS


def count_tiles(work: ConvWork, axes: Sequence[Axis], tile: HopperTile) -> int:
    """Return the number of cluster tiles over all phases."""
    pixels = [
        ceil_div(work.batch * d.count * h.count * (w.count + tile.halo(axes[2], w)), tile.pixels)
        for d, h, w in combined(axes)
    ]
    return sum(pixels) * ceil_div(work.channels[1], tile.n)


def kept_taps(
    axes: Sequence[Axis], phase: Combined, batch: int, pixels: int, images_first: bool
) -> NDArray[np.int64]:
    """Return the number of taps that each tile of ``pixels`` reads, as ``taps_inside`` of
    hopper_gather.cuh computes it."""
    counts = [along.count for along in reversed(phase)]
    extents = [batch, *counts[:2]] if images_first else counts
    everything = batch * prod(counts)
    first = np.arange(0, everything, pixels, dtype=np.int64)
    last = np.minimum(first + pixels, everything) - 1
    kept = np.ones_like(first)
    # From the fastest dimension to the slowest: a tile's first and last coordinate, and how often
    # it wraps around in between.
    for i in range(4):
        dim = 3 - i if images_first else 2 - i
        if i < 3 and extents[i] == 1:
            if 0 <= dim < 3:
                axis, along = axes[dim], phase[dim]
                read = (along.x0 + j * axis.x_tap for j in range(along.taps))
                kept *= sum(0 <= at < axis.x_size for at in read)
            continue
        if i < 3:
            (above_first, start), (above_last, stop) = (
                np.divmod(each, extents[i]) for each in (first, last)
            )
            turns = above_last - above_first
            first, last = above_first, above_last
        else:
            start, stop, turns = first, last, np.zeros_like(first)
        if not 0 <= dim < 3:
            continue
        axis, along = axes[dim], phase[dim]
        start = np.where(turns > 1, 0, start)
        stop = np.where(turns > 1, along.count - 1, stop)
        # A row for each tap.
        at = along.x0 + np.arange(along.taps)[:, None] * axis.x_tap

        def meets(a: NDArray[np.int64] | int, b: NDArray[np.int64] | int) -> NDArray[np.bool_]:
            step, size = axis.x_step, axis.x_size  # noqa: B023 - called here alone
            return np.asarray((at + a * step < size) & (at + b * step >= 0))  # noqa: B023

        met = meets(start, stop)
        if np.any(turns == 1):
            broken = meets(start, along.count - 1) | meets(0, stop)
            met = np.where(turns == 1, broken, met)
        kept *= np.count_nonzero(met, axis=0)
    return kept


@lru_cache(maxsize=32)
def _taps_of_tiles(
    axes: tuple[Axis, ...], batch: int, pixels: int, images_first: bool
) -> NDArray[np.int64]:
    """Return `kept_taps` of all phases, concatenated. Cached, as many tile shapes share them."""
    return np.concatenate(
        [kept_taps(axes, phase, batch, pixels, images_first) for phase in combined(axes)]
    )


def shares_rows(axes: Sequence[Axis], tile: HopperTile) -> bool:
    """Return whether all taps of a kernel row can share a tile's pixels."""
    phases, axis = combined(axes), axes[2]
    along = axis.phases[0]
    return (
        len(phases) == 1
        and along.taps == tile.taps
        and axis.x_step == 1
        and tile.halo(axis, along) <= MOST_HALO
    )


def skips_taps(
    work: ConvWork, axes: Sequence[Axis], tile: HopperTile, images_first: bool
) -> bool:
    """Return whether some tile does not read the source with all taps of its phase."""
    if tile.taps > 1:
        return True
    taps = _taps_of_tiles(tuple(axes), work.batch, tile.pixels, images_first)
    every = np.concatenate(
        [
            np.full(
                ceil_div(work.batch * prod(along.count for along in phase), tile.pixels),
                prod(along.taps for along in phase),
            )
            for phase in combined(axes)
        ]
    )
    return bool(np.any(taps < every))


def choose_schedule(
    work: ConvWork, axes: Sequence[Axis], device: CudaDevice
) -> tuple[float, Schedule]:
    """Return the schedule with the least expected time, and that in seconds.

    All schedules without split-K give bitwise equal results.
    """
    every = [
        (launch_s(expected_s(work, axes, device, schedule)), schedule)
        for schedule in candidates(work, axes, device)
        if not (schedule.tile.single or schedule.tile.lean or schedule.tile.blocks > 1)
    ]
    found = sorted(every, key=lambda one: one[0])[:MOST_CORRECTED]
    correction = correction_of("hopper_gather", device)
    if correction is None or work.dtype.itemsize != 2:
        return found[0]
    factors = correction.factors(lines(work, axes, device, found))
    times = [time_s * float(factor) for (time_s, _), factor in zip(found, factors, strict=True)]
    best = min(range(len(found)), key=times.__getitem__)
    return times[best], found[best][1]


def launch_s(busy_s: float) -> float:
    """Return the expected seconds of a launch in a graph from those of its busiest SM."""
    return START_S + SCALE * busy_s


def lines(
    work: ConvWork,
    axes: Sequence[Axis],
    device: CudaDevice,
    found: Sequence[tuple[float, Schedule]],
) -> NDArray[np.float64]:
    """Return the `features` of schedules with their expected seconds."""
    read, written = work.channels
    phases = combined(axes)
    pixels = [work.batch * prod(along.count for along in phase) for phase in phases]
    taps = sum(
        count * prod(along.taps for along in phase)
        for count, phase in zip(pixels, phases, strict=True)
    )
    tiles = [schedule.tile for _, schedule in found]
    whole = in_whole_chunks(work.result, (work.batch, 1, written, *work.sizes[1]), 2)
    elements = work.batch * (
        work.in_channels * prod(work.input) + work.out_channels * prod(work.output)
    )
    elements += work.taps * read * written
    return features(
        expected_s=[time_s for time_s, _ in found],
        rows=sum(pixels),
        columns=written,
        depth=max(1.0, read * taps / sum(pixels)),
        m=[tile.pixels for tile in tiles],
        n=[tile.n for tile in tiles],
        k=ROW_BYTES // work.dtype.itemsize,
        inner=[tile.split for tile in tiles],
        outer=1,
        workers=[tile.clusters(device) * tile.split for tile in tiles],
        moved=elements * work.dtype.itemsize,
        kind=[tile.pingpong + 2 * (tile.sharing > 1) + 4 * (not whole) for tile in tiles],
        order=[schedule.images_first for _, schedule in found],
    )


def candidates(work: ConvWork, axes: Sequence[Axis], device: CudaDevice) -> Iterator[Schedule]:
    read, written = work.channels
    source = work.batch * read * work.dtype.itemsize * prod(axis.x_size for axis in axes)
    phases, planes = combined(axes), stores_planes(work)
    pads = any(
        along.x0 + j * axis.x_tap < 0
        or along.x0 + j * axis.x_tap + (along.count - 1) * axis.x_step >= axis.x_size
        for axis in axes
        for along in axis.phases
        for j in range(along.taps)
    )
    pingpongs = may_pingpong(work, axes)
    for tile in tiles_of(work.dtype):
        if tile.pingpong and not (pingpongs and (work.epilogue_free or tile.has_epilogue)):
            continue
        if tile.n - written >= 64 and tile.n > 64:
            continue
        if tile.split > 1 or tile.single:
            if tile.taps > 1 and not shares_rows(axes, tile):
                continue
            if not planes and may_split(work, axes, device, tile):
                yield Schedule(tile)
                if tile.single and tile.taps == 1 and pads and work.batch >= 4 and may_start_with_images(work, axes):
                    yield Schedule(tile, True)
            continue
        rounds = 1
        if len(phases) > 1:
            pixels = sum(work.batch * prod(along.count for along in phase) for phase in phases)
            turns = ceil_div(pixels, tile.m) * ceil_div(written, tile.n) // device.multiprocessors
            rounds = max(1, min(source // ROUND_BYTES, turns // ROUND_TURNS))
        yield Schedule(tile, False, rounds)
        if pads and not planes and work.batch >= 4 and may_start_with_images(work, axes):
            yield Schedule(tile, True, rounds)


def expected_s(
    work: ConvWork, axes: Sequence[Axis], device: CudaDevice, schedule: Schedule
) -> float:
    """Return the expected seconds of the busiest SM, or cluster."""
    tile = schedule.tile
    read, written = work.channels
    chunks = ceil_div(read * work.dtype.itemsize, ROW_BYTES)
    columns = ceil_div(written, tile.n)
    workers = tile.clusters(device)
    taps = _taps_of_tiles(tuple(axes), work.batch, tile.pixels, schedule.images_first)
    counts = np.repeat(taps * chunks, columns)
    across = work.direction == "bwd_data" and work.dtype.itemsize == 2
    step_s = tile.step_s(across)
    if tile.split == 1:
        # Of the last chunk of channels, only wgmmas with channels run, and only those are loaded.
        step_s *= ceil_div(read * work.dtype.itemsize, MMA_BYTES) * MMA_BYTES / (chunks * ROW_BYTES)
    else:
        step_s = max(step_s, tile.split_step_s(min(len(counts), workers)))
    products = np.ceil(counts / tile.split) * step_s
    if tile.pingpong and schedule.images_first:
        products *= PINGPONG_BY_IMAGE
    beside = tile.tile_s(work.result_dtype.itemsize)
    if len(counts) > MOST_COUNTED:
        times = products if tile.pingpong else products + beside
        return float(times.sum() / workers + times.max() / 2)
    worker, turn = _waves(len(counts), workers)
    if not tile.pingpong:
        return float(np.bincount(worker, weights=products + beside).max())
    # Mainloops run one after another, while the other warpgroup's epilogue overlaps.
    together = float(np.bincount(worker, weights=products).max()) + beside
    alone = float(np.bincount(worker * 2 + turn, weights=products + beside).max())
    return max(together, alone)


@lru_cache(maxsize=64)
def _waves(tiles: int, workers: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return each tile's SM, or cluster, and whether its wave goes back. Cached, as schedules with
    equally many tiles share them."""
    turn, place = np.divmod(np.arange(tiles), workers)
    turn %= 2
    return np.where(turn, workers - 1 - place, place), turn
