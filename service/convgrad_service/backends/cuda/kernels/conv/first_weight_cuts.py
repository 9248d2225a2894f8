"""Partitions of a first layer's wgrad (first_weight.cu), and the time that each should take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.conv.first_sum import results_of
from convgrad_service.backends.cuda.kernels.core.limits import MAX_GRID_YZ
from convgrad_service.plans.cuda.device import RESERVED_BYTES, CudaDevice
from convgrad_service.plans.cuda.program import ceil_div
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["CHUNK_BYTES", "COLUMNS", "TILES", "Cut", "Layout", "Tile", "channel_groups", "cuts_of"]
__all__ += ["expected_s", "is_split", "layout_of", "splits_of", "units_of"]

COLUMNS = 32
"""Channels of y of a warp tile."""
STEP = 8
"""Pixels of an mma."""
CHUNK_BYTES, WORD_BYTES = 16, 4
"""What cp.async copies at once: of aligned rows, and of others."""
SEGMENTS = (8, 16, 32, 48, 64, 96, 128, 256, 512)
ROWS = (1, 2, 3, 4, 6, 8, 16)
"""Columns and rows of a unit, at most."""
# The most bytes of partial sums, unless the caller asks for more splits.
PARTIAL_BYTES = 256 * 2**20


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
    Tile(2, 4, 3, 4),
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


class Cut(NamedTuple):
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


def layout_of(work: ConvWork) -> Layout | None:
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


def is_split(work: ConvWork) -> bool:
    return work.dtype is DType.FLOAT32 and work.precision != "high"


def cuts_of(work: ConvWork, device: CudaDevice, layout: Layout) -> Iterator[Cut]:
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
            device.shared_bytes_per_multiprocessor // tile.blocks(is_split(work)) - RESERVED_BYTES,
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


def channel_groups(work: ConvWork, cut: Cut) -> int:
    return ceil_div(work.out_channels, cut.warps_n * COLUMNS)


def units_of(work: ConvWork, cut: Cut) -> int:
    planes = work.batch * work.output[0]
    return planes * ceil_div(work.output[1], cut.rows) * ceil_div(work.output[2], cut.segment)


def splits_of(work: ConvWork, device: CudaDevice, cut: Cut) -> int:
    """Return the number of splits that fills the device once."""
    units, results = units_of(work, cut), results_of(work)
    if work.split_k is not None:
        return max(1, min(work.split_k, units, MAX_GRID_YZ))
    room = max(1, PARTIAL_BYTES // (results * 4))
    blocks = device.multiprocessors * cut.tile.blocks(is_split(work))
    return max(
        1, min(units, room, MAX_GRID_YZ, blocks // (cut.tap_groups * channel_groups(work, cut)))
    )


# Fitted on an H200 to 800 configurations of 81 layers, without a second half: they err by 23 %.
# Of an SM, per clock: bytes of memory, products of TF32 by mma.sync, instructions.
BYTES, PRODUCTS, ISSUED = 12.0, 650.0, 1.3
# Of both launches.
START_S, CLOCKS_PER_S = 7e-6, 1.7e9
# Clocks of a unit, and of each of a warp's steps, in which the block waits.
UNIT, STEPS = 2500.0, 60.0


def expected_clocks(work: ConvWork, device: CudaDevice, cut: Cut) -> float:
    """Return the clocks that a partition should take."""
    splits = splits_of(work, device, cut)
    groups = cut.tap_groups * channel_groups(work, cut)
    split, layout, warps = is_split(work), cut.layout, cut.warps_m * cut.warps_n
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
        each = 8 if size >= WORD_BYTES else 24
        issued += count * layout.item * (each / size + (8 / CHUNK_BYTES if split else 0)) / 32
    moved = sum(elements) * layout.item
    products = taken * fragments * parts * 1024
    unit = max(issued / ISSUED, products / PRODUCTS, taken * loads, moved / BYTES)
    share = ceil_div(units_of(work, cut), splits)
    resident = ceil_div(groups * splits, device.multiprocessors)
    waits = UNIT + ceil_div(steps, cut.warps_k) * STEPS
    at_once = min(resident, cut.tile.blocks(split))
    sums = splits * results_of(work) * 4 / (BYTES * device.multiprocessors)
    return share * resident * (unit + waits / at_once) + sums + waits + unit


def expected_s(work: ConvWork, device: CudaDevice, cut: Cut) -> float:
    """Return the seconds that both launches should take."""
    return START_S + expected_clocks(work, device, cut) / CLOCKS_PER_S
