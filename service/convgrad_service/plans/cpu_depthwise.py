"""Tiles of the depthwise CPU kernels: pure functions of a planar plan.

The kernels (``backends/cpu/kernels/depthwise.cpp``, ``depthwise_weight.cpp``) store every position
as a vector of channels, and lay out their scratch by the same formulas.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from convgrad_service.plans.base import round_up
from convgrad_service.plans.planar import PLANS_KEPT, PlanarPlan
from convgrad_service.problems.sizes import Size3, size3

__all__ = ["depthwise_tiles"]

# Target size of a task's blocks, to fit half of the L2 cache. Above the hard limit the grouped
# kernels run.
BLOCK_BYTES = 384 * 1024
SCRATCH_LIMIT_BYTES = 8 * 1024 * 1024
# Limit on the packed weights, of which each thread has a copy.
WEIGHT_LIMIT_BYTES = 1024 * 1024
# Maximum channel vectors per task, and minimum tile rows of a task with more than one.
VECTORS, ROWS = 8, 4
# Target size of the source rows that meet one row of a weight gradient's vectors, for the L1 cache.
ROWS_BYTES = 48 * 1024
# The least columns that a tile is cut to.
LEAST_COLUMNS = 32
# Maximum splits of a weight gradient's sum, independent of the number of threads.
MOST_SPLITS = 64
RUN_BYTES, MET_BYTES = 40, 32


@dataclass(frozen=True, slots=True)
class DepthwiseTiles:
    """The tiling of one launch, with the names of ``kernels/planar_args.hpp``."""

    tile: Size3
    tiles: Size3
    group_block: int
    splits: int
    tasks: int
    scratch_bytes: int
    workspace_bytes: int


@lru_cache(maxsize=PLANS_KEPT)
def depthwise_tiles(
    plan: PlanarPlan,
    batch: int,
    groups: int,
    vector_bytes: int,
    lanes: int,
    *,
    weight: bool,
) -> DepthwiseTiles | None:
    """Return the tiles of a correlation, or of a weight gradient; None if a tile is too large.

    A task processes several channel vectors, which makes memory accesses longer if channels are
    contiguous, as long as its tile still has enough rows relative to the halo.
    """
    low, high = _met(plan)
    extent = [-(-size // step) for size, step in zip(plan.dst_size, plan.dst_step, strict=True)]
    taps, phases = len(plan.taps), len(plan.dst_phase)
    channels = -(-groups // lanes)
    if channels * taps * vector_bytes > WEIGHT_LIMIT_BYTES:
        return None
    tables = [taps * RUN_BYTES, (phases + 1) * 8, taps * 8, phases * 8, phases * 8]
    tables += [taps * MET_BYTES, taps * vector_bytes]
    if not weight:
        tables += [channels * vector_bytes, channels * taps * vector_bytes]
    tables_bytes = sum(round_up(table, 64) for table in tables)

    def scratch(tile: list[int], vectors: int) -> int:
        source = prod(
            (t - 1) * step + h - lo + 1
            for t, step, lo, h in zip(tile, plan.src_step, low, high, strict=True)
        )
        result = prod(t * step for t, step in zip(tile, plan.dst_step, strict=True))
        blocks = source, result, taps if weight else 0
        return tables_bytes + sum(round_up(vectors * block * vector_bytes, 64) for block in blocks)

    def shrunk(vectors: int) -> list[int]:
        tile = list(extent)
        while scratch(tile, vectors) > BLOCK_BYTES:
            longest = next((d for d in (0, 1) if tile[d] > 1), 2)
            if longest == 2 and tile[2] <= LEAST_COLUMNS:
                break
            tile[longest] = -(-tile[longest] // 2)
        return tile

    vectors = -(-channels // -(-channels // VECTORS))
    if weight:
        rows_bytes = (high[1] - low[1] + 1) * plan.src_size[2] * vector_bytes
        vectors = max(1, min(vectors, ROWS_BYTES // rows_bytes))
    tile = shrunk(vectors)
    while vectors > 1 and tile[1] < min(extent[1], ROWS):
        vectors //= 2
        tile = shrunk(vectors)
    if scratch(tile, vectors) > SCRATCH_LIMIT_BYTES:
        return None
    tiles = [-(-e // t) for e, t in zip(extent, tile, strict=True)]
    tile = [-(-e // n) for e, n in zip(extent, tiles, strict=True)]
    blocks, units = -(-groups // (vectors * lanes)), batch * prod(tiles)
    splits = min(units, MOST_SPLITS) if weight else 1
    return DepthwiseTiles(
        size3(tuple(tile)),
        size3(tuple(tiles)),
        vectors * lanes,
        splits,
        blocks * (splits if weight else units),
        scratch(tile, vectors),
        splits * taps * channels * vector_bytes if weight else 0,
    )


def _met(plan: PlanarPlan) -> tuple[list[int], list[int]]:
    """Return the lowest and highest source coordinates that any tap reads at t = 0."""
    if not len(plan.taps):
        return [0, 0, 0], [0, 0, 0]
    offsets = plan.taps[:, 1:4] + plan.origin
    source = offsets * plan.src_step + plan.src_phase[plan.taps[:, 0]]
    return [int(v) for v in source.min(axis=0)], [int(v) for v in source.max(axis=0)]
