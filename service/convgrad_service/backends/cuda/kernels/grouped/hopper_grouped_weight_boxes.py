"""Boxes of pixels of hopper_grouped_weight.cu, how work is divided over blocks, and expected times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from convgrad_service.backends.cuda.kernels.core.elements import MAX_BLOCKS
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

__all__ = ["COLUMNS", "ITEMS", "MOST_TAPS", "PIXEL_BYTES", "THREADS", "WARPS", "WIDTH", "Box", "Parts", "Share", "expected_s", "shares_of"]

WIDTH, PIXEL_BYTES = 32, 64
"""Channels of x in a block, and their bytes."""
COLUMNS = 8
"""Columns of y that are adjacent in a product."""
MOST_TAPS, MOST_SUB_BOXES = 10, 8
WARPS, ITEMS, THREADS = 8, 4, 384
SWIZZLE_ATOM, ALIGNMENT, STATIC_BYTES = 512, 1024, 1024
STAGES = (8, 6, 5, 4, 3, 2)
MOST_CLUSTER = 8
PLACES, BEST = (32, 64, 128, 256, 512, 1024), 2
"""Of tiles with at most so many pixels, and more than the next smaller, the best are compared."""
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
    stages : int
        Boxes in shared memory.
    splits : int
        Of all boxes.
    """

    tile: Size4
    level: int
    stages: int
    splits: int
    in_cluster: bool = False


class Parts:
    """The shares of a work in which blocks have the taps of one position along ``level`` dimensions."""

    def __init__(self, work: ConvWork, level: int) -> None:
        self.work, self.level = work, level
        forward = replace(work, direction="fwd")
        self.axes: list[LatticeAxis] = [lattice_axis(forward, dim) for dim in range(3)]
        self.counts = [axis.count for axis in self.axes]
        self.phases = prod(len(axis.phases) for axis in self.axes)
        self.kernel = (*(1,) * level, *work.kernel[level:])
        self.planes = prod(work.kernel[:level])
        self.taps = prod(self.kernel)
        self.pairs = ceil_div(self.taps, 2)
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
        self.slab_bytes = WARPS * self.columns * (self.pairs * 16 + 4) * 4
        self.sums = ITEMS * self.columns * self.pairs * 16

    def boxes(self, tile: Size4) -> int:
        """Return the number of boxes of a tile."""
        return self.phases * prod(tiles_of(self.work, self.axes, tile))

    def best_tiles(self) -> list[Size4]:
        """Return the tiles that copy and multiply the least, of different sizes."""
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
            cost = 2.3 * box.pixels + box.steps * self.pairs * 24
            found[place].append((self.boxes(tile) * cost, tile))
        return [tile for each in found for _, tile in sorted(each)[:BEST]]


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
        odd = int(self.pairs_rows)
        self.x_extent = images, d, h, width + max(parts.shifts) | odd
        self.y_extent = images, depth, height, width + odd
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
            return "an odd number of eights of columns"
        return why_not_copied(self.x_extent, self.parts.x_steps, WIDTH) or why_not_copied(
            self.y_extent, self.parts.y_steps, WIDTH
        )

    def steps_at(self, stages: int) -> int:
        return aligned(max(stages * self.stage_bytes, self.parts.slab_bytes), 16)

    def rows_at(self, stages: int) -> int:
        return aligned(self.steps_at(stages) + self.steps * STEP_BYTES, 16)

    def received_at(self, stages: int) -> int:
        return aligned(
            self.rows_at(stages) + ITEMS * self.parts.pairs * 16 * ROW_BYTES, SWIZZLE_ATOM
        )

    def total_bytes(self, stages: int, cluster: int = 0) -> int:
        """``cluster`` is the number of its blocks, or 0."""
        quads = self.parts.columns * self.parts.pairs * 4
        turns = ceil_div(quads, WARPS // ITEMS * 32)
        received = ceil_div(turns, cluster) * cluster * WARPS * 32 * 16 if cluster else 0
        return self.received_at(stages) + received + ALIGNMENT

    def stages(self, device: CudaDevice, cluster: int = 0) -> int:
        """Return the most stages, or 0."""
        room = device.shared_bytes_per_block - STATIC_BYTES
        return next((n for n in STAGES if self.total_bytes(n, cluster) <= room), 0)


def shares_of(work: ConvWork, device: CudaDevice) -> Iterator[tuple[float, Share]]:
    """Yield candidates with their expected times."""
    seen = set()
    for level in range(3):
        if prod(work.kernel[level:]) > MOST_TAPS or prod(work.kernel[:level]) in seen:
            continue
        seen.add(prod(work.kernel[:level]))
        parts = Parts(work, level)
        if parts.sub_boxes > MOST_SUB_BOXES or prod(parts.grid) > MAX_BLOCKS:
            continue
        columns = prod(parts.grid)
        for tile in parts.best_tiles():
            box = Box(parts, tile)
            for splits in splits_of(work, columns, parts.sums, parts.boxes(tile), device.multiprocessors):
                # Clusters leave some multiprocessors without a block.
                for in_cluster in (False, True) if 1 < splits <= MOST_CLUSTER else (False,):
                    stages = box.stages(device, splits if in_cluster else 0)
                    if stages > 0:
                        share = Share(tile, level, stages, splits, in_cluster)
                        yield expected_s(box, share, device), share


def features(box: Box, share: Share, device: CudaDevice) -> dict[str, float]:
    parts, clock, splits = box.parts, 1.755e9, share.splits
    # Fewer clusters than blocks fit.
    fitting = device.multiprocessors - (12 if share.in_cluster and splits > 2 else 0)
    each = ceil_div(prod(parts.grid) * splits, fitting)
    turns = ceil_div(parts.boxes(box.tile), splits)
    sums = parts.sums * 4
    used = 1 / parts.merged
    return {
        "fixed": each * (1.6e-6 + turns * 150 / clock),
        "copy": each * turns * box.pixels * 2.6 / clock,
        "compute": each * turns * box.steps * parts.pairs * (36 if parts.columns == 64 else 26) / clock,
        "dram": unique_bytes(parts.work) / 3.8e12,
        "slabs": each * (parts.slab_bytes / 32 + sums * used / 8) / clock,
        "meet": 0.0
        if splits == 1
        else (0.4e-6 if share.in_cluster else 1.2e-6) + each * sums * used * 2 / (25 * clock),
    }


def expected_s(box: Box, share: Share, device: CudaDevice) -> float:
    """Return the predicted time."""
    f = features(box, share, device)
    loop = (f["copy"] ** 3 + f["compute"] ** 3 + f["dram"] ** 3) ** (1 / 3)
    return 3.1e-6 + f["fixed"] + loop + f["slabs"] + f["meet"]


