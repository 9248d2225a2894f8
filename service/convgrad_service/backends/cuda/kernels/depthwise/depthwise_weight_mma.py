"""Depthwise wgrad on tensor cores (depthwise_weight_mma.cu)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_tiles import (
    IN_16_BITS,
    STRIP_COLUMNS,
    LinearCost,
    Plane,
    chunk_counts,
    plane_of,
    resident_blocks,
    why_not_counted,
)
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_weight_args import (
    buffers_of,
    fill_weight,
    partials_of,
)
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import ARCHITECTURES, HOPPER, CudaDevice
from convgrad_service.plans.cuda.families import Solver
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["TILE_STRIPS", "DepthwiseWeightMma", "Strips", "chunk_rows"]

COST = LinearCost(7.75, 0.268, 0.0209, 1.26)
# Diagonals of a product, each of which is a tap.
DIAGONALS = 8
# The most parts of a kernel. Each reads x and y again, and dilated kernels have few taps in each.
MOST_PARTS = 16
# Strips of a tile, of STRIP_COLUMNS columns each.
TILE_STRIPS = 16
# Rows (of 16 terms) after which accumulators are added to float32 sums.
FLUSH = 32


# Warps of a block, and channels of a warp.
WARPS, OWN = 8, 2
CHANNELS = WARPS * OWN
"""Channels of a block."""
# Rows between barriers, pipeline stages of that many rows, and blocks per SM.
ROWS, STAGES, BLOCKS = 1, 4, 2
# Fixed cost of an item, in rows.
START_ROWS = 4


@dataclass(frozen=True, slots=True)
class Strips:
    """The strips of a batch of images.

    Each image has ``count`` adjacent strips, each of which reads its own unit of the source and the
    next one.
    """

    batch: int
    count: int

    @property
    def units(self) -> int:
        """Number of units per image."""
        return self.count + 1

    @property
    def tiles(self) -> int:
        return ceil_div(self.batch * self.count, TILE_STRIPS)

    @property
    def slots(self) -> int:
        """The most units per tile, rounded up to matrices of 4."""
        most = 0
        for tile in range(min(self.tiles, self.count)):
            first = tile * TILE_STRIPS % self.count
            images, last = divmod(first + TILE_STRIPS - 1, self.count)
            most = max(most, images * self.units + last - first + 2)
        return ceil_div(most, 4) * 4


@dataclass(frozen=True, slots=True)
class WeightMmaTile:
    """The most rows of a part of the kernel, and whether the copies of a step are issued after its
    computation."""

    kernel_rows: int
    late: bool

    @property
    def variants(self) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """The numbers of blocks per SM, the most first, with the architectures of each.

        With 7 kernel rows, registers suffice for two blocks on Hopper only.
        """
        if self.kernel_rows < 7:
            return ((BLOCKS, ARCHITECTURES),)
        others = tuple(name for name in ARCHITECTURES if name not in HOPPER)
        return (BLOCKS, HOPPER), (1, others)

    def variant(self, device: CudaDevice) -> tuple[int, tuple[str, ...]]:
        """Return the variant for a device."""
        return self.variants[0 if device.architecture in HOPPER else -1]


# Larger kernels are divided into parts.
TILES = (
    WeightMmaTile(3, late=False),
    WeightMmaTile(5, late=False),
    WeightMmaTile(7, late=True),
)


StripTiling = structure("depthwise/depthwise_strips.cuh", "StripTiling")
DepthwiseWeightMmaArgs = structure("depthwise/depthwise_weight_mma.cu", "DepthwiseWeightMmaArgs")


class DepthwiseWeightMma(Solver[ConvWork, tuple[Plane, WeightMmaTile]]):
    """bwd_weight in 16-bit types with one channel per group, channels last."""

    name = "depthwise_weight_mma"

    def solve(self, work: ConvWork, device: CudaDevice) -> tuple[Plane, WeightMmaTile] | str:
        plane = plane_of(work)
        if isinstance(plane, str):
            return plane
        if plane.stride != 1:
            return f"a stride of {plane.stride}, with which other families are faster"
        tile = next((tile for tile in TILES if plane.reach[0] <= tile.kernel_rows), TILES[-1])
        down, across = _parts(plane, tile)
        if down * across > MOST_PARTS:
            return f"a kernel that reaches over {plane.reach[0]} rows and {plane.reach[1]} columns"
        return why_not_counted(_columns(work, plane, tile)) or (plane, tile)

    def fragment(
        self, work: ConvWork, device: CudaDevice, config: tuple[Plane, WeightMmaTile]
    ) -> Fragment:
        plane, tile = config
        strips = _strips(plane)
        channel_tiles = ceil_div(work.groups * work.out_channels, CHANNELS)
        shared_bytes = _shared_bytes(tile, strips.slots)
        # Parts of the kernel, of about equal size.
        down, across = _parts(plane, tile)
        part = ceil_div(plane.reach[0], down), ceil_div(plane.reach[1], across)
        columns = _columns(work, plane, tile)
        held, architectures = tile.variant(device)
        resident = max(1, resident_blocks(device, shared_bytes, held) // columns)
        chunk = chunk_rows(plane.output[0], tile.kernel_rows - 1, strips.tiles, resident)
        chunks = ceil_div(plane.output[0], chunk)
        # As many blocks as are resident; items per block differ by at most one.
        items = strips.tiles * chunks
        blocks = ceil_div(items, ceil_div(items, resident))

        args = DepthwiseWeightMmaArgs()
        fill_weight(args, work, plane)
        args.x_pitch, args.y_pitch = args.x_stride[1] // 8, args.y_stride[1] // 8
        args.x_channels, args.multiplier = work.groups, work.out_channels
        args.kernel[:], args.dilation[:], args.part[:] = plane.reach, plane.dilation, part
        args.parts_across, args.blocks = across, blocks
        args.tiling = StripTiling(
            strips.count, strips.units, strips.slots, strips.tiles, chunks, chunk, channel_tiles
        )
        partials = partials_of(work, blocks, blocks * columns * part[0] * part[1] * CHANNELS)
        launch = Launch(
            _instance(work.dtype, tile, held, architectures),
            (blocks * columns, 1, 1),
            (WARPS * 32, 1, 1),
            pack(args, **buffers_of(work, partials)),
            shared_bytes,
        )
        return Fragment(self.name, (launch,), partials, expected_s=COST.expected_s(work, device))

    def instances(self) -> Iterable[Instance]:
        return [
            _instance(dtype, tile, held, architectures)
            for tile in TILES
            for dtype in IN_16_BITS
            for held, architectures in tile.variants
        ]


def chunk_rows(rows: int, reach: int, items: int, resident: int) -> int:
    """Return the rows per chunk that minimise the total time.

    A chunk costs its rows, ``reach`` halo rows and a fixed ``START_ROWS``. Each chunk has
    ``items``, of which ``resident`` run at once.
    """
    best = min(
        chunk_counts(rows),
        key=lambda chunks: (
            ceil_div(items * chunks, resident) * (ceil_div(rows, chunks) + reach + START_ROWS)
        ),
    )
    return ceil_div(rows, best)


def _parts(plane: Plane, tile: WeightMmaTile) -> tuple[int, int]:
    """Return the numbers of parts of a kernel along H and W."""
    rows, columns = plane.reach
    return ceil_div(rows, tile.kernel_rows), ceil_div(columns, DIAGONALS)


def _columns(work: ConvWork, plane: Plane, tile: WeightMmaTile) -> int:
    """Return the number of columns of blocks; blocks of a column reduce to the same results."""
    channel_tiles = ceil_div(work.groups * work.out_channels, CHANNELS)
    return channel_tiles * prod(_parts(plane, tile))


def _strips(plane: Plane) -> Strips:
    """Return the strips of y, of 8 columns, like units of x."""
    return Strips(plane.batch, ceil_div(plane.output[1], STRIP_COLUMNS))


def _shared_bytes(tile: WeightMmaTile, slots: int) -> int:
    # Of x and of y: a row as it is copied, and transposed.
    rows = (slots + TILE_STRIPS) * STRIP_COLUMNS * CHANNELS * 2
    lines = sum(n + (4 if n % 8 == 0 else 0) for n in (slots, TILE_STRIPS)) * CHANNELS * 16
    sums = CHANNELS * tile.kernel_rows * 2 * 32 * 4
    return ROWS * (STAGES * rows + 2 * lines) + sums


def _instance(
    dtype: DType, tile: WeightMmaTile, blocks: int, architectures: tuple[str, ...]
) -> Instance:
    return Instance.of(
        "depthwise/depthwise_weight_mma.cu",
        architectures,
        ELEMENT=dtype,
        KERNEL_H=tile.kernel_rows,
        WARPS=WARPS,
        CHANNELS=OWN,
        ROWS=ROWS,
        LATE=tile.late,
        STAGES=STAGES,
        BLOCKS=blocks,
        FLUSH=FLUSH,
    )
