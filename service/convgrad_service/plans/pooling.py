"""Tiles of the pooling kernels: pure functions of sizes.

A tile is a box of windows or input positions. A task packs the input of its tile into blocks that
store every position as a vector of channels. Blocks should fit the L2 cache, and adjacent tiles
should overlap in few rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from convgrad_service.problems.geometry import PoolShape
from convgrad_service.problems.sizes import Size3, size3

__all__ = ["PoolPlan", "pool_backward_plan", "pool_forward_plan"]

BLOCK_BYTES = 384 * 1024
SCRATCH_LIMIT_BYTES = 64 * 1024 * 1024
# Most vectors of contiguous channels in a task of a backward pass, as long as its blocks are small.
VECTORS, SMALL_BLOCKS_BYTES = 4, 128 * 1024


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The tiling of one launch, with the names of ``kernels/pool_args.hpp``."""

    tile: Size3
    tiles: Size3
    windows: Size3
    vectors: int
    meeting_words: int
    tasks: int
    scratch_bytes: int


@lru_cache(maxsize=256)
def pool_forward_plan(pool: PoolShape, vector_bytes: int, lanes: int) -> PoolPlan | None:
    """Tile the windows of a forward pass; None if processing single windows costs less."""
    output = size3(pool.output_size)

    def scratch(tile: list[int]) -> int:
        return (2 * prod(tile) + prod(_reached(pool, tile))) * vector_bytes

    tile = _shrunk(list(output), [1, 1, 1], scratch)
    plan = _plan(pool, output, tile, tile, scratch(tile), lanes, 1, 0)
    work = prod(plan.tiles) * (_COPY * prod(_reached(pool, tile)) + prod(tile) * _taps(pool))
    return plan if _pays(pool, plan, work, lanes, searches=True) else None


@lru_cache(maxsize=256)
def pool_backward_plan(
    pool: PoolShape, vector_bytes: int, lanes: int, searches: bool, adjacent: bool
) -> PoolPlan | None:
    """Tile the input positions of a backward pass; None if processing single windows costs less.

    ``searches`` if the maxima are recomputed from the input, otherwise indices are given.
    ``adjacent`` if channels are contiguous.
    """
    kernel = size3(pool.kernel_size)
    stride, size = size3(pool.stride), size3(pool.input_size)

    def words(tile: list[int]) -> int:
        phases = min(stride[1], tile[1]) * min(stride[2], tile[2])
        return sum(kernel) + kernel[2] + phases + 1 + prod(kernel)

    def scratch(tile: list[int], vectors: int = 1) -> int:
        windows = _met(pool, tile)
        block = prod(_reached(pool, windows)) if searches else 0
        each = (1 if adjacent else tile[1]) * tile[2] + 2 * prod(windows)
        return (vectors * each + block) * vector_bytes + 8 * words(tile)

    tile = _shrunk(list(size), list(stride), scratch)
    windows, vectors = _met(pool, tile), 1
    if adjacent:
        vectors = min(VECTORS, -(-pool.channels // lanes))
        while vectors > 1 and scratch(tile, vectors) > SMALL_BLOCKS_BYTES:
            vectors -= 1
    bytes_taken = scratch(tile, vectors)
    plan = _plan(pool, size, tile, windows, bytes_taken, lanes, vectors, words(tile))
    copied = _COPY * prod(_reached(pool, windows)) if searches else 0
    # Each window of a tile is searched, or its index is packed.
    work = prod(plan.tiles) * (copied + prod(windows) * (_taps(pool) if searches else 1))
    # Each plane of a tile lists the windows of its phases, testing every tap along W.
    rows, columns = min(stride[1], tile[1]), min(stride[2], tile[2])
    met = [max(1, taps // step) for taps, step in zip(kernel, stride, strict=True)]
    asked = kernel[0] + rows * (kernel[1] + columns * met[0] * met[1] * kernel[2])
    work += size[0] * plan.tiles[2] * (plan.tiles[1] * asked + size[1] * columns)
    return plan if _pays(pool, plan, work, lanes, searches) else None


# Costs of packing one position, and of one tap of a single window, relative to one tap of a vector
# of windows. Rough, since the alternatives differ either by orders of magnitude or hardly at all.
_COPY = 2
_SINGLE = 2


def _taps(pool: PoolShape) -> int:
    return prod(pool.kernel_size)


def _pays(pool: PoolShape, plan: PoolPlan, work: int, lanes: int, searches: bool) -> bool:
    """Whether tiling costs less than processing the same channels' windows one by one."""
    if plan.scratch_bytes > SCRATCH_LIMIT_BYTES:
        return False
    channels = min(lanes, pool.channels)
    singly = prod(pool.output_size) * (_taps(pool) if searches else 1) + prod(pool.input_size)
    return work <= _SINGLE * channels * singly


def _reached(pool: PoolShape, windows: list[int]) -> list[int]:
    """Return the extent of the input that the windows read, in each dimension."""
    stride, kernel = size3(pool.stride), size3(pool.kernel_size)
    dilation = size3(pool.dilation)
    return [
        (w - 1) * s + (k - 1) * d + 1
        for w, s, k, d in zip(windows, stride, kernel, dilation, strict=True)
    ]


def _met(pool: PoolShape, tile: list[int]) -> list[int]:
    """Return the maximum number of windows, also outside the output, that overlap a tile."""
    stride, kernel = size3(pool.stride), size3(pool.kernel_size)
    dilation = size3(pool.dilation)
    return [
        (t - 1 + (k - 1) * d) // s + 2
        for t, s, k, d in zip(tile, stride, kernel, dilation, strict=True)
    ]


def _shrunk(tile: list[int], least: list[int], scratch: Callable[[list[int]], int]) -> list[int]:
    """Halve the longest dimension until the blocks fit the cache or the minimum is reached."""
    while scratch(tile) > BLOCK_BYTES:
        longest = max((0, 1, 2), key=lambda d: tile[d] / least[d])
        if tile[longest] <= least[longest]:
            break
        half = -(-tile[longest] // 2)
        tile[longest] = -(-half // least[longest]) * least[longest]
    return tile


def _plan(
    pool: PoolShape,
    extent: Size3,
    tile: list[int],
    windows: list[int],
    scratch_bytes: int,
    lanes: int,
    vectors: int,
    words: int,
) -> PoolPlan:
    tiles = [-(-e // t) for e, t in zip(extent, tile, strict=True)]
    tasks = pool.batch * -(-pool.channels // (vectors * lanes)) * prod(tiles)
    own, count, read = (size3(tuple(each)) for each in (tile, tiles, windows))
    return PoolPlan(own, count, read, vectors, words, tasks, scratch_bytes)
