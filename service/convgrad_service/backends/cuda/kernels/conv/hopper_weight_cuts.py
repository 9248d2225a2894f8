"""The partition of hopper_weight.cu's tiles and K among blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.conv.hopper_weight_tiles import (
    ROWS,
    TF32_TILES,
    TILES,
    TILES_OF,
    WeightTile,
)
from convgrad_service.backends.cuda.kernels.layout.planes import PixelRows
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import ceil_div
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["Cut", "cuts"]

MOST_STAGES, LEAST_STAGES = 16, 3
# Alignment of the pipeline; static shared memory.
ALIGNMENT, BESIDE_BYTES = 1024, 1152
# Column blocks that share a box start one row apart, but compute-sanitizer assumes that each wgmma
# reads up to 256 columns x 16 pixels contiguously.
BELIEVED_BYTES = 3 * 16 * 128
# The most bytes of partial sums, unless the caller asks for more splits, and the most waves.
PARTIAL_BYTES = 256 * 2**20
MOST_WAVES = 3
# Concurrent clusters of an H200 by cluster size, and its number of SMs.
CLUSTERS, MEASURED_ON = {2: 66, 3: 39, 4: 30, 8: 15}, 132
# Partial sums that a thread reads at a time, and the most units of a tile's rendezvous word
# (hopper_weight_grid_reduce.cuh).
TOGETHER_BATCH, MOST_TOGETHER = 16, 255


class Cut(NamedTuple):
    """A partition: a tile, the taps along W that share a box of the input, and the split of K.

    Tiles of rows are those of one group of the convolution after another.

    The first ``whole`` tiles are not split; the ``steps`` (k-tiles) of the others are divided into
    ``shares``. Blocks of a ``cluster`` have adjacent tiles: with ``rows_first``, the same columns
    and boxes of the input, else the same rows and boxes of grad_output. Or ``summing`` of them
    split one share of a tile; no tile is whole then. Partial sums are reduced by the same
    kernel (``together``) or by a second one.
    """

    tile: WeightTile
    shared_taps: int
    halo: int
    row_tiles: int
    column_tiles: int
    steps: int
    whole: int
    shares: int
    cluster: int = 1
    rows_first: bool = True
    summing: int = 1
    together: bool = False

    def __str__(self) -> str:
        return self.name + (f"+{self.whole}" if self.whole else "")

    @property
    def sums(self) -> bool:
        """Whether blocks of a cluster reduce one tile."""
        return self.summing > 1

    @property
    def copying(self) -> int:
        """Blocks of a cluster that share loads by multicast."""
        return self.cluster // self.summing

    @property
    def boxes(self) -> int:
        """Boxes of the input in a tile."""
        return self.tile.blocks // self.shared_taps

    @property
    def tiles(self) -> int:
        return self.row_tiles * self.column_tiles

    @property
    def parted(self) -> int:
        """Tiles whose K is split."""
        return 0 if self.sums and self.shares == 1 else self.tiles - self.whole

    @property
    def units(self) -> int:
        """Work units."""
        if self.sums:
            return self.tiles * self.shares * self.summing
        return self.whole + self.parted * self.shares

    def blocks(self, device: CudaDevice) -> int:
        """Return the number of persistent blocks, in whole clusters."""
        return min(self.units, device.multiprocessors) // self.cluster * self.cluster

    @property
    def partial_bytes(self) -> int:
        return self.parted * self.shares * self.tile.sums * 4

    @property
    def slices(self) -> int:
        """The number of slices of a block's warps, each of which reduces a part of the shares if
        ``together``: that with the fewest memory latencies per thread."""
        warps = self.tile.warpgroups * 4

        def waits(slices: int) -> int:
            groups = ceil_div(self.tile.sums // 4, warps * 32 // slices)
            each = ceil_div(self.shares, slices)
            return ceil_div(groups, self.shares) * ceil_div(each, TOGETHER_BATCH)

        whole = (count for count in range(1, warps + 1) if warps % count == 0)
        return min(whole, key=waits)

    @property
    def box_pixels(self) -> int:
        """Pixels of a box of the input."""
        return self.tile.pixels + self.halo

    @property
    def arriving_bytes(self) -> int:
        """Transaction bytes (mbarrier.expect_tx) of a k-tile per block."""
        x = self.boxes * self.box_pixels * self.tile.channels * self.tile.item_bytes
        return self.tile.parts * (x + self.y_bytes)

    @property
    def y_bytes(self) -> int:
        """Bytes of the boxes of grad_output in a k-tile, of one part."""
        return self.tile.row_boxes * ROWS * self.tile.pixels * self.tile.item_bytes

    @property
    def box_bytes(self) -> int:
        """Aligned bytes between boxes of the input in shared memory."""
        return _aligned(self.box_pixels * self.tile.channels * self.tile.item_bytes)

    @property
    def stage_bytes(self) -> int:
        return self.tile.parts * (self.y_bytes + self.boxes * self.box_bytes)

    def stages(self, device: CudaDevice) -> int:
        room = device.shared_bytes_per_block - ALIGNMENT - BESIDE_BYTES
        return min(MOST_STAGES, room // self.stage_bytes)

    def ring_bytes(self, device: CudaDevice) -> int:
        return self.stages(device) * self.stage_bytes

    def shared_bytes(self, device: CudaDevice) -> int:
        """Return the dynamic shared memory, padded if possible for ``BELIEVED_BYTES``."""
        room = device.shared_bytes_per_block - BESIDE_BYTES
        ring = self.ring_bytes(device)
        if self.sums:
            ring = max(ring, self.tile.joined_bytes(self.summing))
        return min(ring + ALIGNMENT + BELIEVED_BYTES, room)

    @property
    def name(self) -> str:
        taps = f"_{self.shared_taps}taps" if self.shared_taps > 1 else ""
        shared = "" if self.copying == 1 else "_x" if self.rows_first else "_y"
        shared += f"_sum{self.summing}" if self.sums else ""
        together = "_together" if self.together else ""
        return f"{self.tile.name}{taps}{shared}{together}/{self.shares}"


def _aligned(size_bytes: int) -> int:
    return ceil_div(size_bytes, ALIGNMENT) * ALIGNMENT


def cuts(
    work: ConvWork,
    device: CudaDevice,
    *,
    direct: bool,
    rows: PixelRows | None = None,
    parts: int = 1,
) -> Iterator[Cut]:
    """Yield candidate partitions of work whose operands may be ``rows``, or have ``parts``. With
    ``direct``, whole tiles need no second kernel."""
    for cut in _all_tiled(work, device, rows, parts):
        for found in _shared_out(work, device, cut, direct):
            yield found
            if _meets(found, device):
                yield found._replace(together=True)


def _all_tiled(
    work: ConvWork, device: CudaDevice, rows: PixelRows | None, parts: int
) -> Iterator[Cut]:
    """Yield the partitions by each tile, before splitting K."""
    if rows is not None:
        for tile in TILES:
            for cut in _tiled(work, tile, 1):
                if cut.copying == 1 and cut.stages(device) >= LEAST_STAGES:
                    yield cut._replace(steps=rows.steps)
        return
    tf32 = work.dtype is DType.FLOAT32
    for tile in TF32_TILES if tf32 else TILES_OF[parts]:
        shared = {1}
        if work.stride[2] == 1 and work.kernel[2] > 1 and not tf32:
            shared.add(tile.blocks_each)
        for taps in sorted(shared):
            for cut in _tiled(work, tile, taps):
                if cut.stages(device) >= LEAST_STAGES:
                    yield cut


def _tiled(work: ConvWork, tile: WeightTile, taps: int) -> Iterator[Cut]:
    """Yield the partitions with and without clusters, before splitting K."""
    halo = (taps - 1) * work.dilation[2]
    outer = work.kernel[0] * work.kernel[1] * ceil_div(work.kernel[2], taps)
    boxes = outer * ceil_div(work.in_channels, tile.channels)
    column_tiles = ceil_div(boxes, tile.blocks // taps)
    group_tiles = ceil_div(work.out_channels, tile.row_boxes * ROWS)
    rows = work.batch * work.output[0] * work.output[1]
    steps = ceil_div(rows * (work.output[2] + halo), tile.pixels)
    cut = Cut(tile, taps, halo, work.groups * group_tiles, column_tiles, steps, 0, 1)
    for cluster, summing in tile.clusters:
        found, copying = cut._replace(cluster=cluster, summing=summing), cluster // summing
        if copying == 1:
            yield found
            continue
        if group_tiles > 1:
            whole = ceil_div(group_tiles, copying) * copying
            yield found._replace(row_tiles=work.groups * whole)
        if column_tiles > 1 and tile.row_boxes > 1:
            whole = ceil_div(column_tiles, copying) * copying
            yield found._replace(column_tiles=whole, rows_first=False)


def _shared_out(work: ConvWork, device: CudaDevice, cut: Cut, direct: bool) -> Iterator[Cut]:
    tiles, blocks = cut.tiles, device.multiprocessors // cut.cluster * cut.cluster
    if cut.sums:
        # One unit per block, which reuses the pipeline's memory for partial sums.
        room = CLUSTERS[cut.cluster] * device.multiprocessors // MEASURED_ON
        most = min(room * cut.copying // tiles, cut.steps // cut.summing)
        least = cut.tile.joined_bytes(cut.summing) + ALIGNMENT + BESIDE_BYTES
        if work.split_k is None and most >= 1 and least <= device.shared_bytes_per_block:
            yield cut._replace(shares=most)
        return
    if work.split_k is not None:
        whole = tiles if direct and work.split_k == 1 else 0
        yield cut._replace(whole=whole, shares=min(work.split_k, cut.steps))
        return
    if direct:
        yield cut._replace(whole=tiles)
    full = tiles // blocks if direct else 0
    for waves in {full, max(0, full - 1), 0}:
        rest = tiles - waves * blocks
        if rest == 0:
            continue
        counts = {max(1, times * blocks // rest) for times in range(1, MOST_WAVES + 1)}
        for count in sorted(counts):
            shares = min(count, cut.steps)
            found = cut._replace(whole=waves * blocks, shares=shares)
            if shares == 1 or found.partial_bytes <= PARTIAL_BYTES:
                yield found


def _meets(cut: Cut, device: CudaDevice) -> bool:
    """Return whether blocks can reduce partial sums themselves: each has at most one split unit."""
    if cut.sums or cut.parted == 0 or cut.shares > MOST_TOGETHER:
        return False
    return cut.parted * cut.shares <= device.multiprocessors // cut.cluster * cut.cluster
