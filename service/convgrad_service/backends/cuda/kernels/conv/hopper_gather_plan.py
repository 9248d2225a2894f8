"""The schedules of hopper_gather, and what they require of the work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod

import numpy as np
from numpy.typing import NDArray

from convgrad_service.backends.cuda.kernels.conv.hopper_gather_tiles import (
    MOST_HALO,
    ROW_BYTES,
    HopperTile,
    tiles_of,
)
from convgrad_service.backends.cuda.kernels.core.gather_axes import Axes, Combined
from convgrad_service.backends.cuda.kernels.layout.channels_last import in_whole_chunks
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import ceil_div
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["Schedule", "candidates", "finishes_rows", "is_plain", "is_product", "kept_taps"]
__all__ += ["may_pingpong", "may_start_with_images", "pixels_beside", "possible", "row_tiles"]
__all__ += ["skips_taps", "stores_planes", "taps_of_tiles"]

# Activations that the plain epilogue supports: clamps, which do not round.
CLAMPING = ("none", "relu", "relu6")
# Bytes of the source that the phases of a round read, so that they stay in the L2 cache.
ROUND_BYTES = 8 * 2**20
# The fewest waves of a round.
ROUND_TURNS = 3
# PINGPONG addresses results in 32-bit units of 16 bytes; the largest value marks no result.
MOST_CHUNKS = 2**32 - 1
# With a larger stride, pixels of a phase are not contiguous in the result.
MOST_STRIDE = 1
# Single tiles: the most taps of a phase, waves of blocks that do not split K, and tiles of pixels.
MOST_LISTED, MOST_WAVES, MOST_ROWS = 128, 3, 65535


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


def may_start_with_images(work: ConvWork, axes: Axes) -> bool:
    """Return whether images can be the fastest coordinate of pixels.

    They cannot with a stride along the slowest dimension, which has no traversal stride in TMA.
    """
    return axes[3 - work.conv.ndim].x_step == 1


def possible(work: ConvWork, axes: Axes, device: CudaDevice, schedule: Schedule) -> bool:
    """Return whether the kernel of a schedule's tile can compute the work.

    Single tiles must run at once, one cluster each if K is split, or in a few waves. Plain products
    are left to pointwise_gemm, against which they have not been measured.
    """
    return next(_possible(work, axes, device, [schedule]), None) is not None


def _possible(
    work: ConvWork, axes: Axes, device: CudaDevice, schedules: Iterable[Schedule]
) -> Iterator[Schedule]:
    """Yield those of ``schedules`` that are `possible`."""
    along = axes[2].phases[0]
    # With a dilation, two layers took 1.04 and 1.68 of the other tiles' time on an H200.
    shares = len(axes.phases) == 1 and axes[2].x_step == abs(axes[2].x_tap) == 1
    planes, pingpong = stores_planes(work), may_pingpong(work, axes)
    (read, written), parted = work.channels, not is_product(work)
    whole = work.groups == 1 or read * work.dtype.itemsize % ROW_BYTES == 0
    listed = max(d.taps * h.taps * w.taps for d, h, w in axes.phases) <= MOST_LISTED
    for schedule in schedules:
        tile = schedule.tile
        if tile.taps > 1:
            shared = shares and along.taps == tile.taps and not schedule.images_first
            if not shared or tile.halo(axes[2], along) > MOST_HALO:
                continue
        if planes and not (tile.has_planes or tile.parts > 1):
            continue
        if tile.pingpong and not (pingpong and (work.epilogue_free or tile.has_epilogue)):
            continue
        if tile.single:
            # They multiply whole k-tiles.
            if not (whole and listed and (parted or tile.parts > 1)):
                continue
            waves = 1 if tile.split > 1 else MOST_WAVES
            rows = sum(row_tiles(work, axes, tile))
            tiles = rows * work.groups * ceil_div(written, tile.n)
            if rows > MOST_ROWS or tiles > waves * tile.clusters(device):
                continue
        yield schedule


def is_product(work: ConvWork) -> bool:
    """Return whether it is an ungrouped 1x1 convolution of stride 1."""
    return work.groups == work.taps == 1 and max(work.stride) == 1


def is_plain(work: ConvWork) -> bool:
    """Return whether results are sums without an epilogue, in whole, aligned chunks of channels."""
    return work.epilogue_free and _in_whole_chunks(work)


def _in_whole_chunks(work: ConvWork) -> bool:
    extents = (work.batch, work.groups, work.channels[1], *work.sizes[1])
    return in_whole_chunks(work.result, extents, 2)


def finishes_rows(work: ConvWork, axes: Axes) -> bool:
    """Return whether results with a bias or a clamping activation can be stored like plain ones.

    This requires 16-bit types, whole, aligned chunks of channels, and a single phase.
    """
    return (
        not work.epilogue_free
        and work.alpha == 1.0
        and work.accumulate is None
        and _in_whole_chunks(work)
        and work.activation in CLAMPING
        and work.dtype.itemsize == work.result_dtype.itemsize == 2
        and all(len(axis.phases) == 1 for axis in axes)
    )


def may_pingpong(work: ConvWork, axes: Axes) -> bool:
    """Return whether tiles can run ping-pong.

    Results must be plain, or stored like plain ones, and addressable in 32-bit units of chunks.
    """
    result = work.result
    extents = (work.batch, *work.sizes[1])
    strides = (result.strides[0], *result.strides[3:])
    reach = sum((count - 1) * stride for count, stride in zip(extents, strides, strict=True))
    rows = is_plain(work) or finishes_rows(work, axes)
    return rows and reach * result.dtype.itemsize // 16 < MOST_CHUNKS


def row_tiles(work: ConvWork, axes: Axes, tile: HopperTile) -> list[int]:
    """Return the tiles along the pixels of each phase."""
    return [
        ceil_div(work.batch * d.count * h.count * (w.count + tile.halo(axes[2], w)), tile.pixels)
        for d, h, w in axes.phases
    ]


def kept_taps(
    axes: Axes, phase: Combined, batch: int, pixels: int, images_first: bool
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
def taps_of_tiles(axes: Axes, batch: int, pixels: int, images_first: bool) -> NDArray[np.int64]:
    """Return `kept_taps` of all phases, concatenated. Cached, as many tile shapes share them."""
    if not axes.reads_padding:
        counts = [ceil_div(batch * prod(p.count for p in phase), pixels) for phase in axes.phases]
        return np.repeat([prod(p.taps for p in phase) for phase in axes.phases], counts)
    return np.concatenate(
        [kept_taps(axes, phase, batch, pixels, images_first) for phase in axes.phases]
    )


def skips_taps(work: ConvWork, axes: Axes, tile: HopperTile, images_first: bool) -> bool:
    """Return whether some tile does not read the source with all taps of its phase."""
    if tile.taps > 1:
        return True  # not known, as its pixels are others
    taps = taps_of_tiles(axes, work.batch, tile.pixels, images_first)
    every = np.repeat(
        [prod(along.taps for along in phase) for phase in axes.phases],
        row_tiles(work, axes, tile),
    )
    return bool(np.any(taps < every))


def candidates(
    work: ConvWork, axes: Axes, device: CudaDevice, parts: int = 1
) -> Iterator[Schedule]:
    read, written = work.channels
    source = work.batch * work.groups * read * prod(axis.x_size for axis in axes)
    source *= work.dtype.itemsize
    phases = axes.phases
    by_image = (
        axes.reads_padding
        and not stores_planes(work)
        and work.batch >= 4
        and may_start_with_images(work, axes)
    )
    if parts > 1:
        by_image = False  # parts follow one another as images
    pixels = sum(work.batch * prod(along.count for along in phase) for phase in phases)
    narrow = [
        Schedule(tile)
        for tile in tiles_of(work.dtype, parts)
        if tile.n - written < 64 or tile.n <= 64
    ]
    for schedule in _possible(work, axes, device, narrow):
        tile, rounds = schedule.tile, 1
        if len(phases) > 1 and not tile.single:
            columns = work.groups * ceil_div(written, tile.n)
            turns = ceil_div(pixels, tile.m) * columns // device.multiprocessors
            rounds = max(1, min(source // ROUND_BYTES, turns // ROUND_TURNS))
        yield Schedule(tile, False, rounds)
        if by_image and tile.taps == 1:
            yield Schedule(tile, True, rounds)
