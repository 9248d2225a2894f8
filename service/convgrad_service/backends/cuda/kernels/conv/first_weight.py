"""wgrad of a first layer by mma.sync, on tensors in place (first_weight.cu)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import fill, pack
from convgrad_service.backends.cuda.kernels.conv.first_sum import (
    first_sum,
    first_sum_instances,
    results_of,
    why_not_summed,
)
from convgrad_service.backends.cuda.kernels.core.gather_axes import divider
from convgrad_service.backends.cuda.kernels.core.limits import (
    DTYPES,
    MAX_GRID_YZ,
    Requirements,
    why_not_32bit_positions,
)
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import RESERVED_BYTES, CudaDevice
from convgrad_service.plans.cuda.families import Solver
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, Workspace, ceil_div
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["FirstWeight"]

MOST_CHANNELS = 8
"""The most channels of the input."""
COLUMNS = 32
"""Channels of y of a warp tile."""
STEP = 8
"""Pixels of an mma."""
CHUNK_BYTES, WORD_BYTES = 16, 4
"""What cp.async copies at once: of aligned rows, and of others."""
SEGMENTS = (8, 16, 32, 48, 64, 96, 128, 256, 512)
ROWS = (1, 2, 3, 4, 6, 8, 16)
"""Columns and rows of a unit, at most."""
MAX_INDEX = 2**31 - 1
# The most bytes of partial sums, unless the caller asks for more splits.
PARTIAL_BYTES = 256 * 2**20


FirstWeightArgs = structure("conv/first_weight.cuh", "FirstWeightArgs")


@dataclass(frozen=True, slots=True)
class Tile:
    """A warp's fragments of 16 taps, the most warps of a block, and the blocks for which an SM has
    registers: with operands that are split, and with others."""

    fragments: int
    warps: int
    split_blocks: int
    plain_blocks: int

    @property
    def taps(self) -> int:
        return 16 * self.fragments

    def blocks(self, split: bool) -> int:
        return self.split_blocks if split else self.plain_blocks


TILES = (
    Tile(1, 4, 5, 6),
    Tile(1, 8, 2, 3),
    Tile(2, 4, 3, 5),
    Tile(2, 8, 1, 2),
    Tile(4, 4, 2, 3),
    Tile(4, 8, 1, 1),
)


@dataclass(frozen=True, slots=True)
class Layout:
    """Tensors in memory: bytes of an element, planes of x and channels of a position, whether
    channels of y are contiguous, and the bytes of a row that are copied at once."""

    item: int
    planes: int
    column: int
    y_last: bool
    x_bytes: int
    y_bytes: int

    @property
    def chunk(self) -> int:
        """Elements of 16 bytes."""
        return CHUNK_BYTES // self.item


@dataclass(frozen=True, slots=True)
class Cut:
    """A partition; fields as in ``FirstWeightArgs``, strides in elements."""

    tile: Tile
    layout: Layout
    tap_groups: int
    warps_m: int
    warps_n: int
    warps_k: int
    rows: int
    segment: int
    stages: int
    y_row: int
    y_column: int
    y_channel: int
    y_size: int
    x_rows: int
    x_lead: int
    x_length: int
    x_row: int
    x_plane: int
    x_size: int

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n * self.warps_k

    @property
    def stage_bytes(self) -> int:
        return self.layout.item * (self.y_size + self.x_size)

    @property
    def shared_bytes(self) -> int:
        sums = self.warps_n * COLUMNS * (self.warps_m * self.tile.taps + 4)
        return max(self.stages * self.stage_bytes, 4 * sums)


NEEDS = Requirements(dilated=False)


class FirstWeight(Solver[ConvWork, Cut]):
    """bwd_weight with at most ``MOST_CHANNELS`` input channels, without copies."""

    name = "first_weight"

    def solve(self, work: ConvWork, device: CudaDevice) -> Cut | str:
        """See `Family.why_not`. Splitting along N or H does not change the answer."""
        if (reason := NEEDS.why_not(work, device)) is not None:
            return reason
        if work.in_channels > MOST_CHANNELS:
            return f"{work.in_channels} channels of the input are more than {MOST_CHANNELS}"
        if work.pixels > MAX_INDEX or prod(work.input) * work.in_channels > MAX_INDEX:
            return "positions are more than 32 bits count"
        reason = why_not_32bit_positions(work) or why_not_summed(work)
        if reason is not None:
            return reason
        layout = _layout(work)
        if layout is None:
            return "neither columns nor channels are contiguous"
        cuts = list(_cuts(work, device, layout))
        if not cuts:
            return "rows do not fit into shared memory"
        return min(cuts, key=lambda cut: _clocks(work, device, cut))

    def fragment(self, work: ConvWork, device: CudaDevice, cut: Cut) -> Fragment:
        results = results_of(work)
        units, blocks = _units(work, cut), cut.tap_groups * _channel_groups(work, cut)
        splits = _splits(work, device, cut)
        args = FirstWeightArgs()
        x, y = work.x.strides, work.y.strides
        args.x_stride[:] = (x[0], x[2], x[3], x[4])
        args.y_stride[:] = (y[0], y[2], y[3], y[4], y[5])
        args.x_size[:], args.y_size[:] = work.input, work.output
        args.y_channels, args.taps = work.out_channels, work.in_channels * work.taps
        fill(args, work, "kernel", "stride", "pad")
        layout = cut.layout
        fill(args, layout, "planes", "column", "y_last")
        fill(args, cut, "tap_groups", "warps_m", "warps_n", "rows", "segment", "stages")
        fill(args, cut, "x_lead", "stage_bytes")
        args.row_units = ceil_div(work.output[1], cut.rows)
        args.segments = ceil_div(work.output[2], cut.segment)
        args.units, args.more = divmod(units, splits)
        args.x_at = layout.item * cut.y_size
        for name in ("y_row", "y_column", "y_channel", "x_row", "x_plane"):
            setattr(args, name, layout.item * getattr(cut, name))
        x_chunks, y_chunks = _chunks(cut)
        y_rows = cut.segment if layout.y_last else cut.rows
        _shape(args.x_shape, layout.x_bytes, cut.x_rows, x_chunks, layout.planes, cut.threads)
        y_planes = cut.rows if layout.y_last else cut.warps_n * COLUMNS
        _shape(args.y_shape, layout.y_bytes, y_rows, y_chunks, y_planes, cut.threads)
        partials = f"{work.prefix}partials"
        launch = Launch(
            _instance(work.dtype, cut.tile, _split(work)),
            (blocks, splits, 1),
            (cut.threads, 1, 1),
            pack(args, x=work.x, y=work.y, partials=partials),
            cut.shared_bytes,
        )
        return Fragment(
            f"{self.name}/{splits}",
            (launch, first_sum(work, partials, splits, device)),
            (Workspace(partials, splits * results * 4),),
            expected_s=START_S + _clocks(work, device, cut) / CLOCKS_PER_S,
        )

    def instances(self) -> Iterable[Instance]:
        return [
            *(_instance(dtype, tile, False) for dtype in DTYPES for tile in TILES),
            *(_instance(DType.FLOAT32, tile, True) for tile in TILES),
            *first_sum_instances(),
        ]


def _layout(work: ConvWork) -> Layout | None:
    x, y, channels = work.x.strides, work.y.strides, work.in_channels

    def along(stride: int, extent: int, wanted: int = 1) -> bool:
        return extent == 1 or stride == wanted

    if along(x[5], work.input[2]):
        planes, column = channels, 1
    elif along(x[2], channels) and along(x[5], work.input[2], channels):
        planes, column = 1, channels
    else:
        return None
    if channels == 1:
        planes = column = 1
    y_last = not along(y[5], work.output[2])
    if y_last and not along(y[2], work.out_channels):
        return None

    item = work.dtype.itemsize

    def copied(strides: Iterable[tuple[int, int]]) -> int:
        """Return the bytes at once: the most to whose multiples these strides lead."""
        for size in (CHUNK_BYTES, WORD_BYTES):
            if all(stride * item % size == 0 for stride, extent in strides if extent > 1):
                return size
        return item

    x_bytes = copied(
        [
            (x[0], work.batch),
            (x[2], planes),
            (x[3], work.input[0]),
            (x[4], work.input[1]),
            (work.input[2] * column, 2),
        ]
    )
    outer = [(y[0], work.batch), (y[3], work.output[0]), (y[4], work.output[1])]
    if y_last:
        outer += [(y[5], work.output[2]), (work.out_channels, 2)]
    else:
        outer += [(y[2], work.out_channels), (work.output[2], 2)]
    return Layout(item, planes, column, y_last, x_bytes, copied(outer))


def _split(work: ConvWork) -> bool:
    return work.dtype is DType.FLOAT32 and work.precision != "high"


def _cuts(work: ConvWork, device: CudaDevice, layout: Layout) -> Iterator[Cut]:
    """Return every partition that fits."""
    taps, columns = work.in_channels * work.taps, work.output[2]
    # The even segments of at most so many columns.
    segments = {
        ceil_div(ceil_div(columns, ceil_div(columns, most)), STEP) * STEP for most in SEGMENTS
    }
    for tile in TILES:
        all_m, all_n = ceil_div(taps, tile.taps), ceil_div(work.out_channels, COLUMNS)
        groups = ceil_div(all_m, tile.warps)
        warps_m = ceil_div(all_m, groups)
        warps_n = min(all_n, max(1, tile.warps // warps_m))
        warps_n = ceil_div(all_n, ceil_div(all_n, warps_n))
        warps_k = tile.warps // (warps_m * warps_n)
        room = min(
            device.shared_bytes_per_block,
            device.shared_bytes_per_multiprocessor // tile.blocks(_split(work)) - RESERVED_BYTES,
        )
        for segment in sorted(segments):
            for rows in ROWS:
                if rows > work.output[1]:
                    break
                for stages in (3, 2):
                    cut = _cut(
                        work,
                        layout,
                        tile,
                        groups,
                        (warps_m, warps_n, warps_k),
                        rows,
                        segment,
                        stages,
                    )
                    if cut.shared_bytes <= room:
                        yield cut
                        break


def _cut(
    work: ConvWork,
    layout: Layout,
    tile: Tile,
    groups: int,
    warps: tuple[int, int, int],
    rows: int,
    segment: int,
    stages: int,
) -> Cut:
    """Return the partition with rows in shared memory padded against bank conflicts."""
    channels, chunk = warps[1] * COLUMNS, layout.chunk
    words = WORD_BYTES // layout.item
    if layout.y_last:
        y_channel, y_column = 1, channels + 8 * words
        y_row = segment * y_column
        y_size = rows * y_row
    else:
        y_column, y_row = 1, segment
        # Eight channels by four pixels are in different banks.
        y_channel = _padded(rows * segment, chunk)
        y_size = channels * y_channel
    step = work.stride[2] * layout.column
    # Segments start at multiples of eight columns, so chunks of x do as without padding.
    unit = layout.x_bytes // layout.item
    x_lead = work.pad[2] * layout.column * -1 % unit
    x_length = (segment - 1) * step + work.kernel[2] * layout.column + x_lead
    x_length = ceil_div(x_length, chunk) * chunk
    x_rows = (rows - 1) * work.stride[1] + work.kernel[1]
    x_row = _padded(x_length, chunk)
    x_plane = x_rows * x_row
    return Cut(
        tile,
        layout,
        groups,
        *warps,
        rows,
        segment,
        stages,
        y_row,
        y_column,
        y_channel,
        ceil_div(y_size, chunk) * chunk,
        x_rows,
        x_lead,
        x_length,
        x_row,
        x_plane,
        layout.planes * work.kernel[0] * x_plane,
    )


def _padded(length: int, chunk: int) -> int:
    """Return a number of whole chunks, an odd one."""
    return (ceil_div(length, chunk) | 1) * chunk


def _channel_groups(work: ConvWork, cut: Cut) -> int:
    return ceil_div(work.out_channels, cut.warps_n * COLUMNS)


def _units(work: ConvWork, cut: Cut) -> int:
    planes = work.batch * work.output[0]
    return planes * ceil_div(work.output[1], cut.rows) * ceil_div(work.output[2], cut.segment)


def _splits(work: ConvWork, device: CudaDevice, cut: Cut) -> int:
    """Return the number of splits that fills the device once."""
    units, results = _units(work, cut), results_of(work)
    if work.split_k is not None:
        return max(1, min(work.split_k, units, MAX_GRID_YZ))
    room = max(1, PARTIAL_BYTES // (results * 4))
    blocks = device.multiprocessors * cut.tile.blocks(_split(work))
    return max(
        1, min(units, room, MAX_GRID_YZ, blocks // (cut.tap_groups * _channel_groups(work, cut)))
    )


# Of an SM, per clock: bytes of memory, products of TF32 by mma.sync, instructions.
BYTES, PRODUCTS, ISSUED = 16.0, 650.0, 3.0
# Bytes that a row of y costs besides its own.
ROW_BYTES = 32
# Of both launches.
START_S, CLOCKS_PER_S = 7e-6, 1.7e9
# Clocks of a unit, and of each of a warp's steps, in which the block waits.
UNIT, STEPS = 900.0, 120.0


def _clocks(work: ConvWork, device: CudaDevice, cut: Cut) -> float:
    """Return the clocks that a partition should take."""
    splits = _splits(work, device, cut)
    groups = cut.tap_groups * _channel_groups(work, cut)
    split, layout, warps = _split(work), cut.layout, cut.warps_m * cut.warps_n
    steps = cut.rows * cut.segment // STEP
    fragments, loads = cut.tile.fragments * 4, cut.tile.fragments * 4 + 8
    parts = 3 if split else 1
    # Of the block's warps together, a step of each tile.
    taken = ceil_div(steps, cut.warps_k) * cut.warps_k * warps
    issued = taken * (loads * (4.5 if split else 2.5) + fragments * parts + 25)
    elements = (
        layout.planes * work.kernel[0] * cut.x_rows * cut.x_length,
        cut.rows * cut.segment * cut.warps_n * COLUMNS,
    )
    for count, size in zip(elements, (layout.x_bytes, layout.y_bytes), strict=True):
        issued += count * layout.item / size / 32 * (16 if split else 8)
    # Rows of y are read in whole sectors, and short ones less evenly.
    y_row = (cut.warps_n * COLUMNS if layout.y_last else cut.segment) * layout.item
    moved = (elements[0] + elements[1] * (1 + ROW_BYTES / y_row)) * layout.item
    products = taken * fragments * parts * 1024
    unit = max(issued / ISSUED, products / PRODUCTS, taken * loads, moved / BYTES)
    share = ceil_div(_units(work, cut), splits)
    resident = ceil_div(groups * splits, device.multiprocessors)
    waits = UNIT + ceil_div(steps, cut.warps_k) * STEPS
    at_once = min(resident, cut.tile.blocks(split))
    sums = splits * results_of(work) * 4 / (BYTES * device.multiprocessors)
    return share * resident * (unit + waits / at_once) + sums + waits + unit


def _chunks(cut: Cut) -> tuple[int, int]:
    """Return the chunks of a row of x, and of y, that are copied at once."""
    layout = cut.layout
    y_length = cut.warps_n * COLUMNS if layout.y_last else cut.segment
    return (
        cut.x_length * layout.item // layout.x_bytes,
        y_length * layout.item // layout.y_bytes,
    )


def _shape(shape: Any, size: int, rows: int, chunks: int, planes: int, threads: int) -> None:
    """Fill in a ``CopyShape``."""
    shape.bytes, shape.places, shape.chunks = size, rows * chunks, chunks
    shape.groups = max(1, min(planes, threads // shape.places))
    for by, count in (
        (shape.by_places, shape.places if shape.groups > 1 else threads),
        (shape.by_chunks, chunks),
    ):
        by.factor, by.shift = divider(count)


def _instance(dtype: DType, tile: Tile, split: bool) -> Instance:
    return Instance.of(
        "conv/first_weight.cu",
        ELEMENT=dtype,
        FRAGMENTS=tile.fragments,
        SPLIT=split,
        THREADS=32 * tile.warps,
        BLOCKS=tile.blocks(split),
    )
