"""Choice of hopper_gather's schedule by a cost model.

The scheduling of tiles to SMs, and the taps that each tile reads, are known before a launch. The
model counts the k-tiles of the busiest SM, at the rate measured for the tile shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from convgrad_service.backends.cuda.kernels.conv.hopper_gather_maps import launched
from convgrad_service.backends.cuda.kernels.conv.hopper_gather_plan import (
    Schedule,
    candidates,
    is_product,
    row_tiles,
    taps_of_tiles,
)
from convgrad_service.backends.cuda.kernels.conv.hopper_gather_tiles import ROW_BYTES, HopperTile
from convgrad_service.backends.cuda.kernels.conv.single_model import Rates, SingleWave, single_s
from convgrad_service.backends.cuda.kernels.core.gather_axes import Axes
from convgrad_service.backends.cuda.kernels.layout.channels_last import in_whole_chunks
from convgrad_service.backends.cuda.tuning.correction import fastest
from convgrad_service.backends.cuda.tuning.features import features
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import ceil_div
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["choose_schedule", "correction_name", "expected_s", "lines"]

MOST_COUNTED = 1 << 16
# Slowdown of PINGPONG with images as the fastest coordinate (1.1 to 1.4 as measured).
PINGPONG_BY_IMAGE = 1.13
# From the time of the busiest SM to that of a launch in a graph, fitted on an H200.
START_S, SCALE = 5.9e-6, 1.09
# The same for products of parts, which start while the operands are split; bytes per second from
# and to memory, and the fraction of the shorter of memory and SM time that is not overlapped.
START_OF_PARTS_S, BYTES_PER_S, BESIDE = 6.7e-6, 6.9e12, 0.12
CHUNK, SECTOR_BYTES = 8, 32
SINGLE = Rates(
    start=4.345,
    copied=141.6,
    l2=11210.0,
    products=1.147,
    step=0.1355,
    apart_a=1.395,
    apart_b=1.287,
    tile=1.242,
    tile_size=0.02536,
    join=1.626,
    joined=0.0632,
    memory=4415.0,
    beside=0.8798,
)
# Fitted to 186 times of 60 random and networks' layers.
SINGLE_OF_PARTS = Rates(
    start=5.36,
    copied=385.0,
    l2=7800.0,
    products=0.956,
    step=1.02,
    apart_a=1.7,
    apart_b=1.7,
    tile=2.67,
    tile_size=0.0533,
    join=0.0,
    joined=0.0125,
    memory=4160.0,
    beside=0.408,
)


@lru_cache(maxsize=16)
def choose_schedule(
    work: ConvWork, axes: Axes, device: CudaDevice, parts: int = 1
) -> tuple[float, Schedule]:
    """Return the schedule with the least expected time, and that in seconds.

    All schedules without split-K give bitwise equal results.
    """
    return fastest(
        correction_name(work),
        (
            (expected_s(work, axes, device, one), one)
            for one in candidates(work, axes, device, parts)
        ),
        lambda found: lines(work, axes, device, found),
        device,
        corrected=work.dtype.itemsize == 2 and parts == 1 and work.groups == 1,
    )


def correction_name(work: ConvWork) -> str:
    """Return the name of the correction, which is another one for plain products."""
    return "hopper_gather" if is_product(work) else "hopper_gather_taps"


def lines(
    work: ConvWork,
    axes: Axes,
    device: CudaDevice,
    found: Sequence[tuple[float, Schedule]],
) -> NDArray[np.float64]:
    """Return the `features` of schedules with their expected seconds."""
    read, written = work.channels
    phases = axes.phases
    pixels = [work.batch * prod(along.count for along in phase) for phase in phases]
    taps = sum(
        count * prod(along.taps for along in phase)
        for count, phase in zip(pixels, phases, strict=True)
    )
    tiles = [schedule.tile for _, schedule in found]
    whole = in_whole_chunks(work.result, (work.batch, work.groups, written, *work.sizes[1]), 2)
    return features(
        expected_s=[time_s for time_s, _ in found],
        rows=sum(pixels),
        columns=work.groups * written,
        depth=max(1.0, read * taps / sum(pixels)),
        m=[tile.pixels for tile in tiles],
        n=[tile.n for tile in tiles],
        k=ROW_BYTES // work.dtype.itemsize,
        inner=[tile.split for tile in tiles],
        outer=1,
        workers=[tile.clusters(device) * tile.split for tile in tiles],
        moved=work.elements * work.dtype.itemsize,
        kind=[
            tile.pingpong
            + 2 * (tile.sharing > 1)
            + 4 * (not whole)
            + 8 * tile.single
            + 16 * (tile.taps > 1)
            + 32 * (tile.blocks > 1)
            for tile in tiles
        ],
        order=[schedule.images_first for _, schedule in found],
    )


def expected_s(work: ConvWork, axes: Axes, device: CudaDevice, schedule: Schedule) -> float:
    """Return the expected seconds of the launches in a graph; others than the first only start."""
    tile, others_s = schedule.tile, START_S * (len(launched(axes)) - 1)
    if tile.single:
        return others_s + _single_s(work, axes, device, schedule)
    busy_s = _busy_s(work, axes, device, schedule)
    if tile.parts > 1:
        memory_s = _moved_bytes(work, tile.parts) / BYTES_PER_S
        both_s = max(busy_s, memory_s) + BESIDE * min(busy_s, memory_s)
        return others_s + START_OF_PARTS_S + both_s
    return others_s + START_S + SCALE * busy_s


def _moved_bytes(work: ConvWork, parts: int) -> int:
    """Return the bytes of the operands' parts and of the result."""
    written = work.batch * work.groups * work.channels[1] * prod(work.sizes[1])
    read = parts * work.dtype.itemsize * (work.elements - written)
    return read + work.result_dtype.itemsize * written


