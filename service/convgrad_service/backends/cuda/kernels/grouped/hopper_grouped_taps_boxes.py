"""How hopper_grouped_taps.cu divides a work over blocks, its boxes, and the expected time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod

from convgrad_service.backends.cuda.kernels.core.gather_axes import Phase
from convgrad_service.backends.cuda.kernels.grouped.grouped_box import (
    LatticeAxis,
    Size4,
    candidate_tiles,
    lattice_axis,
    why_not_copied,
)
from convgrad_service.backends.cuda.kernels.grouped.weight_boxes import (
    aligned,
    splits_of,
    tiles_of,
    unique_bytes,
)
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import ceil_div
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["COLUMNS", "ITEMS", "PIXEL_BYTES", "PRODUCTS", "THREADS", "WARPS", "WIDTH", "Box"]
__all__ += ["Parts", "Share", "expected_s", "shares_of"]

WIDTH, PIXEL_BYTES = 32, 64
"""Channels of x in a block, and their bytes."""
COLUMNS = 8
"""Columns of y that are adjacent in a product."""
MOST_TAPS, MOST_SUB_BOXES = 10, 8
PRODUCTS = (
    *((pairs, 1, columns) for pairs in range(1, MOST_TAPS // 2 + 1) for columns in (WIDTH, 64)),
    *((pairs, 3, WIDTH) for pairs in (1, 2)),
)
"""Instances: pairs of taps, rows of y of a product, and channels of y. More sums would spill."""
WARPS, ITEMS, THREADS = 8, 4, 384
SWIZZLE_ATOM, ALIGNMENT, STATIC_BYTES = 512, 1024, 1024
STAGES = (8, 6, 5, 4, 3, 2)
MOST_CLUSTER = 8
PLACES = (32, 64, 128, 256, 512, 1024)
"""Limits of size classes, in pixels: the best tile of each class is a candidate."""
ROW_BYTES, STEP_BYTES = 16, 8


@dataclass(frozen=True, slots=True)
class Share:
    """What a block computes.

    Attributes
    ----------
    tile : tuple of int
        Pixels of a box: N, D, H, W.
    level : int
        Dimensions (D, then H) of whose taps a block has one position.
    by_rows : bool
        Whether a product has all rows of y that a row of x meets.
    stages : int
        Boxes in shared memory.
    splits : int
        Of all boxes.
    """

    tile: Size4
    level: int
    by_rows: bool
    stages: int
    splits: int
    in_cluster: bool = False


class Parts:
    """What all shares of a work share in which blocks have one position of ``level`` dimensions."""

    def __init__(self, work: ConvWork, level: int, by_rows: bool) -> None:
        self.work, self.level, self.by_rows = work, level, by_rows
        forward = replace(work, direction="fwd")
        self.axes: list[LatticeAxis] = [lattice_axis(forward, dim) for dim in range(3)]
        self.kernel = (*(1,) * level, *work.kernel[level:])
        self.rows, self.apart = 1, 0
        if by_rows:
            t, self.rows, s = self.kernel
            self.kernel, self.apart = (t, 1, s), work.dilation[1]
            # Rows of x, and the first row of y that the first one meets.
            first = work.pad[1] - (self.rows - 1) * self.apart
            met = replace(self.axes[1].axis, phases=(Phase(1, 0, 0, first, work.input[1]),))
            self.axes[1] = LatticeAxis(replace(met, x_step=1, y_step=1), 1)
        self.counts = [axis.count for axis in self.axes]
        self.phases = prod(len(axis.phases) for axis in self.axes)
        self.planes = prod(work.kernel[:level])
        self.taps = prod(self.kernel)
        self.pairs = ceil_div(self.taps, 2)
        self.fragments = self.pairs * self.rows
        channels = work.in_channels
        self.columns = 64 if channels % 64 == 0 else WIDTH
        self.merged = max(1, WIDTH // channels)
        self.slices = max(1, channels // self.columns), max(1, channels // WIDTH)
        self.grid = ceil_div(work.groups, self.merged) * prod(self.slices), self.planes
        self.y_bytes = self.columns * 2
        # Along W, boxes have every `step`-th column.
        step, tap = self.axes[2].x_step, self.axes[2].x_tap
        self.residues = [j * tap % step for j in range(self.kernel[2])]
        self.shifts = [j * tap // step for j in range(self.kernel[2])]
        self.sub_boxes = max(self.residues) + 1
        lattices = [axis.lattice for axis in self.axes]
        self.x_steps = (*lattices[:2], lattices[2] * step)
        self.y_steps = tuple(axis.axis.y_step for axis in self.axes)
        self.unique_bytes = unique_bytes(work)
        self.slab_bytes = WARPS * self.columns * (self.fragments * 16 + 4) * 4
        self.sums = ITEMS * self.columns * self.fragments * 16
        # Of a step.
        self.products_us = self.pairs * PRODUCT_US.get(self.rows * self.columns, 0.0)

    def boxes(self, tile: Size4) -> int:
        """Return the number of boxes of a tile."""
        return self.phases * prod(tiles_of(self.work, self.axes, tile))

    def best_tiles(self) -> list[Size4]:
        """Return the tile that copies and multiplies the least, of each size."""
        found: list[list[tuple[float, Size4]]] = [[] for _ in PLACES]
        every = {
            tile
            for steps in ((1, 2, COLUMNS), (1, 1, 2 * COLUMNS))
            for tile in candidate_tiles(self.work.batch, self.counts, steps)
        }
        for tile in every:
            pixels = prod(tile)
            if pixels > PLACES[-1]:
                continue
            box = Box(self, tile)
            if box.why_not() is not None:
                continue
            place = next(i for i, most in enumerate(PLACES) if pixels <= most)
            cost = box.pixels * PIXEL_US + box.steps * self.products_us
            found[place].append((self.boxes(tile) * cost, tile))
        return [min(each)[1] for each in found if each]


class Box:
    """The boxes of a tile in shared memory."""

    def __init__(self, parts: Parts, tile: Size4) -> None:
        self.parts, self.tile = parts, tile
        images, depth, height, width = tile
        eights = width // COLUMNS
        self.pairs_rows = eights % 2 == 1
        axes, kernel = parts.axes, parts.kernel
        d, h = (
            axis.extent(size, taps)
            for axis, size, taps in zip(axes[:2], tile[1:3], kernel[:2], strict=True)
        )
        # An odd number of columns, so that the next row starts in other banks.
        odd = int(self.pairs_rows or parts.by_rows)
        self.x_extent = images, d, h, width + max(parts.shifts) | odd
        self.y_extent = images, depth, height + (parts.rows - 1) * parts.apart, width + odd
        x_pixels, y_pixels = prod(self.x_extent), prod(self.y_extent)
        self.pixels = parts.sub_boxes * x_pixels + y_pixels * parts.y_bytes // PIXEL_BYTES
        self.sub_bytes = aligned(x_pixels * PIXEL_BYTES, SWIZZLE_ATOM)
        self.y_at = aligned(parts.sub_boxes * self.sub_bytes, ALIGNMENT)
        self.box_bytes = parts.sub_boxes * x_pixels * PIXEL_BYTES + y_pixels * parts.y_bytes
        self.stage_bytes = self.y_at + aligned(y_pixels * parts.y_bytes, ALIGNMENT)
        # Of a box, innermost first.
        if self.pairs_rows:
            self.step_counts = eights, height // 2, depth
        else:
            self.step_counts = eights // 2, height, depth
        self.steps = prod(self.step_counts) * images

    def why_not(self) -> str | None:
        """Return why neither copies nor products are possible; None if they are."""
        if self.pairs_rows and self.tile[2] % 2:
            return "a tile of an odd number of rows and of 8-column units"
        return why_not_copied(self.x_extent, self.parts.x_steps, WIDTH) or why_not_copied(
            self.y_extent, self.parts.y_steps, WIDTH
        )

    def steps_at(self, stages: int) -> int:
        return aligned(max(stages * self.stage_bytes, self.parts.slab_bytes), 16)

    def rows_at(self, stages: int) -> int:
        return aligned(self.steps_at(stages) + self.steps * STEP_BYTES, 16)

    def received_at(self, stages: int) -> int:
        return aligned(
            self.rows_at(stages) + ITEMS * self.parts.fragments * 16 * ROW_BYTES, SWIZZLE_ATOM
        )

    def total_bytes(self, stages: int, cluster: int = 0) -> int:
        """``cluster`` is the number of its blocks, or 0."""
        quads = self.parts.columns * self.parts.fragments * 4
        turns = ceil_div(quads, WARPS // ITEMS * 32)
        received = ceil_div(turns, cluster) * cluster * WARPS * 32 * 16 if cluster else 0
        return self.received_at(stages) + received + ALIGNMENT

    def stages(self, device: CudaDevice, cluster: int = 0) -> int:
        """Return the most stages, or 0."""
        room = device.shared_bytes_per_block - STATIC_BYTES
        return next((n for n in STAGES if self.total_bytes(n, cluster) <= room), 0)


@lru_cache(maxsize=32)
def shares_of(work: ConvWork, device: CudaDevice) -> tuple[tuple[float, Share], ...]:
    """Return candidates with their expected times."""
    return tuple(_shares_of(work, device))


def _shares_of(work: ConvWork, device: CudaDevice) -> Iterator[tuple[float, Share]]:
    for parts in _parts_of(work):
        columns = prod(parts.grid)
        for tile in parts.best_tiles():
            box, boxes = Box(parts, tile), parts.boxes(tile)
            for splits in splits_of(work, columns, parts.sums, boxes, device.multiprocessors):
                for in_cluster in (False, True) if 1 < splits <= MOST_CLUSTER else (False,):
                    stages = box.stages(device, splits if in_cluster else 0)
                    if stages > 0:
                        share = Share(tile, parts.level, parts.by_rows, stages, splits, in_cluster)
                        yield expected_s(box, share, device), share


def _parts_of(work: ConvWork) -> Iterator[Parts]:
    seen = set()
    for level, by_rows in product(range(3), (False, True)):
        key = prod(work.kernel[:level]), by_rows
        if key in seen or (by_rows and (level == 2 or work.stride[1] > 1)):
            continue
        seen.add(key)
        parts = Parts(work, level, by_rows)
        known = (parts.pairs, parts.rows, parts.columns) in PRODUCTS
        if known and parts.rows > by_rows and parts.sub_boxes <= MOST_SUB_BOXES:
            yield parts


# Cost model, in microseconds on an H200: of a launch, a block, a box; of copying a pixel of 64
# bytes; of a product by its columns; of a byte of device memory; of adding a byte of
# sums in shared memory, and of storing it; of adding over a cluster, and a byte of that; of meeting
# other blocks. Fitted to 1,610 measurements, of every other layer (tests/perf/random_grouped.py,
# seed 14, and the networks suite). For the other layers, the times of the fastest shares are off by
# 6 %, and the chosen shares take 1.05 of the time of the fastest ones measured. The product with 96
# columns is fitted to 178 measurements, which are off by 8 %.
LAUNCH_US, BLOCK_US, BOX_US, PIXEL_US = 4.5, 1.86, 0.167, 8.9e-4
PRODUCT_US = {32: 0.0229, 64: 0.0305, 96: 0.048}
MEMORY_US, SLAB_US, SUM_US = 2.43e-7, 1.3e-5, 2.3e-5
CLUSTER_US, RECEIVED_US, MEET_US = 0.55, 1.75e-5, 4.0
CLUSTER_SMS = 16
"""SMs, of 17, among which a cluster lies; 30 clusters of four and 15 of eight run at once."""


def expected_s(box: Box, share: Share, device: CudaDevice) -> float:
    """Return the expected time, in seconds."""
    parts, splits = box.parts, share.splits
    at_once = device.multiprocessors
    if share.in_cluster:
        clusters = at_once * (CLUSTER_SMS // splits) // (CLUSTER_SMS + 1)
        at_once = max(1, clusters) * splits
    each = ceil_div(prod(parts.grid) * splits, at_once)
    turns = ceil_div(parts.boxes(box.tile), splits)
    copied = each * turns * box.pixels * PIXEL_US
    multiplied = each * turns * box.steps * parts.products_us
    memory = parts.unique_bytes * MEMORY_US
    loop: float = (copied**3 + multiplied**3 + memory**3) ** (1 / 3)
    sums = parts.sums * 4 / parts.merged
    added = each * (parts.slab_bytes * SLAB_US + sums * SUM_US)
    if splits > 1:
        added += CLUSTER_US + sums * RECEIVED_US if share.in_cluster else MEET_US
    return (LAUNCH_US + each * (BLOCK_US + turns * BOX_US) + loop + added) * 1e-6
