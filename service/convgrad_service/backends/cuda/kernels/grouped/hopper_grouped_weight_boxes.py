"""Boxes of pixels of hopper_grouped_weight.cu, how work is divided over blocks, and expected times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from convgrad_service.backends.cuda.kernels.core.gather_axes import Phase, gather_axis
from convgrad_service.backends.cuda.kernels.grouped.grouped_box import (
    LatticeAxis,
    Size4,
    candidate_tiles,
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

__all__ = ["COLUMNS", "ITEMS", "MOST_TAPS", "PIXEL_BYTES", "PRODUCTS", "THREADS", "WARPS", "WIDTH", "Box", "Parts", "Share", "expected_s", "shares_of"]

WIDTH, PIXEL_BYTES = 32, 64
"""Channels of x in a block, and their bytes."""
COLUMNS = 8
"""Columns of y that are adjacent in a product."""
WIDE = 64
MOST_TAPS, MOST_SUB_BOXES = 10, 4
PRODUCTS = (
    *((pairs, 1, columns) for pairs in range(1, MOST_TAPS // 2 + 1) for columns in (WIDTH, WIDE)),
    (2, 3, WIDTH),
    (1, 3, WIDTH),
    (1, 3, WIDE),
)
"""Pairs of taps, rows of y that a row of x meets, and channels of y."""
WARPS, ITEMS, THREADS = 8, 4, 384
SWIZZLE_ATOM, ALIGNMENT, STATIC_BYTES = 512, 1024, 1024
STAGES = (8, 6, 5, 4, 3, 2)
MOST_CLUSTER = 8
PLACES, BEST = (32, 64, 128, 256, 512, 1024), 2
"""Of tiles with at most so many pixels, and more than the next smaller, the best are compared."""
ROW_BYTES, STEP_BYTES = 16, 8
# Clocks of an H200: of a product with few columns, of a column of a product, of copying a pixel.
LEAST_CLOCKS, COLUMN_CLOCKS, PIXEL_CLOCKS = 48, 0.56, 2.5


@dataclass(frozen=True, slots=True)
class Share:
    """What a block computes.

    Attributes
    ----------
    tile : tuple of int
        Pixels of a box: N, D, H, W.
    level : int
        Dimensions (D, then H) of whose taps a block has one position.
    rows : bool
        Whether a product has a row of x and all rows of y that it meets.
    columns : int
        Channels of y.
    stages : int
        Boxes in shared memory.
    splits : int
        Of all boxes.
    in_cluster : bool
        Whether the splits are a cluster.
    """

    tile: Size4
    level: int
    rows: bool
    columns: int
    stages: int
    splits: int
    in_cluster: bool = False


class Parts:
    """What all shares of a work with the same level, rows and columns have in common."""

    def __init__(self, work: ConvWork, level: int, rows: bool, columns: int) -> None:
        self.work, self.level, self.columns = work, level, columns
        forward = replace(work, direction="fwd")
        self.axes = [LatticeAxis(gather_axis(forward, dim), 1) for dim in range(3)]
        kernel = (*(1,) * level, *work.kernel[level:])
        self.rows = kernel[1] if rows else 1
        self.kernel = (kernel[0], 1 if rows else kernel[1], kernel[2])
        if rows:
            # Rows of x, and the first row of y that they meet.
            first = work.pad[1] - (kernel[1] - 1) * work.dilation[1]
            met = Phase(1, 0, 0, first, work.input[1])
            self.axes[1] = LatticeAxis(replace(self.axes[1].axis, phases=(met,)), 1)
        self.planes = prod(work.kernel[:level])
        self.taps = prod(self.kernel)
        self.pairs = ceil_div(self.taps, 2)
        self.fragments = self.pairs * self.rows
        channels = work.in_channels
        self.merged = max(1, WIDTH // channels)
        self.slices = max(1, channels // columns), max(1, channels // WIDTH)
        self.grid = ceil_div(work.groups, self.merged) * prod(self.slices), self.planes
        self.y_bytes = columns * 2
        # Along W, boxes have every `stride`-th column: a dimension of its own if columns divide.
        stride, dilation, pad = work.stride[2], work.dilation[2], work.pad[2]
        self.residues = [s * dilation % stride for s in range(self.kernel[2])]
        self.shifts = [s * dilation // stride for s in range(self.kernel[2])]
        self.folded = (
            stride > 1
            and work.input[2] % stride == 0
            and work.x.strides[5] == work.groups * channels
        )
        self.x_steps = (1, 1, 1 if self.folded else stride)
        first = [residue - pad for residue in range(max(self.residues) + 1)]
        if self.folded:
            across = work.groups * channels
            self.sub_boxes = [(one % stride * across, one // stride) for one in first]
            self.axes[2] = LatticeAxis(
                replace(
                    self.axes[2].axis,
                    x_step=1,
                    phases=(replace(self.axes[2].phases[0], x0=0),),
                ),
                1,
            )
        else:
            self.sub_boxes = [(0, residue) for residue in range(len(first))]
        self.slab_bytes = WARPS * columns * (self.fragments * 16 + 4) * 4
        self.sums = ITEMS * columns * self.fragments * 16

    def boxes(self, tile: Size4) -> int:
        """Return the number of boxes of a tile."""
        return prod(tiles_of(self.work, self.axes, tile))

    @property
    def step_clocks(self) -> float:
        """Clocks of an SM for the products of a step."""
        return self.pairs * max(LEAST_CLOCKS, self.rows * self.columns * COLUMN_CLOCKS)

    def best_tiles(self) -> list[Size4]:
        """Return the tiles that copy and multiply the least, of different sizes."""
        counts = [axis.count for axis in self.axes]
        found: list[list[tuple[float, Size4]]] = [[] for _ in PLACES]
        every = {
            tile
            for steps in ((1, 2, COLUMNS), (1, 1, 2 * COLUMNS))
            for tile in candidate_tiles(self.work.batch, counts, steps)
        }
        for tile in every:
            pixels = prod(tile)
            if pixels > PLACES[-1]:
                continue
            box = Box(self, tile)
            if box.why_not() is not None:
                continue
            place = next(i for i, most in enumerate(PLACES) if pixels <= most)
            cost = PIXEL_CLOCKS * box.pixels + box.steps * self.step_clocks
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
        met = (parts.rows - 1) * parts.work.dilation[1]
        self.y_extent = images, depth, height + met, width + odd
        x_pixels, y_pixels = prod(self.x_extent), prod(self.y_extent)
        count = len(parts.sub_boxes)
        self.pixels = count * x_pixels + y_pixels * parts.y_bytes // PIXEL_BYTES
        self.sub_bytes = aligned(x_pixels * PIXEL_BYTES, SWIZZLE_ATOM)
        self.y_at = aligned(count * self.sub_bytes, ALIGNMENT)
        self.box_bytes = count * x_pixels * PIXEL_BYTES + y_pixels * parts.y_bytes
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
            self.y_extent, (1, 1, 1), WIDTH
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


def shares_of(work: ConvWork, device: CudaDevice) -> Iterator[tuple[float, Share]]:
    """Yield candidates with their expected times."""
    for parts in _parts_of(work):
        columns = prod(parts.grid)
        for tile in parts.best_tiles():
            box = Box(parts, tile)
            boxes = parts.boxes(tile)
            for splits in splits_of(work, columns, parts.sums, boxes, device.multiprocessors):
                for in_cluster in (False, True) if 1 < splits <= MOST_CLUSTER else (False,):
                    stages = box.stages(device, splits if in_cluster else 0)
                    if stages > 0:
                        share = Share(
                            tile,
                            parts.level,
                            parts.rows > 1,
                            parts.columns,
                            stages,
                            splits,
                            in_cluster,
                        )
                        yield expected_s(box, share, device), share


def _parts_of(work: ConvWork) -> Iterator[Parts]:
    if max(s * work.dilation[2] % work.stride[2] for s in range(work.kernel[2])) >= MOST_SUB_BOXES:
        return
    widths = (WIDTH, WIDE) if work.in_channels % WIDE == 0 else (WIDTH,)
    seen = set()
    for level in range(3):
        planes = prod(work.kernel[:level])
        if planes in seen:
            continue
        seen.add(planes)
        for rows in (False, True):
            if rows and (level == 2 or work.kernel[1] == 1 or work.stride[1] > 1):
                continue
            for columns in widths:
                taps = prod(work.kernel[level:]) // (work.kernel[1] if rows else 1)
                height = work.kernel[1] if rows else 1
                if taps > MOST_TAPS or (ceil_div(taps, 2), height, columns) not in PRODUCTS:
                    continue
                yield Parts(work, level, rows, columns)


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
        "copy": each * turns * box.pixels * PIXEL_CLOCKS * (1 if parts.x_steps[2] == 1 else 2) / clock,
        "compute": each * turns * box.steps * parts.step_clocks / clock,
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


