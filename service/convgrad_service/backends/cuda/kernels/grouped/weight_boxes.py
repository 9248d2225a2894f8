"""Host side of weight_boxes.cuh and weight_result.cuh: boxes of grouped wgrad, and its results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, Protocol, TypeVar

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.core.gather_axes import divider
from convgrad_service.backends.cuda.kernels.grouped.grouped_box import LatticeAxis, Size4
from convgrad_service.plans.cuda.program import ZEROS_BYTES, ceil_div
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["aligned", "best_of", "describe_result", "describe_walk", "splits_of", "tiles_of"]
__all__ += ["unique_bytes"]

MOST_SPLITS = 255
"""The most blocks that can share a result: the rendezvous counter has eight bits for each count."""
PARTIAL_BYTES = 64 * 2**20
"""The most bytes of partial sums, unless the caller asks for more splits."""
FEW_BOXES = 8
"""Up to this number of boxes, one block may process all."""


def aligned(size: int, alignment: int) -> int:
    """Return the least multiple of ``alignment`` that is at least ``size``."""
    return ceil_div(size, alignment) * alignment


def tiles_of(work: ConvWork, axes: Sequence[LatticeAxis], tile: Size4) -> Size4:
    """Return the tiles of the largest phase (N, D, H, W)."""
    d, h, w = (ceil_div(axis.count, size) for axis, size in zip(axes, tile[1:], strict=True))
    return ceil_div(work.batch, tile[0]), d, h, w


def unique_bytes(work: ConvWork) -> int:
    """Return the bytes that must be read and written once."""
    pixels = prod(work.input) * work.in_channels + prod(work.output) * work.out_channels
    weights = work.taps * work.in_channels * work.out_channels
    return (work.batch * pixels + weights) * work.groups * work.dtype.itemsize


def splits_of(work: ConvWork, columns: int, sums: int, boxes: int, at_once: int) -> list[int]:
    """Return numbers of splits that fill the device or a part of it, unless the caller sets it.

    Parameters
    ----------
    columns
        Blocks of a split.
    sums
        Of a block.
    at_once
        Blocks that the device runs at once.
    """
    if columns > ZEROS_BYTES // 4:
        return [1]
    if work.split_k is not None:
        return [max(1, min(work.split_k, boxes, MOST_SPLITS))]
    most = min(boxes, MOST_SPLITS, max(1, PARTIAL_BYTES // (columns * sums * 4)))
    found = {1: None} if boxes <= FEW_BOXES else {}
    for part in (1, 2, 4, 8):
        wanted = min(most, max(1, at_once // part // columns))
        # The fewest splits that do not increase the boxes per block.
        found[ceil_div(boxes, ceil_div(boxes, wanted))] = None
    return list(found)


class Divided(Protocol):
    """A way to divide a work over blocks."""

    @property
    def splits(self) -> int: ...


S = TypeVar("S", bound=Divided)


def best_of(work: ConvWork, shares: Iterable[tuple[float, S]]) -> S:
    """Return the share with the least expected time, of those nearest to the splits asked for."""

    def key(one: tuple[float, S]) -> tuple[int, float]:
        expected, share = one
        asked = work.split_k
        return 0 if asked is None else abs(asked - share.splits), expected

    return min(shares, key=key)[1]


def describe_walk(
    walk: Any, work: ConvWork, axes: Sequence[LatticeAxis], tile: Size4, level: int, splits: int
) -> None:
    """Fill in a ``BoxWalk``, of blocks that have one position of the first ``level`` dimensions'
    taps."""
    tiles = tiles_of(work, axes, tile)
    boxes = prod(tiles) * prod(len(axis.phases) for axis in axes)
    walk.boxes, walk.more = divmod(boxes, splits)
    walk.by_tiles[:], walk.tiles[:] = [divider(count) for count in tiles[1:]], tiles
    walk.tile_images = tile[0]
    for dim, axis in enumerate(axes):
        walk.x_next[dim] = tile[dim + 1] * axis.x_step * axis.lattice
        walk.y_next[dim] = tile[dim + 1] * axis.axis.y_step
        walk.phases[dim] = len(axis.phases)
        for place, phase in enumerate(axis.phases):
            walk.phase[dim][place].x, walk.phase[dim][place].y = phase.x0, phase.y0
        walk.first[dim] = walk.phase[dim][0]
    walk.tap_next[:] = [axis.x_tap * axis.lattice for axis in axes[:2]]
    rows = work.kernel[1] if level == 2 else 1
    walk.by_tap_rows, walk.tap_rows = divider(rows), rows


def describe_result(result: Any, work: ConvWork, channels: tuple[int, int], items: int) -> None:
    """Fill in a ``WeightResult``: ``channels`` are those of a group that a block has."""
    result.in_channels, result.out_channels = channels
    result.items, result.quads = items, _in_quads(work)
    result.w_stride[:], result.alpha, result.beta = work.w.strides, work.alpha, work.beta
    result.wide = work.result_dtype is DType.FLOAT32
    result.bfloat16 = work.dtype is DType.BFLOAT16


def _in_quads(work: ConvWork) -> bool:
    """Whether four adjacent channels of the result are an aligned vector."""
    extents = (work.groups, work.out_channels, 4, *work.kernel)
    others = (
        stride
        for axis, (stride, extent) in enumerate(zip(work.w.strides, extents, strict=True))
        if axis != 2 and extent > 1
    )
    return (
        work.in_channels % 4 == 0
        and work.w.strides[2] == 1
        and not any(stride % 4 for stride in others)
    )
