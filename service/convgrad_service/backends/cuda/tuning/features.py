"""What a correction knows of a configuration, the same for all families that compute GEMMs."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["NAMES", "features"]

NAMES = (
    "expected",
    "rows",
    "columns",
    "depth",
    "m",
    "n",
    "k",
    "inner",
    "outer",
    "waves",
    "filled",
    "steps",
    "useful",
    "memory",
    "kind",
    "order",
    "row_chunks",
    "column_chunks",
    "depth_chunks",
)
"""The features, in order; sizes are logarithms to base 2."""

MICROSECOND = 1e-6
# Bytes per second from memory, to tell what is limited by it.
MEMORY_BYTES_S = 4.3e12
MOST_WAVES = 16.0


def features(
    *,
    expected_s: ArrayLike,
    rows: ArrayLike,
    columns: ArrayLike,
    depth: ArrayLike,
    m: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    inner: ArrayLike,
    outer: ArrayLike,
    workers: ArrayLike,
    moved: ArrayLike,
    kind: ArrayLike,
    order: ArrayLike,
) -> NDArray[np.float64]:
    """Return one line of features for each configuration of a GEMM.

    Parameters
    ----------
    expected_s
        Seconds that the cost model expects.
    rows, columns, depth
        M, N and K of the GEMM.
    m, n, k
        The tile, and the depth of a k-tile.
    inner, outer
        Blocks of a cluster, and clusters, that share one tile's K.
    workers
        Blocks that run at once.
    moved
        Bytes that must be read and written.
    kind, order
        Numbers of the kernel's variant and of its order of tiles.

    Returns
    -------
    numpy.ndarray
        float64, a line for each configuration, with the columns of `NAMES`.
    """
    seconds, rows, columns, depth, m, n, k, inner, outer, workers, moved, kind, order = (
        np.asarray(value, np.float64)
        for value in (
            *(expected_s, rows, columns, depth, m, n, k, inner, outer),
            *(workers, moved, kind, order),
        )
    )
    depth = np.maximum(depth, 1)  # 0 if no tap reaches any element of the result
    tiles = np.ceil(rows / m) * np.ceil(columns / n)
    splits = np.maximum(inner, 1) * np.maximum(outer, 1)
    waves = tiles * splits / workers
    every = (
        np.log2(seconds / MICROSECOND),
        *(np.log2(size) for size in (rows, columns, depth, m, n, k)),
        np.log2(np.maximum(inner, 1)),
        np.log2(np.maximum(outer, 1)),
        np.minimum(waves, MOST_WAVES),
        waves / np.ceil(waves),
        np.log2(np.ceil(np.ceil(depth / k) / splits)),
        rows * columns / (tiles * m * n),
        moved / MEMORY_BYTES_S / seconds,
        kind,
        order,
        np.gcd(rows.astype(np.int64), 64),
        np.gcd(columns.astype(np.int64), 64),
        np.gcd(depth.astype(np.int64), 64),
    )
    lines = np.empty((seconds.size, len(NAMES)))
    for index, values in enumerate(every):
        lines[:, index] = values
    return lines
