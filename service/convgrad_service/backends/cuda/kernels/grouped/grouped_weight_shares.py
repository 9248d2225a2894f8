"""How a grouped weight gradient is divided over blocks (grouped_weight.cu), and the time expected."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.core.elements import CUDA_TYPES
from convgrad_service.backends.cuda.kernels.grouped.grouped_box import (
    LatticeAxis,
    Size4,
    MOST_BOX,
    candidate_tiles,
    lattice_axis,
    why_not_copied,
)
from convgrad_service.backends.cuda.kernels.grouped.grouped_merge import (
    Merge,
    merge_of,
    odd_chunks,
    slices_of,
)
from convgrad_service.backends.cuda.kernels.grouped.weight_boxes import (
    aligned,
    splits_of,
    tiles_of,
    unique_bytes,
)
from convgrad_service.backends.cuda.kernels.layout.channels_last import CHUNK_BYTES
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import ceil_div
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["ITEMS", "SMALL", "HALF_ITEMS", "Item", "Parts", "Share", "shares_of", "time_of"]

MOST_PIXELS = 512
STAGES, ENGINE_STAGES = (4, 3, 2), (8, 6, 4, 3, 2)
ALIGNMENT, ROW_BYTES, STATIC_BYTES = 128, 16, 1024
PLACES = (32, 64, 128, 256, MOST_PIXELS)
"""Of tiles with at most so many pixels, and more than the next smaller, the best are compared."""
BEST = 2


@dataclass(frozen=True, slots=True)
class Item:
    """A warp tile: fragments of 16 rows (taps x channels) by columns of 8."""

    rows: int
    columns: int
    warps: int
    blocks: int
    windows: bool = False
    """Whether pixels form runs of 8 columns whose input rows are loaded once."""

    def defines(self, dtype: DType, exact: bool, engine: bool) -> tuple[tuple[str, str], ...]:
        return (
            ("COPY_ENGINE", str(int(engine))),
            ("EXACT", str(int(exact))),
            ("ELEMENT", CUDA_TYPES[dtype]),
            ("FRAGMENTS", str(self.rows)),
            ("NF", str(self.columns)),
            ("WARPS", str(self.warps)),
            ("BLOCKS", str(self.blocks)),
            ("WINDOWS", str(int(self.windows))),
        )

    @property
    def slab_bytes(self) -> int:
        """Shared memory for a warp's sums."""
        return self.columns * 8 * (self.rows * 16 + 4) * 4

    @property
    def sums(self) -> int:
        return self.rows * 16 * self.columns * 8


TALL, SHORT = 5, 3
"""Fragments of rows. With 3x3 taps, five hold all rows of 8 channels, or half of 16."""
ITEMS = (
    Item(TALL, 1, 8, 2),
    Item(TALL, 2, 8, 2),
    Item(TALL, 3, 8, 2),
    Item(TALL, 4, 8, 1),
)
HALF_ITEMS = (
    *ITEMS,
    Item(TALL, 5, 8, 1),
    Item(TALL, 6, 8, 1),
    Item(SHORT, 1, 8, 2),
    Item(SHORT, 2, 8, 2),
    Item(SHORT, 4, 8, 2),
    Item(SHORT, 8, 8, 1),
)
"""For 16-bit types."""


SMALL = Item(TALL, 1, 8, 2, windows=True)
"""For 3x3 taps of 8 channels without dilation."""


@dataclass(frozen=True, slots=True)
class Share:
    """What a block computes.

    Attributes
    ----------
    tile : tuple of int
        Pixels of a box: N, D, H, W.
    slice : int
        Merges.
    apart : bool
        Whether a block has the taps of one position along D and H, instead of all taps.
    stages : int
        Boxes in shared memory.
    splits : int
        Of all boxes; 0 fills the device.
    """

    tile: Size4
    slice: int
    item: Item
    apart: bool = False
    stages: int = 2
    splits: int = 0

    @property
    def pixels(self) -> int:
        return prod(self.tile)


