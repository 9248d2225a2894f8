"""Tile sizes of the dense CPU engine: pure functions of the convolution and the CPU.

The kernels (``backends/cpu/kernels/dense_gather.cpp``, ``dense_bwd_weight.cpp``) lay out their
scratch by the same formulas and fail if it is too small.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from convgrad_service.plans.base import round_up
from convgrad_service.problems.geometry import ConvShape
from convgrad_service.problems.sizes import Size3, size3

__all__ = ["Dense", "Tiles", "dense_of", "gather_tiles", "weight_chunks", "weight_tiles"]

# Target size of a tile's slab, the packed copy of its source region: half of a core's L2 cache. The
# rest is for the weight panel being streamed. A row of a gather's results may need more, since all
# panels are read for each tile; and more may be allocated than is written, between dilated rows.
SLAB_BYTES, ROW_BYTES, GAPS_BYTES = 256 * 1024, 512 * 1024, 16 * 1024 * 1024
TASKS_PER_THREAD = 12
# Rows of at most half a register tile are short.
SHORT_ROW = 7
# Pixels (the K dimension) of a weight gradient's cache block. At 64 bytes of A and 128 bytes of B
# per pixel, a register tile's operands fill four fifths of a 48 KB L1 cache.
GROUP_PIXELS = 200
# Limits on the number and total size of partial weight gradients, since each is cleared and then
# read for the reduction.
PARTIALS = 8
PARTIAL_BYTES = 4 * 1024 * 1024
SHARE_CHANNELS = 256
SEGMENT_BYTES, PIECE_BYTES = 24, 48


@dataclass(frozen=True, slots=True)
class Dense:
    """A convolution with three spatial dimensions; channel counts are per group."""

    batch: int
    groups: int
    in_channels: int
    out_channels: int
    input: Size3
    kernel: Size3
    output: Size3
    stride: Size3
    dilation: Size3
    pad: Size3

    @property
    def taps(self) -> int:
        return math.prod(self.kernel)


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiling of one launch.

    ``block`` holds the parameters that the kernel documents. ``scratch_bytes`` is per thread,
    ``workspace_bytes`` shared.
    """

    block: tuple[int, ...]
    scratch_bytes: int
    workspace_bytes: int
    tasks: int


