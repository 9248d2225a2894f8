"""How grouped_weight.cu divides a work over blocks, and the expected time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.grouped.grouped_box import (
    MOST_BOX,
    LatticeAxis,
    Size4,
    candidate_tiles,
    lattice_axis,
    why_not_copied,
)
from convgrad_service.backends.cuda.kernels.grouped.grouped_merge import (
    Merge,
    is_exact,
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

__all__ = ["HALF_ITEMS", "ITEMS", "SMALL", "Item", "Parts", "Share", "shares_of", "time_of"]

MOST_PIXELS = 512
STAGES, ENGINE_STAGES = (4, 3, 2), (8, 6, 4, 3, 2)
ALIGNMENT, ROW_BYTES, STATIC_BYTES = 128, 16, 1024
PLACES = (64, 128, 256, MOST_PIXELS)
"""Limits of size classes, in pixels: the best tile of each class is a candidate."""


@dataclass(frozen=True, slots=True)
class Item:
    """A warp tile: fragments of 16 rows (taps x channels) by columns of 8."""

    rows: int
    columns: int
    warps: int
    blocks: int
    windows: bool = False
    """Whether pixels form runs of 8 columns whose input rows are loaded once."""

    def defines(self, dtype: DType, exact: bool, engine: bool) -> dict[str, object]:
        return {
            "COPY_ENGINE": engine,
            "EXACT": exact,
            "ELEMENT": dtype,
            "FRAGMENTS": self.rows,
            "NF": self.columns,
            "WARPS": self.warps,
            "BLOCKS": self.blocks,
            "WINDOWS": self.windows,
        }

    @property
    def slab_bytes(self) -> int:
        """Shared memory for a warp's sums."""
        return self.columns * 8 * (self.rows * 16 + 4) * 4

    @property
    def sums(self) -> int:
        return self.rows * 16 * self.columns * 8


