"""Tiles of the pooling kernels: how many windows, or input positions, a task handles.

A task copies what its tile reaches into blocks in which every position is one vector of channels.
The blocks should stay in the second-level cache, and the rows shared with the neighbours (which
both read) should be few. Pure: sizes in, sizes out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from convgrad_service.plans.planar import Triple, triple
from convgrad_service.problems.geometry import PoolShape

__all__ = ["PoolPlan", "pool_backward_plan", "pool_forward_plan"]

BLOCK_BYTES = 384 * 1024
SCRATCH_LIMIT_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """One launch; names as in ``kernels/pool_args.hpp``."""

    tile: Triple
    tiles: Triple
    windows: Triple
    meeting_words: int
    tasks: int
    scratch_bytes: int


@lru_cache(maxsize=256)
def pool_forward_plan(pool: PoolShape, vector_bytes: int, lanes: int) -> PoolPlan | None:
    """Tiles of windows; None where taking the windows one by one costs less."""
    output = triple(pool.output_size, 1)

    def scratch(tile: list[int]) -> int:
        return (2 * prod(tile) + prod(_reached(pool, tile))) * vector_bytes

    tile = _shrunk(list(output), [1, 1, 1], scratch)
    plan = _plan(pool, output, tile, tile, scratch(tile), lanes, 0)
    work = prod(plan.tiles) * (_COPY * prod(_reached(pool, tile)) + prod(tile) * _taps(pool))
    return plan if _pays(pool, plan, work, lanes, searches=True) else None


@lru_cache(maxsize=256)
def pool_backward_plan(
    pool: PoolShape, vector_bytes: int, lanes: int, searches: bool
) -> PoolPlan | None:
    """Tiles of input positions; ``searches`` where the maxima come from the input.

    None where taking the windows one by one costs less.
    """
    kernel = triple(pool.kernel_size, 1)
    words = sum(kernel) + kernel[2] + prod(kernel)
    size = triple(pool.input_size, 1)

    def scratch(tile: list[int]) -> int:
        windows = _met(pool, tile)
        block = prod(_reached(pool, windows)) if searches else 0
        return (tile[2] + 2 * prod(windows) + block) * vector_bytes + 8 * words

    stride = triple(pool.stride, 1)
    tile = _shrunk(list(size), list(stride), scratch)
    windows = _met(pool, tile)
    plan = _plan(pool, size, tile, windows, scratch(tile), lanes, words)
    copied = _COPY * prod(_reached(pool, windows)) if searches else 0
    # Each window of a tile is searched, or its index held against its taps.
    work = prod(plan.tiles) * (copied + prod(windows) * (_taps(pool) if searches else kernel[0]))
    # Each row of a tile lists its windows, and for each of its columns' phases asks every tap.
    met = [max(1, taps // step) for taps, step in zip(kernel, stride, strict=True)]
    asked = met[0] * met[1] * min(stride[2], tile[2]) * kernel[2]
    work += size[0] * size[1] * plan.tiles[2] * (kernel[0] + kernel[1] + asked)
    return plan if _pays(pool, plan, work, lanes, searches) else None


# What copying a position into a block costs, and one tap of a window taken by itself, in units of
# one tap of a vector of windows. Rough: the two ways differ by orders of magnitude or not at all.
_COPY = 2
_SINGLE = 2


def _taps(pool: PoolShape) -> int:
    return prod(pool.kernel_size)


def _pays(pool: PoolShape, plan: PoolPlan, work: int, lanes: int, searches: bool) -> bool:
    """Whether tiles of a vector's channels beat those channels' windows one by one."""
    if plan.scratch_bytes > SCRATCH_LIMIT_BYTES:
        return False
    channels = min(lanes, pool.channels)
    singly = prod(pool.output_size) * (_taps(pool) if searches else 1) + prod(pool.input_size)
    return work <= _SINGLE * channels * singly


def _reached(pool: PoolShape, windows: list[int]) -> list[int]:
    """Input positions from the first tap of the first window to the last of the last."""
    stride, kernel = triple(pool.stride, 1), triple(pool.kernel_size, 1)
    dilation = triple(pool.dilation, 1)
    return [
        (w - 1) * s + (k - 1) * d + 1
        for w, s, k, d in zip(windows, stride, kernel, dilation, strict=True)
    ]


def _met(pool: PoolShape, tile: list[int]) -> list[int]:
    """Windows that may meet a run of input positions, those outside the output included."""
    stride, kernel = triple(pool.stride, 1), triple(pool.kernel_size, 1)
    dilation = triple(pool.dilation, 1)
    return [
        (t - 1 + (k - 1) * d) // s + 2
        for t, s, k, d in zip(tile, stride, kernel, dilation, strict=True)
    ]


def _shrunk(tile: list[int], least: list[int], scratch: Callable[[list[int]], int]) -> list[int]:
    """Halve the longest dimension until the blocks fit the cache or nothing is left to halve."""
    while scratch(tile) > BLOCK_BYTES:
        longest = max((0, 1, 2), key=lambda d: tile[d] / least[d])
        if tile[longest] <= least[longest]:
            break
        half = -(-tile[longest] // 2)
        tile[longest] = -(-half // least[longest]) * least[longest]
    return tile


def _plan(
    pool: PoolShape,
    extent: Triple,
    tile: list[int],
    windows: list[int],
    scratch_bytes: int,
    lanes: int,
    words: int,
) -> PoolPlan:
    tiles = [-(-e // t) for e, t in zip(extent, tile, strict=True)]
    tasks = pool.batch * -(-pool.channels // lanes) * prod(tiles)
    return PoolPlan(_as(tile), _as(tiles), _as(windows), words, tasks, scratch_bytes)


def _as(values: list[int]) -> Triple:
    first, second, third = values
    return first, second, third
