"""Tiles of the CPU kernel for the weight gradient of a first layer: pure functions of sizes.

The kernel (``backends/cpu/kernels/first_bwd_weight.cpp``) lays out its scratch by the same formulas
and fails if it is too small.
"""

from __future__ import annotations

import math

from convgrad_service.plans.base import round_up
from convgrad_service.plans.cpu_dense import Dense, Tiles

__all__ = ["first_chunks", "first_steps", "first_tiles"]

# Pixels (the K dimension) of a cache block: the operands of a register tile fit the L1 cache. The
# slab, the packed input region of a tile, fits the L2 cache.
GROUP_PIXELS = 160
SLAB_BYTES = 128 * 1024
# Limits on the number and total size of partial gradients.
PARTIALS = 16
PARTIAL_BYTES = 4 * 1024 * 1024
SHARE_CHANNELS = 256
RUN_BYTES, SEGMENT_BYTES = 24, 24


def first_chunks(dense: Dense, sum_bytes: int) -> int:
    """Return the number of pixel chunks (split K), which depends only on the problem."""
    terms = dense.taps * dense.in_channels
    partial = dense.groups * terms * dense.out_channels * sum_bytes
    limit = min(
        PARTIALS, PARTIAL_BYTES // partial, dense.batch * math.prod(_tiles(dense, sum_bytes))
    )
    return 1 << (max(1, limit).bit_length() - 1)


def first_tiles(
    dense: Dense, *, chunks: int, sum_bytes: int, vector_bytes: int, threads: int
) -> Tiles:
    """Return the tiles of a weight gradient. Threads affect only the channel shares."""
    lanes, line = vector_bytes // sum_bytes, 64 // sum_bytes
    rows, columns, group = _tile(dense, sum_bytes)
    share = round_up(min(dense.out_channels, SHARE_CHANNELS), lanes)

    def tasks() -> int:
        return chunks * dense.groups * -(-dense.out_channels // share)

    while tasks() < 2 * threads and share > 2 * lanes:
        share = round_up(-(-share // 2), lanes)
    terms, padded = dense.taps * dense.in_channels, round_up(dense.out_channels, lanes)
    gradients = group * columns * (-(-share // line) | 1) * line
    sums = (_slab(dense, rows, columns), gradients)
    tables = (dense.taps * RUN_BYTES, group * SEGMENT_BYTES)
    scratch = sum(round_up(size, 64) for size in (*tables, *(count * sum_bytes for count in sums)))
    return Tiles(
        block=(chunks, rows, columns, group, share),
        scratch_bytes=scratch,
        workspace_bytes=chunks * dense.groups * terms * padded * sum_bytes,
        tasks=max(tasks(), dense.groups * -(-dense.out_channels // lanes)),
    )


def first_steps(dense: Dense, tiles: Tiles, *, sum_bytes: int) -> float:
    """Return the cost of packing all tiles, in the steps of plans/cpu_worth.py."""
    shares = -(-dense.out_channels // tiles.block[4])
    visits = dense.batch * dense.groups * shares * math.prod(_tiles(dense, sum_bytes))
    return visits * tiles.scratch_bytes / sum_bytes


def _slab(dense: Dense, rows: int, columns: int) -> int:
    """Return the number of input elements that a tile reads."""
    high = (rows - 1) * dense.stride[1] + (dense.kernel[1] - 1) * dense.dilation[1] + 1
    wide = (columns - 1) * dense.stride[2] + (dense.kernel[2] - 1) * dense.dilation[2] + 1
    return dense.kernel[0] * high * wide * dense.in_channels


def _tile(dense: Dense, sum_bytes: int) -> tuple[int, int, int]:
    """Return a tile's rows and columns, and the rows of a cache block. Short rows stay whole."""
    parts = -(-dense.output[2] // GROUP_PIXELS)
    columns = -(-dense.output[2] // parts)
    group = min(dense.output[1], max(1, GROUP_PIXELS // columns))
    rows = group
    while rows < dense.output[1] and _slab(dense, rows + group, columns) * sum_bytes <= SLAB_BYTES:
        rows += group
    return min(rows, dense.output[1]), columns, group


def _tiles(dense: Dense, sum_bytes: int) -> tuple[int, int, int]:
    """Return the number of tiles of an image along each dimension."""
    rows, columns, _ = _tile(dense, sum_bytes)
    return dense.output[0], -(-dense.output[1] // rows), -(-dense.output[2] // columns)
