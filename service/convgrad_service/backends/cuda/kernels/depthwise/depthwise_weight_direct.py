"""Channels-last depthwise wgrad in registers (depthwise_weight_direct.cu)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.gather_axes import divider
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_tiles import (
    IN_16_BITS,
    STRIP_COLUMNS,
    LinearCost,
    Plane,
    plane_of,
    why_not_counted,
)
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_weight_args import (
    buffers_of,
    fill_weight,
    partials_of,
)
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import HOPPER, CudaDevice
from convgrad_service.plans.cuda.families import Solver
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["DIRECT_TILES", "THREADS", "VECTOR", "DepthwiseWeightDirect", "DirectTile"]

# Fitted to 40 layers on an H200; on 17 others of at least 28 columns it errs by 5 %.
COST = LinearCost(11.6, 0.238, 0.0211, 0.0)
# Latency of a unit's first rows, in rows.
START_ROWS = 4
MOST_CHUNKS = 64
MOST_INDEX = 2**31 - 1


KERNEL = 3
# A thread's channels and columns of y; the most threads of a block, one of which fills an SM.
VECTOR, COLUMNS, THREADS = 2, 4, 512


@dataclass(frozen=True, slots=True)
class DirectTile:
    """The stride, the rows that a thread prefetches, and whether units may end within rows."""

    stride: int
    ahead: int
    ragged: bool


@dataclass(frozen=True, slots=True)
class DirectLayout:
    """Vectors of channels per tile, strips per unit, units per block, and rows per chunk."""

    vectors: int
    strips: int
    units: int
    rows: int

    @property
    def unit_warps(self) -> int:
        return ceil_div(self.vectors * self.strips, 32)


DirectConfig = tuple[Plane, DirectTile, DirectLayout]
DIRECT_TILES = (DirectTile(1, 3, ragged=True), DirectTile(2, 4, ragged=False))
# Columns of y from which on it may be faster on an H200.
LEAST_COLUMNS = 28
# If less than FILLED of the tensor-core strips' columns would be used, this family is faster from
# LEAST_RAGGED_COLUMNS columns on.
FILLED, LEAST_RAGGED_COLUMNS = 0.85, 19


DepthwiseWeightDirectArgs = structure(
    "depthwise/depthwise_weight_direct.cu", "DepthwiseWeightDirectArgs"
)


class DepthwiseWeightDirect(Solver[ConvWork, DirectConfig]):
    """bwd_weight in 16-bit types with one channel per group, channels last."""

    name = "depthwise_weight_direct"

    def __init__(self, always: bool = False) -> None:
        """Create the family; with ``always``, it also takes work at which others are faster."""
        self._always = always

    def solve(self, work: ConvWork, device: CudaDevice) -> DirectConfig | str:
        if device.architecture not in HOPPER:
            return f"measured on Hopper alone; this is {device.architecture}"
        plane = plane_of(work)
        if isinstance(plane, str):
            return plane
        if plane.multiplier > 1 or plane.dilation != (1, 1):
            return "several output channels per group, or dilated"
        tile = _tile(plane)
        if tile is None:
            return f"no instance for kernel {work.kernel} and stride {work.stride}"
        if not self._always and (reason := _why_slower(plane, tile)) is not None:
            return reason
        layout = best_layout(work, plane, tile, device)
        if layout is None:
            return _not_inner(plane)
        if plane.batch * plane.output[1] * MOST_CHUNKS > MOST_INDEX:
            return "more than 2^31 items"
        return why_not_counted(_tiles(work, layout)) or (plane, tile, layout)

    def fragment(self, work: ConvWork, device: CudaDevice, config: DirectConfig) -> Fragment:
        plane, tile, layout = config
        tiles = _tiles(work, layout)
        groups = ceil_div(plane.output[1], layout.strips * COLUMNS)
        chunks = ceil_div(plane.output[0], layout.rows)
        items = plane.batch * groups * chunks
        resident = max(1, device.multiprocessors // tiles)
        blocks = ceil_div(items, ceil_div(items, resident * layout.units) * layout.units)

        args = DepthwiseWeightDirectArgs()
        fill_weight(args, work, plane)
        args.vectors, args.strips = layout.vectors, layout.strips
        args.unit_warps, args.units = layout.unit_warps, layout.units
        args.groups, args.chunks, args.rows = groups, chunks, layout.rows
        args.blocks = blocks
        args.by_vectors = divider(layout.vectors)
        args.by_unit_warps = divider(layout.unit_warps)
        args.by_groups, args.by_chunks = divider(groups), divider(chunks)
        part = KERNEL**2 * layout.vectors * VECTOR
        partials = partials_of(work, blocks, blocks * tiles * part)
        launch = Launch(
            _instance(work.dtype, tile, _is_inner(plane, tile, layout.strips * COLUMNS)),
            (tiles, blocks, 1),
            (layout.units * layout.unit_warps * 32, 1, 1),
            pack(args, **buffers_of(work, partials)),
            _shared_bytes(layout),
        )
        return Fragment(self.name, (launch,), partials, expected_s=COST.expected_s(work, device))

    def instances(self) -> Iterable[Instance]:
        return [
            _instance(dtype, tile, inner)
            for tile in DIRECT_TILES
            for dtype in IN_16_BITS
            for inner in ((True, False) if tile.ragged else (True,))
        ]


def _tile(plane: Plane) -> DirectTile | None:
    if plane.kernel != (KERNEL, KERNEL):
        return None
    return next((tile for tile in DIRECT_TILES if tile.stride == plane.stride), None)


def _why_slower(plane: Plane, tile: DirectTile) -> str | None:
    """Return why other families are expected to be faster, or None."""
    columns = plane.output[1]
    if _is_inner(plane, tile, columns):
        least = LEAST_COLUMNS
    elif tile.stride == 1 and columns / (ceil_div(columns, STRIP_COLUMNS) * STRIP_COLUMNS) < FILLED:
        least = LEAST_RAGGED_COLUMNS
    else:
        return _not_inner(plane)
    return f"rows of {columns} columns; others are faster" if columns < least else None


def _not_inner(plane: Plane) -> str:
    return f"strips of {COLUMNS} columns do not end with rows of {plane.output[1]}, or long pads"


def layouts(
    work: ConvWork, plane: Plane, tile: DirectTile, device: CudaDevice
) -> Iterator[tuple[int, DirectLayout]]:
    """Yield layouts that fill blocks, each preceded by its cost (rows times warps of a block)."""
    vectors = work.groups // VECTOR
    strips = ceil_div(plane.output[1], COLUMNS)
    fewest = max(1, 4 // VECTOR)  # granularity in vectors: partial sums are read by fours
    for of_tile in range(8, max(8, min(vectors, THREADS)) + 1, fewest):
        tiles = ceil_div(vectors, of_tile)
        if of_tile > 8 and ceil_div(vectors, of_tile - fewest) == tiles:
            continue  # fewer vectors give as many tiles
        for side in range(min(strips, THREADS // of_tile), 0, -1):
            groups = ceil_div(strips, side)
            if ceil_div(strips, groups) != side:
                continue  # a shorter side gives as many groups
            if not tile.ragged and not _is_inner(plane, tile, side * COLUMNS):
                continue
            warps = ceil_div(of_tile * side, 32)
            units = THREADS // 32 // warps
            resident = max(1, device.multiprocessors // tiles) * units
            for chunks in range(1, min(plane.output[0], MOST_CHUNKS) + 1):
                rows = ceil_div(plane.output[0], chunks)
                if ceil_div(plane.output[0], rows) != chunks:
                    continue
                rounds = ceil_div(plane.batch * groups * chunks, resident)
                steps = rounds * ((rows - 1) * tile.stride + KERNEL + START_ROWS)
                yield steps * units * warps, DirectLayout(of_tile, side, units, rows)


def best_layout(
    work: ConvWork, plane: Plane, tile: DirectTile, device: CudaDevice
) -> DirectLayout | None:
    """Return the layout with the least cost, or None if no unit ends where rows do."""
    every = layouts(work, plane, tile, device)
    return min(every, key=lambda found: found[0], default=(0, None))[1]


def _is_inner(plane: Plane, tile: DirectTile, columns: int) -> bool:
    """Return whether units of ``columns`` divide rows of y, with padding of at most half a
    kernel."""
    half = (KERNEL - 1) // 2
    reach = (plane.output[1] - 1) * plane.stride + plane.kernel[1]
    after = reach - plane.pad[1] - plane.input[1]
    whole = plane.output[1] % columns == 0 and columns % COLUMNS == 0
    return whole and max(plane.pad[1], after) <= half


def _tiles(work: ConvWork, layout: DirectLayout) -> int:
    """Return the number of tiles of channels."""
    return ceil_div(work.groups, layout.vectors * VECTOR)


def _shared_bytes(layout: DirectLayout) -> int:
    """Return the bytes of the threads' accumulators."""
    threads = layout.units * layout.unit_warps * 32
    return KERNEL**2 * VECTOR * threads * 4


def _instance(dtype: DType, tile: DirectTile, inner: bool) -> Instance:
    return Instance.of(
        "depthwise/depthwise_weight_direct.cu",
        HOPPER,
        ELEMENT=dtype,
        KERNEL=KERNEL,
        STRIDE=tile.stride,
        VECTOR=VECTOR,
        COLUMNS=COLUMNS,
        AHEAD=tile.ahead,
        INNER=inner,
        THREADS=THREADS,
    )
