"""Channels-last depthwise wgrad, a row of taps at a time (depthwise_weight_rows.cu)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.gather_axes import divider
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_tiles import (
    BYTES_S,
    DTYPES,
    bytes_of,
    channel_strides_of,
    channels_of,
    is_in_planes,
    spread_of,
    turned,
    vector_of,
    wavefronts,
    why_not_counted,
)
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_weight_args import (
    CLUSTERED,
    MOST_CLUSTER,
    buffers_of,
    fill_volume,
    is_clustered,
    partials_of,
    received_bytes,
    why_not_volume,
)
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Solver
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div, macros_of
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["DepthwiseWeightRows", "RowsLayout", "RowsTile", "layouts_of"]

THREADS, BLOCKS = 256, 2
MOST_INDEX = 2**31 - 1
# The limit of gridDim.y and gridDim.z.
MOST_ALONG = 2**16 - 1
KERNELS, COLUMNS = (3, 5, 7), {1: (7,), 2: (4, 7)}
# Columns of y are by the stride: with four as well, layers of stride 1 are expected to take 0.1 %
# less. With stride 1, kernels of more than FEW columns take LONG instances, whose columns of y are
# by channels. Single channels of 16 bits, which are rare, have those of the most columns alone.
FEW, LONG, LONG_COLUMNS = 13, 16, {1: 7, 2: 4}
# Numbers of blocks of a cluster: with others, fewer fit on the device at once.
CLUSTERS = (1, 2, 4, 8)
# Of the cost model, fitted to 251 measurements on an H200: seconds of a launch, of a
# block's first loads and at least of a round of items; instructions of an item and of an element
# that it reads (besides one for each product), and what they take of an SM's four schedulers;
# seconds of a reduction over a cluster, and more over the grid; the part of memory's time that is
# not hidden. It errs by 7 %, and by 6 to 8 % on the half of the layers that it is not fitted to.
LAUNCH_S, FIRST_S, ROUND_S = 2.68e-6, 3.27e-6, 0.68e-6
INSTRUCTIONS, PER_READ, CLOCKS_S = 38.4, 6.6, 1.17e9
CLUSTER_S, GRID_S = 0.49e-6, 2.51e-6
# Instructions of a cache line that a warp reads of planes; fitted to 54 layers, on which the choice
# takes 3 % longer than the faster of planes and copies.
PLANE_READ = 1
APART = 0.064


@dataclass(frozen=True, slots=True)
class RowsTile:
    """An instance: columns of taps, stride along W, columns of y of an item, channels of a
    thread."""

    kernel: int
    stride: int
    columns: int
    vector: int


@dataclass(frozen=True, slots=True)
class RowsLayout:
    """Vectors of channels and rows of taps of a block, and blocks that share the items."""

    tile: RowsTile
    vectors: int
    tap_rows: int
    blocks: int

    @property
    def slots(self) -> int:
        return THREADS // (self.vectors * self.tap_rows)

    @property
    def shared_bytes(self) -> int:
        sums = self.tap_rows * self.tile.kernel * self.tile.vector * self.vectors
        return self.slots * sums * 4 + received_bytes(sums)


DepthwiseWeightRowsArgs = structure("depthwise/depthwise_weight_rows.cu", "DepthwiseWeightRowsArgs")


class DepthwiseWeightRows(Solver[ConvWork, RowsLayout]):
    """bwd_weight with one input channel per group, of any number of channels and kernel, padding
    and dilation, in one to three dimensions. Channels last, or with ``in_planes`` in any other
    order."""

    name = "depthwise_weight_rows"

    def __init__(self, layout: RowsLayout | None = None, *, in_planes: bool = False) -> None:
        self._layout, self._in_planes = layout, in_planes
        if in_planes:
            self.name = f"{self.name}_planes"

    def solve(self, work: ConvWork, device: CudaDevice) -> RowsLayout | str:
        work = turned(work)
        reason = why_not_volume(work, in_planes=self._in_planes)
        if reason is not None:
            return reason
        if work.stride[2] not in COLUMNS:
            return f"a stride of {work.stride[2]} along W"
        if work.pixels + 4 * THREADS > MOST_INDEX:
            return "more than 2^31 items"
        layout = self._layout or _best(work, device)
        channel_tiles, tap_sets = _grid(work, layout)
        if max(channel_tiles, tap_sets) > MOST_ALONG:
            return f"{channel_tiles} by {tap_sets} tiles are more than a grid can have"
        reason = why_not_counted(channel_tiles * tap_sets)
        return reason or device.why_not_shared(layout.shared_bytes) or layout

    def fragment(self, work: ConvWork, device: CudaDevice, layout: RowsLayout) -> Fragment:
        work, tile, blocks = turned(work), layout.tile, layout.blocks
        channel_tiles, tap_sets = _grid(work, layout)
        planes, rows, _ = work.output
        args = DepthwiseWeightRowsArgs()
        fill_volume(args, work, layout.vectors)
        args.kernel_rows, args.columns = work.kernel[1:]
        args.parts, args.part = _parts(work)
        args.all_tap_rows = _tap_rows(work)
        args.tap_rows, args.slots = layout.tap_rows, layout.slots
        args.strips = strips = _strips(work, tile)
        args.items = items = work.batch * planes * rows * strips
        args.spread = spread_of(work)
        args.share = ceil_div(items, blocks)
        args.by_multiplier, args.by_spread = divider(work.out_channels), divider(args.spread)
        args.by_tap_rows = divider(layout.tap_rows)
        args.by_parts, args.by_kernel_rows = divider(args.parts), divider(work.kernel[1])
        args.by_strips, args.by_rows, args.by_planes = map(divider, (strips, rows, planes))
        args.x_channel, args.y_channel = channel_strides_of(work)
        args.in_planes = is_in_planes(work)
        args.by_places = divider(layout.slots * layout.tap_rows)
        clustered = is_clustered(device, blocks)
        sums = layout.tap_rows * tile.kernel * tile.vector * layout.vectors
        partials = partials_of(
            work, 1 if clustered else blocks, blocks * channel_tiles * tap_sets * sums
        )
        launch = Launch(
            _instance(work.dtype, tile),
            (blocks, channel_tiles, tap_sets),
            (THREADS, 1, 1),
            pack(args, **buffers_of(work, partials)),
            layout.shared_bytes,
            cluster=blocks if clustered else 1,
        )
        order = f"{tile.columns} columns, {layout.slots} slots, {blocks} blocks"
        expected = expected_s(work, device, layout)
        return Fragment(self.name, (launch,), partials, expected_s=expected, order=order)

    def instances(self) -> Iterable[Instance]:
        return [
            _instance(dtype, RowsTile(kernel, stride, columns, vector))
            for kernel, stride in (*product(KERNELS, COLUMNS), (LONG, 1))
            for dtype in DTYPES
            for vector in ((1, 2) if dtype.itemsize == 2 else (1,))
            for columns in _columns(dtype, kernel, stride, vector)
        ]


def _columns(dtype: DType, kernel: int, stride: int, vector: int) -> tuple[int, ...]:
    if kernel == LONG:
        return (LONG_COLUMNS[vector],)
    return COLUMNS[stride][-1:] if dtype.itemsize * vector == 2 else COLUMNS[stride]


def _parts(work: ConvWork) -> tuple[int, int]:
    """Return the parts of a row of taps, and their columns."""
    columns = work.kernel[2]
    parts = ceil_div(columns, LONG if columns > FEW and work.stride[2] == 1 else KERNELS[-1])
    part = ceil_div(columns, parts)
    return ceil_div(columns, part), part


def _tap_rows(work: ConvWork) -> int:
    return work.kernel[0] * work.kernel[1] * _parts(work)[0]


def _strips(work: ConvWork, tile: RowsTile) -> int:
    """Return the strips of a row of y; of one column each, where the taps are as far apart."""
    spread, width = spread_of(work), work.output[2]
    return min(width, spread * ceil_div(width, spread * tile.columns))


def _grid(work: ConvWork, layout: RowsLayout) -> tuple[int, int]:
    """Return the tiles of channels and the sets of rows of taps."""
    return (
        ceil_div(channels_of(work), layout.vectors * layout.tile.vector),
        ceil_div(_tap_rows(work), layout.tap_rows),
    )


def layouts_of(work: ConvWork, device: CudaDevice) -> Iterator[RowsLayout]:
    """Yield the layouts that may be the fastest."""
    part = _parts(work)[1]
    kernel = next((one for one in KERNELS if one >= part), LONG)
    vector, tap_rows = vector_of(work), _tap_rows(work)
    all_vectors = ceil_div(channels_of(work), vector)
    sizes = set()
    for most in (8, 16, 32):
        tiles = ceil_div(all_vectors, most)
        sizes.add(ceil_div(ceil_div(all_vectors, tiles), 4) * 4)
    together = {ceil_div(tap_rows, sets) for sets in (1, 2, 3, 4, tap_rows)}
    tile = min(
        (
            RowsTile(kernel, work.stride[2], columns, vector)
            for columns in _columns(work.dtype, kernel, work.stride[2], vector)
        ),
        key=lambda tile: _strips(work, tile) * _instructions(work, tile),
    )
    items = work.pixels // work.output[2] * _strips(work, tile)
    for vectors in sorted(sizes):
        for rows in sorted(together):
            if vectors * rows > THREADS:
                continue
            layout = RowsLayout(tile, vectors, rows, 1)
            most = ceil_div(items, layout.slots)
            wave = device.multiprocessors * BLOCKS // prod(_grid(work, layout))
            for blocks in (*CLUSTERS, wave) if wave > MOST_CLUSTER else CLUSTERS:
                if blocks <= most:
                    yield RowsLayout(tile, vectors, rows, blocks)


@lru_cache(maxsize=1024)
def _best(work: ConvWork, device: CudaDevice) -> RowsLayout:
    return min(layouts_of(work, device), key=lambda one: expected_s(work, device, one))


def _instructions(work: ConvWork, tile: RowsTile) -> float:
    """Return the instructions of an item."""
    of_x, of_y = (tile.columns - 1) * tile.stride + tile.kernel, tile.columns
    products = tile.columns * tile.kernel * tile.vector
    found = INSTRUCTIONS + (of_x + of_y) * (PER_READ + tile.vector) + products
    if is_in_planes(work):
        lines = of_x * wavefronts(tile.columns * tile.stride, work.dtype)
        found += PLANE_READ * (lines + of_y * wavefronts(tile.columns, work.dtype))
    return found


def expected_s(work: ConvWork, device: CudaDevice, layout: RowsLayout) -> float:
    """Return the predicted time of a layout."""
    tile = layout.tile
    channel_tiles, tap_sets = _grid(work, layout)
    grid = layout.blocks * channel_tiles * tap_sets
    items = work.pixels // work.output[2] * _strips(work, tile)
    rounds = ceil_div(ceil_div(items, layout.blocks), layout.slots)
    spread = CLUSTERED if 2 < layout.blocks <= MOST_CLUSTER else 1.0
    most = ceil_div(grid, int(device.multiprocessors * spread))
    held = min(most, BLOCKS)
    warps = ceil_div(layout.vectors * layout.tap_rows * layout.slots, 32)
    round_s = max(ROUND_S, held * warps * _instructions(work, tile) / (4 * CLOCKS_S))
    total_s = LAUNCH_S + ceil_div(most, held) * (FIRST_S + rounds * round_s)
    total_s += APART * bytes_of(work) * tap_sets / BYTES_S
    if layout.blocks > 1:
        total_s += CLUSTER_S if is_clustered(device, layout.blocks) else CLUSTER_S + GRID_S
    return total_s


def _instance(dtype: DType, tile: RowsTile) -> Instance:
    return Instance.of(
        "depthwise/depthwise_weight_rows.cu",
        ELEMENT=dtype,
        **macros_of(tile, "kernel", "stride", "columns", "vector"),
        THREADS=THREADS,
        BLOCKS=BLOCKS,
    )