TALL, SHORT = 5, 3
"""Fragments of rows. With 3x3 taps, five hold all rows of 8 channels, or half of 16."""
ITEMS = (Item(TALL, 1, 8, 2), Item(TALL, 2, 8, 2), Item(TALL, 3, 8, 2), Item(TALL, 4, 8, 1))
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
    item : Item
        Warp tiles.
    apart : bool
        Whether a block has the taps of one position along D and H, instead of all taps.
    stages : int
        Boxes in shared memory.
    splits : int
        Of all boxes.
    """

    tile: Size4
    slice: int
    item: Item
    apart: bool
    stages: int
    splits: int


class Parts:
    """What all shares of a work with the same warp tiles, and the same taps in a block, share."""

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
        self.unique_bytes = unique_bytes(work)

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
        """Return the tile that copies and multiplies the least, of each size."""
        steps = (1, 2, 8) if self.item.windows else (1, 1, 1)
        found: list[list[tuple[float, Size4]]] = [[] for _ in PLACES]
        for tile in candidate_tiles(self.work.batch, self.counts, steps):
            pixels = prod(tile)
            if pixels > MOST_PIXELS or (self.engine and not self._is_copied(tile)):
                continue
            place = next(i for i, most in enumerate(PLACES) if pixels <= most)
            copied = (
                prod(self.extents(tile)) * self.merge.in_chunks + pixels * self.merge.out_chunks
            )
            multiplied = ceil_div(pixels, self.depth) * self.depth * self.items
            found[place].append((self.boxes(tile) * (2 * copied + multiplied), tile))
        return [min(each)[1] for each in found if each]


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
        self.pixels = x_pixels + pixels
        self.y_at = aligned(x_pixels * self.x_pitch, ALIGNMENT)
        # A column of 8 may extend past the last channel of the last pixel.
        y_bytes = self.steps * parts.depth * self.y_pitch + CHUNK_BYTES * 8
        self.stage_bytes = self.y_at + aligned(y_bytes, ALIGNMENT)
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


@lru_cache(maxsize=32)
def shares_of(work: ConvWork, device: CudaDevice, engine: bool) -> tuple[tuple[float, Share], ...]:
    """Return candidates with their expected times."""
    return tuple(_shares_of(work, device, engine))


def _shares_of(work: ConvWork, device: CudaDevice, engine: bool) -> Iterator[tuple[float, Share]]:
    together = all(
        operand.strides[1] == channels
        for operand, channels in ((work.x, work.in_channels), (work.y, work.out_channels))
    )
    for apart in (False, True) if prod(work.kernel[:2]) > 1 else (False,):
        tiles: list[Size4] = []
        for item in items_of(work, apart):
            parts = Parts(work, item, apart, engine)
            tiles = tiles or parts.best_tiles()
            for slice_, tile in product(slices_of(parts.merge, together), tiles):
                block = Block(parts, tile, slice_)
                if engine and max(block.x_pitch, block.y_pitch) > MOST_BOX * work.dtype.itemsize:
                    continue
                columns, sums = prod(block.grid), block.items * item.sums
                boxes = parts.boxes(tile)
                for stages, resident in _stages(parts, block, device):
                    at_once = device.multiprocessors * resident
                    for splits in splits_of(work, columns, sums, boxes, at_once):
                        expected = _expected_s(parts, block, boxes, resident, splits, device)
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
        cost, least = (ceil_div(columns, one.columns) * (one.columns + 1.5) for one in (item, best))
        if cost < least:
            found[item.rows] = item
    return list(found.values())


def _stages(parts: Parts, block: Block, device: CudaDevice) -> Iterator[tuple[int, int]]:
    """Yield the most stages for each number of blocks that are resident on an SM."""
    seen: set[int] = set()
    for stages in ENGINE_STAGES if parts.engine else STAGES:
        if block.total_bytes(stages) <= device.shared_bytes_per_block - STATIC_BYTES:
            resident = _resident(parts, block, stages, device)
            if resident not in seen:
                seen.add(resident)
                yield stages, resident


def _resident(parts: Parts, block: Block, stages: int, device: CudaDevice) -> int:
    return max(1, min(parts.item.blocks, device.fitting_blocks(block.total_bytes(stages))))


def time_of(parts: Parts, block: Block, share: Share, device: CudaDevice) -> float:
    """Return the expected time of a share, in seconds."""
    resident = _resident(parts, block, share.stages, device)
    return _expected_s(parts, block, parts.boxes(share.tile), resident, share.splits, device)


# Cost model, in microseconds on an H200: of a launch; of a block, or of several that run on one SM
# at once; of a box; of copying a pixel, and a byte; of a warp's step, and of a product in it; of a
# byte of device memory; of adding a byte of sums in shared memory, and of storing it; of meeting
# other blocks, and of a byte of partial sums. With EXACT, a product is many FMAs. Fitted to 1,723
# measurements in bfloat16, of every other layer (tests/perf/random_grouped.py, seed 14, and the
# networks suite). For the other layers, the times of the fastest shares are off by 9 %, and the
# chosen shares take 1.02 of the time of the fastest ones measured.
LAUNCH_US, BLOCKS_US, BOX_US, PIXEL_US, COPIED_US = 3.7, 1.55, 0.071, 1.24e-3, 1.76e-5
STEP_US, PRODUCT_US, EXACT_STEP_US, EXACT_US, EXACT_SM_US = 0.072, 4.4e-3, 0.3, 0.039, 5.3e-3
MEMORY_US, SLAB_US, SUM_US, MEET_US, PARTIAL_US = 3.35e-7, 1.3e-5, 5.1e-5, 3.5, 4.3e-5
PLANES = 1.4
"""With taps along D. Four such layers took 1.33 to 1.79 times what the model expects."""


def _expected_s(
    parts: Parts, block: Block, boxes: int, resident: int, splits: int, device: CudaDevice
) -> float:
    item = parts.item
    each = ceil_div(prod(block.grid) * splits, device.multiprocessors)
    waves, turns = ceil_div(each, resident), ceil_div(boxes, splits)
    copied = each * turns * (block.pixels * PIXEL_US + block.box_bytes * COPIED_US)
    steps = ceil_div(block.steps, block.k_splits)
    products = item.rows * item.columns
    if is_exact(parts.work):
        in_warp = waves * turns * steps * (EXACT_STEP_US + products * EXACT_US)
        in_sm = each * turns * steps * block.items * block.k_splits * products * EXACT_SM_US
    else:
        in_warp, in_sm = waves * turns * steps * (STEP_US + products * PRODUCT_US), 0.0
    memory = parts.unique_bytes * MEMORY_US
    loop: float = (copied**3 + in_warp**3 + in_sm**3 + memory**3) ** (1 / 3)
    sums = block.items * item.sums * 4
    added = each * sums * (block.k_splits * SLAB_US + SUM_US)
    if splits > 1:
        added += MEET_US + each * sums / parts.merge.groups * PARTIAL_US
    whole = LAUNCH_US + waves * (BLOCKS_US + turns * BOX_US) + loop + added
    return whole * (PLANES if parts.work.kernel[0] > 1 else 1.0) * 1e-6
