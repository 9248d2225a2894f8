"""Channels-last depthwise wgrad, a row of taps at a time (depthwise_weight_rows.cu)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
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
    lines_of,
    rows_adjacent,
    spread_of,
    turned,
    turns_of,
    vector_of,
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
from convgrad_service.plans.cuda.device import ARCHITECTURES, HOPPER, CudaDevice
from convgrad_service.plans.cuda.families import Solver
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div, macros_of
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["DepthwiseWeightRows", "RowsLayout", "RowsTile", "layouts_of"]

THREADS, BLOCKS = 256, 2
MOST_INDEX = 2**31 - 1
KERNELS, COLUMNS = (3, 5, 7), {1: (7,), 2: (4, 7)}
# Columns of y are by the stride: with four as well, layers of stride 1 are expected to take 0.1 %
# less. With stride 1, kernels of more than FEW columns take LONG instances, whose columns of y are
# by channels. Single channels of 16 bits, which are rare, have those of the most columns alone.
FEW, LONG, LONG_COLUMNS = 13, 16, {1: 6, 2: 4}
# Columns of y, by the stride, of single channels of all of a square kernel's rows.
WHOLE_COLUMNS = {1: 7, 2: 4}
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
# Instructions of a cache line that a warp reads of planes; fitted to 69 configurations of 15
# layers, on which the choice takes as long as the fastest.
PLANE_READ = 0.2
APART = 0.064


@dataclass(frozen=True, slots=True)
class RowsTile:
    """An instance: columns of taps, stride along W, columns of y of an item, channels and rows of
    taps of a thread."""

    kernel: int
    stride: int
    columns: int
    vector: int
    rows: int = 1

    @property
    def sums(self) -> int:
        return self.rows * self.kernel * self.vector

    @property
    def blocks(self) -> int:
        """Blocks of an SM for which registers suffice."""
        return 1 if self.rows > KERNELS[0] else BLOCKS


@dataclass(frozen=True, slots=True)
class RowsLayout:
    """Vectors of channels and threads' rows of taps of a block, blocks that share the items, and
    whether H and W are exchanged."""

    tile: RowsTile
    vectors: int
    tap_rows: int
    blocks: int
    turned: bool = False

    def of(self, work: ConvWork) -> ConvWork:
        """Return a work as it is launched."""
        return turned(work) if self.turned else work

    @property
    def slots(self) -> int:
        return THREADS // (self.vectors * self.tap_rows)

    @property
    def shared_bytes(self) -> int:
        sums = self.tap_rows * self.tile.sums * self.vectors
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
        if (reason := why_not_volume(work, in_planes=self._in_planes)) is not None:
            return reason
        if not any(form.stride[2] in COLUMNS for _, form in _forms(work)):
            return f"a stride of {work.stride[2]} along W"
        if work.pixels + 4 * THREADS > MOST_INDEX:
            return "more than 2^31 items"
        layout = self._layout or _best(work, device)
        return why_not_counted(prod(_grid(layout.of(work), layout))) or layout

    def fragment(self, work: ConvWork, device: CudaDevice, layout: RowsLayout) -> Fragment:
        expected = expected_s(work, device, layout)
        work, tile, blocks = layout.of(work), layout.tile, layout.blocks
        channel_tiles, tap_sets = _grid(work, layout)
        planes, rows, _ = work.output
        args = DepthwiseWeightRowsArgs()
        fill_volume(args, work, layout.vectors)
        args.kernel_rows, args.columns = work.kernel[1:]
        args.parts, args.part = _parts(work)
        args.all_tap_rows = _tap_rows(work)
        args.tap_rows, args.slots = layout.tap_rows, layout.slots
        strips = _strips(work, tile)
        args.down_first = rows_adjacent(work)
        args.inner, args.outer = (rows, strips) if args.down_first else (strips, rows)
        args.items = items = work.batch * planes * rows * strips
        args.spread = spread_of(work)
        args.share = ceil_div(items, blocks)
        args.by_multiplier, args.by_spread = divider(work.out_channels), divider(args.spread)
        args.by_tap_rows = divider(layout.tap_rows)
        args.by_parts, args.by_kernel_rows = divider(args.parts), divider(work.kernel[1])
        args.by_inner, args.by_outer = divider(args.inner), divider(args.outer)
        args.by_planes = divider(planes)
        args.x_channel, args.y_channel = channel_strides_of(work)
        args.in_planes = is_in_planes(work)
        args.by_places = divider(layout.slots * layout.tap_rows)
        clustered = is_clustered(device, blocks)
        sums = layout.tap_rows * tile.sums * layout.vectors
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
        if layout.turned:
            order += ", turned"
        return Fragment(self.name, (launch,), partials, expected_s=expected, order=order)

    def instances(self) -> Iterable[Instance]:
        return [
            _instance(dtype, RowsTile(kernel, stride, columns, vector))
            for kernel, stride in (*product(KERNELS, COLUMNS), (LONG, 1))
            for dtype in DTYPES
            for vector in ((1, 2) if dtype.itemsize == 2 else (1,))
            for columns in _columns(dtype, kernel, stride, vector)
        ] + [
            _instance(dtype, RowsTile(kernel, stride, columns, 1, kernel))
            for kernel, (stride, columns) in product(KERNELS, WHOLE_COLUMNS.items())
            for dtype in DTYPES
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
        ceil_div(_tap_rows(work), layout.tap_rows * layout.tile.rows),
    )


def _forms(work: ConvWork) -> Iterator[tuple[bool, ConvWork]]:
    """Yield a work and the same `turned`, if it may be computed so."""
    for turn in turns_of(work):
        # Rows of taps are as far apart in all planes.
        if not turn or work.kernel[0] == 1:
            yield turn, turned(work) if turn else work


def layouts_of(work: ConvWork, device: CudaDevice) -> Iterator[RowsLayout]:
    """Yield the layouts that may be the fastest."""
    for turn, form in _forms(work):
        if form.stride[2] in COLUMNS:
            for layout in _layouts(form, device):
                yield replace(layout, turned=turn)


def _layouts(work: ConvWork, device: CudaDevice) -> Iterator[RowsLayout]:
    part = _parts(work)[1]
    kernel = next((one for one in KERNELS if one >= part), LONG)
    vector = vector_of(work)
    all_vectors = ceil_div(channels_of(work), vector)
    sizes = set()
    # In planes, blocks of fewer channels have more adjacent items.
    for most in (4, 8, 16, 32) if is_in_planes(work) else (8, 16, 32):
        tiles = ceil_div(all_vectors, most)
        sizes.add(ceil_div(ceil_div(all_vectors, tiles), 4) * 4)
    narrow = [
        RowsTile(kernel, work.stride[2], columns, vector)
        for columns in _columns(work.dtype, kernel, work.stride[2], vector)
    ]
    best = [min(narrow, key=lambda tile: _strips(work, tile) * _instructions(work, tile))]
    if vector == 1 and kernel == work.kernel[1] == work.kernel[2]:
        whole = RowsTile(kernel, work.stride[2], WHOLE_COLUMNS[work.stride[2]], 1, kernel)
        if device.architecture in _architectures(whole):
            best.append(whole)
    for tile in best:
        tap_rows = _tap_rows(work) // tile.rows
        together = {ceil_div(tap_rows, sets) for sets in (1, 2, 3, 4, tap_rows)}
        items = work.pixels // work.output[2] * _strips(work, tile)
        for vectors, rows in product(sorted(sizes), sorted(together)):
            if vectors * rows > THREADS:
                continue
            layout = RowsLayout(tile, vectors, rows, 1)
            most = ceil_div(items, layout.slots)
            wave = device.multiprocessors * tile.blocks // prod(_grid(work, layout))
            for blocks in (*CLUSTERS, wave) if wave > MOST_CLUSTER else CLUSTERS:
                if blocks <= most:
                    yield RowsLayout(tile, vectors, rows, blocks)


@lru_cache(maxsize=1024)
def _best(work: ConvWork, device: CudaDevice) -> RowsLayout:
    return min(layouts_of(work, device), key=lambda one: expected_s(work, device, one))


def _instructions(work: ConvWork, tile: RowsTile) -> float:
    """Return the instructions of an item."""
    of_x, of_y = (tile.columns - 1) * tile.stride + tile.kernel, tile.columns
    of_x *= tile.rows
    products = tile.columns * tile.sums
    found = INSTRUCTIONS + (of_x + of_y) * (PER_READ + tile.vector) + products
    if is_in_planes(work):
        down = rows_adjacent(work)
        apart = 1 if down or spread_of(work) > 1 else tile.columns
        adjacent = work.output[1] if down else _strips(work, tile)
        found += PLANE_READ * (
            of_x * lines_of(work.dtype, apart * work.stride[1 if down else 2], adjacent)
            + of_y * lines_of(work.dtype, apart, adjacent)
        )
    return found


def expected_s(work: ConvWork, device: CudaDevice, layout: RowsLayout) -> float:
    """Return the predicted time of a layout."""
    work, tile = layout.of(work), layout.tile
    channel_tiles, tap_sets = _grid(work, layout)
    grid = layout.blocks * channel_tiles * tap_sets
    items = work.pixels // work.output[2] * _strips(work, tile)
    rounds = ceil_div(ceil_div(items, layout.blocks), layout.slots)
    spread = CLUSTERED if 2 < layout.blocks <= MOST_CLUSTER else 1.0
    most = ceil_div(grid, int(device.multiprocessors * spread))
    held = min(most, tile.blocks)
    warps = ceil_div(layout.vectors * layout.tap_rows * layout.slots, 32)
    round_s = max(ROUND_S, held * warps * _instructions(work, tile) / (4 * CLOCKS_S))
    total_s = LAUNCH_S + ceil_div(most, held) * (FIRST_S + rounds * round_s)
    total_s += APART * bytes_of(work) * tap_sets / BYTES_S
    if layout.blocks > 1:
        total_s += CLUSTER_S if is_clustered(device, layout.blocks) else CLUSTER_S + GRID_S
    return total_s


def _architectures(tile: RowsTile) -> tuple[str, ...]:
    """Return those on which registers suffice: for 7x7 sums, not on Blackwell."""
    return HOPPER if tile.rows == KERNELS[-1] else ARCHITECTURES


def _instance(dtype: DType, tile: RowsTile) -> Instance:
    return Instance.of(
        "depthwise/depthwise_weight_rows.cu",
        _architectures(tile),
        ELEMENT=dtype,
        **macros_of(tile, "kernel", "stride", "columns", "vector", "rows"),
        THREADS=THREADS,
        BLOCKS=tile.blocks,
    )
