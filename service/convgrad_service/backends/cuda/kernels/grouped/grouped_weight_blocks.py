"""How grouped_weight.cu divides a work over blocks, and the layout of their shared memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd, prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.core.elements import element_of
from convgrad_service.backends.cuda.kernels.grouped.grouped_box import (
    MOST_STEP,
    LatticeAxis,
    Size4,
    candidate_tiles,
    lattice_axis,
    why_not_copied,
)
from convgrad_service.backends.cuda.kernels.grouped.grouped_merge import (
    Merge,
    merge_of,
    odd_chunks,
    piece_of,
)
from convgrad_service.backends.cuda.kernels.layout.channels_last import CHUNK_BYTES
from convgrad_service.plans.base import round_up
from convgrad_service.plans.cuda.program import ceil_div
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["HALF_ITEMS", "ITEMS", "Block", "Item", "Parts", "Share"]

MOST_PIXELS = 512
ALIGNMENT, ENGINE_ALIGNMENT, ROW_BYTES = 128, 1024, 16
SWIZZLED = (2, 4, 8)
"""Chunks of a pixel that the copy engine swizzles; others are rounded up to the next."""
PIXELS_A_STEP = 16
COPIED_BYTES = {16: 16, 8: 42, 4: 39, 2: 93}
"""Bytes that an SM could copy in the time of a piece, by its size."""
PLACES = (64, 128, 256, MOST_PIXELS)
"""Limits of size classes, in pixels: the best tile of each class is a candidate."""


@dataclass(frozen=True, slots=True)
class Item:
    """A warp tile: fragments of 16 rows (taps x channels) by columns of 8."""

    rows: int
    columns: int
    warps: int
    blocks: int

    def defines(self, dtype: DType, exact: bool, engine: bool) -> dict[str, object]:
        return {
            "COPY_ENGINE": engine,
            "EXACT": exact,
            "ELEMENT": element_of(dtype),
            "FRAGMENTS": self.rows,
            "NF": self.columns,
            "WARPS": self.warps,
            "BLOCKS": self.blocks,
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
    level : int
        Dimensions (D, then H) of whose taps a block has one position.
    stages : int
        Boxes in shared memory.
    splits : int
        Of all boxes.
    """

    tile: Size4
    slice: int
    item: Item
    level: int
    stages: int
    splits: int
    in_cluster: bool = False