@dataclass(frozen=True, slots=True)
class _Axis:
    """One dimension of a gather: result extent, stride phases, and source extent of a tile."""

    result: int
    phases: int
    step: int
    reach: int  # source extent of one step, over all phases and taps
    taps: int

    @property
    def steps(self) -> int:
        return -(-self.result // self.phases)

    def slab(self, tile: int) -> int:
        return (tile - 1) * self.step + self.reach

    def read(self, tile: int) -> int:
        """Return how many source coordinates a tile reads; dilation leaves gaps."""
        return min(self.slab(tile), self.taps * tile)

    def stage(self, tile: int) -> int:
        return min(tile * self.phases, self.result)


def _axis(dense: Dense, dim: int, backward: bool) -> _Axis:
    kernel, dilation, stride = dense.kernel[dim], dense.dilation[dim], dense.stride[dim]
    reach = (kernel - 1) * dilation
    if not backward:
        return _Axis(dense.output[dim], 1, stride, reach + 1, kernel)
    pad, result = dense.pad[dim], dense.input[dim]
    lowest = -((reach - pad) // stride)
    highest = (min(stride, result) - 1 + pad) // stride
    return _Axis(result, stride, 1, max(highest - lowest, 0) + 1, kernel)


def slab_pixel(channels: int, sum_bytes: int) -> int:
    """Return the pitch of a slab's pixels, in elements.

    Few channels are stored without padding, so that adjacent taps form one segment. Otherwise a
    pitch that would map all pixels to a few L1 cache sets is padded by a cache line.
    """
    line = 64 // sum_bytes
    if channels < line:
        return channels
    rounded = -(-channels // line) * line
    return rounded + line if rounded * sum_bytes % 1024 == 0 else rounded


def gather_tiles(
    dense: Dense, *, backward: bool, sum_bytes: int, vector_bytes: int, threads: int
) -> Tiles:
    """Return the tiles of a forward pass or, if ``backward``, of an input gradient."""
    columns = 2 * vector_bytes // sum_bytes
    source_channels = dense.out_channels if backward else dense.in_channels
    result_channels = dense.in_channels if backward else dense.out_channels
    blocks = -(-result_channels // columns)
    pixel = slab_pixel(source_channels, sum_bytes)
    d, h, w = (_axis(dense, dim, backward) for dim in range(3))

    # Short rows of two images share a register tile.
    images = 2 if dense.batch > 1 and w.steps <= SHORT_ROW else 1

    def slab_bytes(td: int, th: int, tw: int) -> int:
        return images * d.slab(td) * h.slab(th) * w.slab(tw) * pixel * sum_bytes

    def fits(td: int, th: int, tw: int) -> bool:
        return slab_bytes(td, th, tw) <= SLAB_BYTES

    def row_fits(tw: int) -> bool:
        packed = images * d.read(1) * h.read(1) * w.slab(tw) * pixel * sum_bytes
        return packed <= ROW_BYTES and slab_bytes(1, 1, tw) <= GAPS_BYTES

    outer = -(-dense.batch // images) * dense.groups
    wanted = TASKS_PER_THREAD * threads
    td, th, tw = 1, 1, w.steps
    while tw > 28 and not row_fits(tw):
        tw = -(-tw // 2)
    while tw == w.steps and th < h.steps and fits(td, th + 1, tw):
        th += 1
    th = _even(h.steps, th)
    while th == h.steps and td < d.steps and fits(td + 1, th, tw):
        td += 1
    td = _even(d.steps, td)

    def tiles() -> int:
        return -(-d.steps // td) * -(-h.steps // th) * -(-w.steps // tw)

    # More tasks for load balance: first shorter tiles, as long as the halo stays relatively small,
    # then fewer channel blocks per task.
    while outer * tiles() < wanted and td > 1:
        td = _even(d.steps, td - 1)
    while outer * tiles() < wanted and th > max(4, h.reach):
        th = _even(h.steps, th - 1)
    shares = min(blocks, max(1, -(-wanted // (outer * tiles()))))
    per_task = -(-blocks // shares)
    pixels = images * d.stage(td) * h.stage(th) * w.stage(tw)
    scratch = dense.taps * SEGMENT_BYTES + slab_bytes(td, th, tw) + pixels * columns * sum_bytes
    panels = dense.groups * blocks * dense.taps * source_channels * columns * sum_bytes
    return Tiles(
        block=(td, th, tw, per_task, pixel, images),
        scratch_bytes=scratch + 3 * 64,
        workspace_bytes=panels,
        tasks=max(outer * tiles() * -(-blocks // per_task), dense.groups * blocks),
    )


def _even(extent: int, tile: int) -> int:
    """Return the smallest tile that gives the same number of tiles."""
    return -(-extent // -(-extent // tile))


def weight_tiles(
    dense: Dense,
    *,
    whole_out_channels: int,
    chunks: int,
    sum_bytes: int,
    vector_bytes: int,
    threads: int,
) -> Tiles:
    """Return the tiles of a weight gradient.

    ``whole_out_channels`` counts the channels of all parts of a `DensePlan`. Tiles and row groups,
    which determine the order of summation, depend only on the problem and the vector width; the
    number of threads and parts affects only the channel shares.
    """
    lanes = vector_bytes // sum_bytes
    columns = 2 * lanes
    d, h, w = range(3)
    channels_k, channels_c = dense.out_channels, dense.in_channels
    padded_c = -(-channels_c // lanes) * lanes

    # Sized for full channel shares, so that tiles do not depend on threads and parts.
    y_bytes = _weight_pixel(min(whole_out_channels, SHARE_CHANNELS), sum_bytes) * sum_bytes
    x_bytes = _weight_pixel(min(channels_c, SHARE_CHANNELS), sum_bytes) * sum_bytes

    def slab_pixels(rows: int, width: int) -> int:
        high = (rows - 1) * dense.stride[h] + (dense.kernel[h] - 1) * dense.dilation[h] + 1
        wide = (width - 1) * dense.stride[w] + (dense.kernel[w] - 1) * dense.dilation[w] + 1
        return dense.kernel[d] * high * wide

    def tile_bytes(rows: int, width: int) -> int:
        return rows * width * y_bytes + slab_pixels(rows, width) * x_bytes

    tile_columns, tile_rows = dense.output[w], 1
    while tile_columns > GROUP_PIXELS and tile_bytes(1, tile_columns) > SLAB_BYTES:
        tile_columns = -(-tile_columns // 2)
    if tile_columns == dense.output[w]:
        while tile_rows < dense.output[h] and tile_bytes(tile_rows + 1, tile_columns) <= SLAB_BYTES:
            tile_rows += 1
    group_rows = min(tile_rows, max(1, GROUP_PIXELS // tile_columns))
    # Several small planes, so that the sums are loaded and stored less often.
    planes = 1
    if tile_rows == dense.output[h] and tile_columns == dense.output[w]:
        fitting = SLAB_BYTES // tile_bytes(tile_rows, tile_columns)
        planes = min(fitting, GROUP_PIXELS // (tile_rows * tile_columns))
        planes = max(1, min(planes, dense.batch * dense.output[d]))

    k_share, c_share = min(channels_k, SHARE_CHANNELS), channels_c
    if channels_c > SHARE_CHANNELS:
        c_share = SHARE_CHANNELS

    def shares() -> int:
        return -(-channels_k // k_share) * -(-channels_c // c_share)

    while chunks * dense.groups * shares() < 2 * threads and k_share > 2 * lanes:
        k_share = -(-k_share // 2)
    while chunks * dense.groups * shares() < 2 * threads and c_share > columns:
        c_share = round_up(round_up(c_share, 2) // 2, columns)

    y_pixel, x_pixel = _weight_pixel(k_share, sum_bytes), _weight_pixel(c_share, sum_bytes)
    scratch = (
        planes * (group_rows * SEGMENT_BYTES + PIECE_BYTES)
        + planes * tile_rows * tile_columns * y_pixel * sum_bytes
        + planes * slab_pixels(tile_rows, tile_columns) * x_pixel * sum_bytes
        + 4 * 64
    )
    return Tiles(
        block=(chunks, tile_rows, tile_columns, group_rows, k_share, c_share, planes),
        scratch_bytes=max(scratch, 64 * 128 * sum_bytes),
        workspace_bytes=chunks * dense.groups * dense.taps * channels_k * padded_c * sum_bytes,
        tasks=max(chunks * dense.groups * shares(), dense.groups * channels_k),
    )


def weight_chunks(dense: Dense, sum_bytes: int) -> int:
    """Return the number of pixel chunks (split K), which depends only on the problem."""
    partial = dense.groups * dense.taps * dense.out_channels * dense.in_channels * sum_bytes
    pixels = dense.batch * math.prod(dense.output)
    rows = dense.batch * dense.output[0] * dense.output[1]
    limit = min(PARTIALS, PARTIAL_BYTES // partial, pixels // GROUP_PIXELS)
    if dense.output[2] <= GROUP_PIXELS:
        limit = min(limit, rows)
    return 1 << (max(1, limit).bit_length() - 1)


def _weight_pixel(channels: int, sum_bytes: int) -> int:
    # An odd number of cache lines spreads a row's pixels over all L1 cache sets.
    line = 64 // sum_bytes
    return (-(-channels // line) | 1) * line


def dense_of(conv: ConvShape) -> Dense:
    """Convert a convolution with one to three spatial dimensions."""
    return Dense(
        batch=conv.batch,
        groups=conv.groups,
        in_channels=conv.in_channels_per_group,
        out_channels=conv.out_channels_per_group,
        input=size3(conv.input_size),
        kernel=size3(conv.kernel_size),
        output=size3(conv.output_size),
        stride=size3(conv.stride),
        dilation=size3(conv.dilation),
        pad=size3(tuple(before for before, _ in conv.padding), 0),
    )
