"""The configurations of pointwise_gemm, one per instance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from convgrad_service.backends.cuda.kernels.conv.pointwise_gemm_tiles import Config

__all__ = ["COLUMNS", "DEEP", "MOST_RESIDENT_COLUMNS", "ROWS", "SHALLOW", "USUAL", "every_config"]

ROWS, COLUMNS = (64, 128, 192, 256), (16, 24, 32, 40, 48, 64, 80, 96, 128, 144, 160, 192, 224, 256)
"""M and N of tiles."""
PIXELS = (24, 32, 40, 48, 56, 64, 80, 96, 104, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256)
"""N of transposed tiles: a fine grain, so that tiles can be distributed evenly."""
SHALLOW, USUAL, DEEP = (16, 32), 64, 128
"""K of a k-tile: shallow ones for short reductions, deep ones for small tiles."""
MOST_RESIDENT_COLUMNS = 160
# The most accumulators of a thread, and of one of three warpgroups; results of a small tile, and
# the most with deep k-tiles, also transposed, and with split-K. `_Ways` omits configurations that
# were never the fastest.
MOST_SUMS, MOST_SUMS_OF_THREE, SMALL = 128, 96, 64 * 64
MOST_DEEP, MOST_DEEP_TRANSPOSED, MOST_SPLIT = 64 * 128, 64 * 208, 128 * 192
LEAST_TALL_COLUMNS = 64
# Tiles of three warpgroups: rows and columns.
THREE_ROWS, THREE_COLUMNS = 192, (64, 96, 128)
# Rows and columns of tiles of planes.
PLANES = {64: (64, 128), 128: (32, 64, 96, 128, 192, 256), 256: (64, 96, 128)}
# Rows and columns of tiles that are reduced in the grid. With all others, 315 layers would be 0.1 %
# faster.
IN_GRID = {64: (16, 24, 32, 64, 80, 128, 144, 192, 256), 128: (24, 40, 128, 192, 256)}


@dataclass(frozen=True, slots=True)
class _Ways:
    """Which kernels a tile has: TMA stores, TMA stores with B resident, split-K in clusters, and
    split-K in the grid."""

    stored: bool = False
    resident: bool = False
    split: bool = False
    in_grid: bool = False


def _ways(m: int, n: int, depth: int, kind: str) -> _Ways:
    size, deep = m * n, depth == DEEP
    if kind == "planes":
        stored = depth == USUAL and n in PLANES.get(m, ())
        return _Ways(stored=stored, resident=stored and m == ROWS[1] and n <= MOST_RESIDENT_COLUMNS)
    if kind == "transposed":
        most = MOST_SUMS_OF_THREE * 3 if m == THREE_ROWS else MOST_SUMS * min(m // 64, 2)
        return _Ways(stored=size <= min(most * 128, MOST_DEEP_TRANSPOSED if deep else size))
    if m == THREE_ROWS:
        return _Ways(stored=kind == "gather" and depth == USUAL and n in THREE_COLUMNS)
    if size > MOST_SUMS * 128 * min(m // 64, 2) or (deep and size > MOST_DEEP):
        return _Ways()
    if kind == "weight":
        low, small = m < THREE_ROWS, size <= SMALL
        split = low and deep == small and size <= MOST_SPLIT
        in_grid = deep == small and n in IN_GRID.get(m, ())
        return _Ways(low and (small or not deep), resident=False, split=split, in_grid=in_grid)
    tall = m == ROWS[-1]
    return _Ways(
        stored=not tall or (depth == USUAL and n >= LEAST_TALL_COLUMNS),
        resident=not tall and not deep and n <= MOST_RESIDENT_COLUMNS,
        split=not tall and not deep and size <= (MOST_SPLIT if depth == USUAL else SMALL),
    )


def every_config(kind: str) -> Iterator[Config]:
    """Yield one configuration per instance of a `Product.kind`."""
    # With shallow k-tiles, not all stages would start where a swizzled pattern does if transposed.
    for depth in (*SHALLOW, USUAL, DEEP) if kind == "gather" else (USUAL, DEEP):
        for m in ROWS:
            for n in PIXELS if kind == "transposed" else COLUMNS:
                ways = _ways(m, n, depth, kind)
                if ways.stored:
                    yield Config(m, n, depth)
                if ways.resident:
                    yield Config(m, n, depth, resident=True)
                if ways.split:
                    yield Config(m, n, depth, cluster=1)
                if ways.in_grid:
                    yield Config(m, n, depth, parts=2)