class Parts:
    """What all shares of a work with the same warp tiles, and the same taps in a block, share."""

    def __init__(self, work: ConvWork, item: Item, level: int = 0, engine: bool = False) -> None:
        self.work, self.level, self.engine = work, level, engine
        self.alignment = ENGINE_ALIGNMENT if engine else ALIGNMENT
        self.merge: Merge = merge_of(work)
        chunks = max(self.merge.in_chunks, self.merge.out_chunks)
        self.swizzles = engine and work.dtype.itemsize == 2 and chunks <= SWIZZLED[-1]
        self.planes = prod(work.kernel[:level])
        self.kernel = (*(1,) * level, *work.kernel[level:])
        columns = ceil_div(self.merge.out_channels, 8)
        forward = replace(work, direction="fwd")
        self.axes: list[LatticeAxis] = [lattice_axis(forward, dim) for dim in range(3)]
        self.phases = prod(len(axis.phases) for axis in self.axes)
        self.counts = [axis.count for axis in self.axes]
        self.lattices = [axis.lattice for axis in self.axes]
        # A box of x has every position that a tap reads, or along W a sub-box every one of those
        # that have the same remainder.
        every = [self._every(dim) for dim in range(3)]
        self.sub_step = every[2]
        columns_of = [divmod(s * self.axes[2].x_tap, every[2]) for s in range(self.kernel[2])]
        self.most_shift = max(shift for shift, _ in columns_of)
        self.sub_boxes = max(residue for _, residue in columns_of) + 1
        self.x_step = [axis.x_step // step for axis, step in zip(self.axes, every, strict=True)]
        self.x_steps = [n * step for n, step in zip(self.lattices, every, strict=True)]
        self.y_steps = [axis.axis.y_step for axis in self.axes]
        self.item = item
        self.column_blocks = ceil_div(columns, self.item.columns)
        rows = ceil_div(work.taps // self.planes * self.merge.in_channels, 16)
        self.row_blocks = ceil_div(rows, self.item.rows)
        self.depth = 2 * CHUNK_BYTES // work.dtype.itemsize
        # Of each side: the bytes of a merge in memory and in a box, and of a piece that is copied.
        sides = {
            "x": (work.x, work.in_channels, self.merge.in_chunks),
            "y": (work.y, work.out_channels, self.merge.out_chunks),
        }
        self.copies = {
            name: (
                (self.merge.groups * channels * work.dtype.itemsize, chunks * CHUNK_BYTES),
                piece_of(operand, channels, self.merge.groups),
            )
            for name, (operand, channels, chunks) in sides.items()
        }

    @property
    def items(self) -> int:
        """Number of items per merge."""
        return self.row_blocks * self.column_blocks

    def _every(self, dim: int) -> int:
        """Return the distance of the positions of a box of x, in lattice points."""
        axis = self.axes[dim]
        copied = self.engine and axis.lattice * axis.x_step <= MOST_STEP
        return (
            axis.x_step if copied and (self.swizzles if dim == 2 else self.kernel[dim] == 1) else 1
        )

    def extents(self, tile: Size4) -> Size4:
        """Return the extents of a tile's box, or sub-box, of the input."""
        more = [(self.kernel[dim] - 1) * self.axes[dim].x_tap for dim in (0, 1)]
        d, h, w = (
            (size - 1) * step + most + 1
            for size, step, most in zip(
                tile[1:], self.x_step, (*more, self.most_shift), strict=True
            )
        )
        return tile[0], d, h, w

    def tiles(self, tile: Size4) -> Size4:
        """Return the tiles of the largest phase (N, D, H, W)."""
        d, h, w = (ceil_div(count, size) for count, size in zip(self.counts, tile[1:], strict=True))
        return ceil_div(self.work.batch, tile[0]), d, h, w

    def boxes(self, tile: Size4) -> int:
        """Return the number of boxes of a tile."""
        return self.phases * prod(self.tiles(tile))

    def pitch(self, chunks: int) -> tuple[int, int]:
        """Return the pitch of pixels in bytes, and its bits of addresses that are swizzled.

        It avoids bank conflicts between the chunks of eight pixels or, for 32-bit types, between
        eight words of four pixels."""
        if self.swizzles and 1 < chunks <= SWIZZLED[-1]:
            chunks = next(n for n in SWIZZLED if n >= chunks)
            return chunks * CHUNK_BYTES, (chunks - 1) * CHUNK_BYTES
        if self.work.dtype.itemsize == 2:
            return odd_chunks(chunks), 0
        return (chunks + (2 - chunks) % 4) * CHUNK_BYTES, 0

    def _is_copied(self, tile: Size4) -> bool:
        """Whether the copy engine takes the tile's boxes."""
        boxes = (self.extents(tile), self.x_steps), (tile, self.y_steps)
        return all(why_not_copied(*box, 0) is None for box in boxes)

    def best_tiles(self) -> list[Size4]:
        """Return the tile that copies and multiplies the least, of each size."""
        found: list[list[tuple[float, Size4]]] = [[] for _ in PLACES]
        for tile in candidate_tiles(self.work.batch, self.counts, (1, 1, 1)):
            pixels = prod(tile)
            if pixels > MOST_PIXELS or (self.engine and not self._is_copied(tile)):
                continue
            place = next(i for i, most in enumerate(PLACES) if pixels <= most)
            copied = (
                self.sub_boxes * prod(self.extents(tile)) * self.merge.in_chunks
                + pixels * self.merge.out_chunks
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
        self.x_pitch, self.x_swizzle = parts.pitch(merge.in_chunks * slice_)
        self.y_pitch, self.y_swizzle = parts.pitch(merge.out_chunks * slice_)
        self.steps = ceil_div(pixels, parts.depth)
        x_pixels = prod(self.x_extent)
        self.sub_bytes = round_up(x_pixels * self.x_pitch, parts.alignment)
        self.y_at: int = parts.sub_boxes * self.sub_bytes
        x_pixels *= parts.sub_boxes
        self.pieces = max(slice_ * real // piece for (real, _), piece in parts.copies.values())
        self.box_bytes = x_pixels * self.x_pitch + pixels * self.y_pitch
        # Bytes of whole chunks that threads copy as fast as the box's pieces.
        self.copied_bytes: int = sum(
            count * slice_ * real // piece * COPIED_BYTES[piece]
            for count, ((real, _), piece) in zip(
                (x_pixels, pixels), parts.copies.values(), strict=True
            )
        )
        self.pixels = x_pixels + pixels
        # A column of 8 may extend past the last channel of the last pixel.
        y_bytes = self.steps * parts.depth * self.y_pitch + CHUNK_BYTES * 8
        self.stage_bytes = self.y_at + round_up(y_bytes, parts.alignment)
        self.alignment = parts.alignment
        row = work.groups * work.in_channels, merge.in_channels * slice_
        self.row_alignment = gcd(*row) * work.dtype.itemsize
        items = slice_ * parts.items
        self.item_groups = ceil_div(items, item.warps)
        self.items = ceil_div(items, self.item_groups)
        self.grid = ceil_div(merge.count, slice_), self.item_groups * parts.planes
        self.k_splits = item.warps // self.items
        self.slab_bytes = item.warps * item.slab_bytes
        self.item_sums, self.warps = item.sums, item.warps

        self.row_bytes = parts.row_blocks * item.rows * 16 * ROW_BYTES

    def rows_at(self, stages: int) -> int:
        return max(stages * self.stage_bytes, round_up(self.slab_bytes, ALIGNMENT))

    def sources_at(self, stages: int) -> int:
        return self.rows_at(stages) + self.row_bytes

    def received_at(self, stages: int) -> int:
        return round_up(self.sources_at(stages) + self.steps * PIXELS_A_STEP * 4, ALIGNMENT)

    def total_bytes(self, stages: int, cluster: int = 0) -> int:
        """``cluster`` is the number of its blocks, or 0."""
        received = 0
        if cluster:
            turns = ceil_div(self.item_sums // 4, self.k_splits * 32 * cluster)
            received = turns * cluster * self.warps * 32 * CHUNK_BYTES
        return self.received_at(stages) + received + self.alignment