class Parts:
    """The shares of a work in which a block has all taps, or those of one position along D and H."""

    def __init__(
        self, work: ConvWork, item: Item, apart: bool = False, engine: bool = False
    ) -> None:
        self.work, self.apart, self.engine = work, apart, engine
        self.merge: Merge = merge_of(work)
        self.planes = work.kernel[0] * work.kernel[1] if apart else 1
        self.kernel = (1, 1, work.kernel[2]) if apart else work.kernel
        columns = ceil_div(self.merge.out_channels, 8)
        forward = replace(work, direction="fwd")
        self.axes: list[LatticeAxis] = [lattice_axis(forward, dim) for dim in range(3)]
        self.phases = prod(len(axis.phases) for axis in self.axes)
        self.counts = [axis.count for axis in self.axes]
        self.lattices = [axis.lattice for axis in self.axes]
        self.y_steps = [axis.axis.y_step for axis in self.axes]
        self.item = item
        self.column_blocks = ceil_div(columns, self.item.columns)
        rows = ceil_div(work.taps // self.planes * self.merge.in_channels, 16)
        self.row_blocks = ceil_div(rows, self.item.rows)
        self.depth = 2 * CHUNK_BYTES // work.dtype.itemsize

    @property
    def items(self) -> int:
        """Number of items per merge."""
        return self.row_blocks * self.column_blocks

    def extents(self, tile: Size4) -> Size4:
        """Return the extents of a tile's box of the input."""
        taps = (1, 1, None) if self.apart else (None, None, None)
        d, h, w = (
            axis.extent(size, most)
            for axis, size, most in zip(self.axes, tile[1:], taps, strict=True)
        )
        return tile[0], d, h, w

    def boxes(self, tile: Size4) -> int:
        """Return the number of boxes of a tile."""
        return self.phases * prod(tiles_of(self.work, self.axes, tile))

    def _is_copied(self, tile: Size4) -> bool:
        """Whether the copy engine takes the tile's boxes."""
        boxes = (self.extents(tile), self.lattices), (tile, self.y_steps)
        return all(why_not_copied(*box, 0) is None for box in boxes)

    def best_tiles(self) -> list[Size4]:
        """Return the tiles that copy and multiply the least, of different sizes."""
        steps = (1, 2, 8) if self.item.windows else (1, 1, 1)
        found: list[list[tuple[float, Size4]]] = [[] for _ in PLACES]
        for tile in candidate_tiles(self.work.batch, self.counts, steps):
            pixels = prod(tile)
            if pixels > MOST_PIXELS or (self.engine and not self._is_copied(tile)):
                continue
            place = next(i for i, most in enumerate(PLACES) if pixels <= most)
            copied = prod(self.extents(tile)) * self.merge.in_chunks + pixels * self.merge.out_chunks
            multiplied = ceil_div(pixels, self.depth) * self.depth * self.items
            found[place].append((self.boxes(tile) * (2 * copied + multiplied), tile))
        return [tile for each in found for _, tile in sorted(each)[:BEST]]


class Block:
    """The layout of a block's shared memory, and its items."""

    def __init__(self, parts: Parts, tile: Size4, slice_: int) -> None:
        work, merge, item = parts.work, parts.merge, parts.item
        pixels = prod(tile)
        self.x_extent = parts.extents(tile)
        self.x_pitch = _pitch(merge.in_chunks * slice_, work.dtype)
        self.y_pitch = _pitch(merge.out_chunks * slice_, work.dtype)
        self.steps = ceil_div(pixels, parts.depth)
        x_pixels = prod(self.x_extent)
        self.box_bytes = x_pixels * self.x_pitch + pixels * self.y_pitch
        self.y_at = aligned(x_pixels * self.x_pitch, ALIGNMENT)
        # A column of 8 may extend past the last channel of the last pixel.
        y_bytes = self.steps * parts.depth * self.y_pitch + CHUNK_BYTES * 8
        self.stage_bytes = self.y_at + aligned(y_bytes, ALIGNMENT)
        self.copied_bytes = (x_pixels * merge.in_chunks + pixels * merge.out_chunks) * slice_ * CHUNK_BYTES
        items = slice_ * parts.items
        self.item_groups = ceil_div(items, item.warps)
        self.items = ceil_div(items, self.item_groups)
        self.grid = ceil_div(merge.count, slice_), self.item_groups * parts.planes
        self.k_splits = item.warps // self.items
        self.slab_bytes = item.warps * item.slab_bytes

        self.row_bytes = parts.row_blocks * item.rows * 16 * ROW_BYTES

    def rows_at(self, stages: int) -> int:
        return max(stages * self.stage_bytes, aligned(self.slab_bytes, ALIGNMENT))

    def sources_at(self, stages: int) -> int:
        return self.rows_at(stages) + self.row_bytes

    def total_bytes(self, stages: int) -> int:
        return self.sources_at(stages) + self.steps * PIXELS_A_STEP * 4 + ALIGNMENT


PIXELS_A_STEP = 16


def _pitch(chunks: int, dtype: DType) -> int:
    """Return the pitch of pixels in bytes, which avoids bank conflicts between the chunks of eight
    pixels or, for 32-bit types, between eight words of four pixels."""
    if dtype.itemsize == 2:
        return odd_chunks(chunks)
    return (chunks + (2 - chunks) % 4) * CHUNK_BYTES


def shares_of(
    work: ConvWork, device: CudaDevice, engine: bool = False
) -> Iterator[tuple[float, Share]]:
    """Yield candidates with their expected times."""
    together = all(
        operand.strides[1] == channels
        for operand, channels in ((work.x, work.in_channels), (work.y, work.out_channels))
    )
    for apart in (False, True) if prod(work.kernel[:2]) > 1 else (False,):
        for item in items_of(work, apart):
            parts = Parts(work, item, apart, engine)
            tiles = parts.best_tiles()
            for slice_ in slices_of(parts.merge, together):
                for tile in tiles:
                    block = Block(parts, tile, slice_)
                    if engine and max(block.x_pitch, block.y_pitch) > MOST_BOX * work.dtype.itemsize:
                        continue
                    boxes = parts.boxes(tile)
                    columns, sums = prod(block.grid), block.items * item.sums
                    for stages, resident in _stages(parts, block, device):
                        at_once = device.multiprocessors * resident
                        for splits in splits_of(work, columns, sums, boxes, at_once):
                            expected = expected_s(parts, block, boxes, resident, splits, device)
                            yield expected, Share(tile, slice_, item, apart, stages, splits)


def items_of(work: ConvWork, apart: bool) -> list[Item]:
    """Return the warp tiles to compare: one of each height, of the best width."""
    merge = merge_of(work)
    columns, half = ceil_div(merge.out_channels, 8), work.dtype.itemsize == 2
    axes = [lattice_axis(replace(work, direction="fwd"), dim) for dim in (1, 2)]
    near = work.kernel == (1, 3, 3) and all(axis.x_step == axis.x_tap == 1 for axis in axes)
    if near and half and not apart and columns == merge.in_chunks == 1:
        return [SMALL]
    found: dict[int, Item] = {}
    for item in HALF_ITEMS if half else ITEMS:
        best = found.setdefault(item.rows, item)
        # Each pass reads the other operand again, which costs as much as 1.5 unused columns.
        cost, least = (
            ceil_div(columns, one.columns) * (one.columns + 1.5) for one in (item, best)
        )
        if cost < least:
            found[item.rows] = item
    return list(found.values())


def _stages(parts: Parts, block: Block, device: CudaDevice) -> Iterator[tuple[int, int]]:
    """Yield the most stages with which as many blocks are resident as the kernel allows, and with
    which one is."""
    found: dict[int, int] = {}
    for stages in ENGINE_STAGES if parts.engine else STAGES:
        total = block.total_bytes(stages)
        if total > device.shared_bytes_per_block - STATIC_BYTES:
            continue
        resident = max(1, min(parts.item.blocks, device.fitting_blocks(total)))
        if resident not in found:
            found[resident] = stages
    for resident, stages in found.items():
        yield stages, resident


def time_of(parts: Parts, block: Block, share: Share, device: CudaDevice) -> float:
    """Return the predicted time of a share."""
    resident = max(1, min(parts.item.blocks, device.fitting_blocks(block.total_bytes(share.stages))))
    return expected_s(parts, block, parts.boxes(share.tile), resident, share.splits, device)


CLOCK = 1.755e9


def expected_s(
    parts: Parts, block: Block, boxes: int, resident: int, splits: int, device: CudaDevice
) -> float:
    """Return the predicted time."""
    f = features(parts, block, boxes, resident, splits, device)
    loop = (f["copy"] ** 3 + f["compute"] ** 3 + f["dram"] ** 3) ** (1 / 3)
    return 3.1e-6 + f["fixed"] + loop + f["slabs"] + f["meet"]


def features(
    parts: Parts, block: Block, boxes: int, resident: int, splits: int, device: CudaDevice
) -> dict[str, float]:
    item, half = parts.item, parts.work.dtype.itemsize == 2
    each = ceil_div(block.grid[0] * block.grid[1] * splits, device.multiprocessors)
    waves = ceil_div(each, resident)
    turns = ceil_div(boxes, splits)
    busy = block.items * block.k_splits
    steps = ceil_div(block.steps, block.k_splits)
    mma = steps * busy * item.rows * item.columns * (2.0 if half else 4.0)
    loads = steps * busy * (3 if item.windows else item.rows + item.columns / 2) * 4
    latency = steps * (item.rows * item.columns * 8 + 60)
    sums = block.items * item.sums * 4
    meet = 0.0
    if splits > 1:
        meet = 1.2e-6 + each * sums / parts.merge.groups * 2 / (25 * CLOCK)
    return {
        "fixed": waves * (1.2e-6 + turns * 250 / CLOCK),
        "copy": each * turns * block.copied_bytes / (40 * CLOCK),
        "compute": max(each * turns * max(mma, loads), waves * turns * latency) / CLOCK,
        "dram": unique_bytes(parts.work) / 3.6e12,
        "slabs": each * (sums * block.k_splits / 64 + sums / 16) / CLOCK,
        "meet": meet,
    }