def _single_s(work: ConvWork, axes: Axes, device: CudaDevice, schedule: Schedule) -> float:
    tile = schedule.tile
    read, written = work.channels
    chunks = ceil_div(read * work.dtype.itemsize, ROW_BYTES)
    taps = _tile_steps(work, axes, schedule)
    columns = work.groups * ceil_div(written, tile.n)
    return single_s(
        SingleWave(
            m=tile.m,
            n=tile.n,
            tiles=len(taps) * columns,
            steps=float(taps.max()) * chunks,
            mean_steps=float(taps.mean()) * chunks,
            empty=int((taps == 0).sum()) * columns,
            split=tile.split,
            blocks=tile.blocks,
            slots=tile.clusters(device) * tile.split,
            a_rows=tile.m,
            taps=tile.taps,
            apart=(
                _is_apart(read, work.dtype.itemsize, tile),
                _is_apart(written, work.dtype.itemsize, tile),
            ),
            moved_bytes=work.elements * work.dtype.itemsize,
            parts=tile.parts,
        ),
        SINGLE_OF_PARTS if tile.parts > 1 else SINGLE,
    )


def _tile_steps(work: ConvWork, axes: Axes, schedule: Schedule) -> NDArray[np.int64]:
    """Return the k-tiles of each tile of pixels, for a chunk of channels: its taps, or with several
    taps in a k-tile, its rows of taps, none of which are skipped."""
    tile = schedule.tile
    if tile.taps == 1:
        return taps_of_tiles(axes, work.batch, tile.pixels, schedule.images_first)
    rows = prod(along.taps for along in axes.phases[0][:2])
    return np.full(row_tiles(work, axes, tile)[0], rows)


def _busy_s(work: ConvWork, axes: Axes, device: CudaDevice, schedule: Schedule) -> float:
    """Return the expected seconds of the busiest SM, or cluster."""
    tile = schedule.tile
    read, written = work.channels
    chunks = ceil_div(read * work.dtype.itemsize, ROW_BYTES)
    columns = work.groups * ceil_div(written, tile.n)
    workers = tile.clusters(device)
    taps = _tile_steps(work, axes, schedule)
    counts = np.repeat(taps * chunks, columns)
    across = work.direction == "bwd_data" and work.dtype.itemsize == 2
    # Rows of a partial chunk of channels are whole in shared memory and take as long to copy, and
    # longer if they do not start with a cache line.
    rates = SINGLE_OF_PARTS if tile.parts > 1 else SINGLE
    apart_a, apart_b = (
        slower if _is_apart(channels, work.dtype.itemsize, tile) else 1.0
        for channels, slower in (
            (read, rates.apart_a),
            (written if across else read, rates.apart_b),
        )
    )
    step_s = tile.step_s(across, apart_a, apart_b)
    products = counts * step_s
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


def _is_apart(channels: int, itemsize: int, tile: HopperTile) -> bool:
    """Return whether loads of so many channels take longer: rows that are not whole cache lines,
    or of parts, which are padded to whole chunks, not whole sectors of memory."""
    if tile.parts == 1:
        return channels * itemsize % ROW_BYTES != 0
    return ceil_div(channels, CHUNK) * CHUNK * itemsize % SECTOR_BYTES != 0


@lru_cache(maxsize=64)
def _waves(tiles: int, workers: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return each tile's SM, or cluster, and whether its wave goes back. Cached, as schedules with
    equally many tiles share them."""
    turn, place = np.divmod(np.arange(tiles), workers)
    turn %= 2
    return np.where(turn, workers - 1 - place, place), turn
