"""Depthwise wgrad on Hopper, with strips of several images per product
(hopper_depthwise_strips.cu)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.core.elements import CUDA_TYPES
from convgrad_service.backends.cuda.kernels.core.tensor_maps import TiledMap, pack_maps
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_tiles import (
    IN_16_BITS,
    LinearCost,
    Plane,
    chunk_counts,
    plane_and_tile,
    plane_of,
    why_not_counted,
)
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_weight_args import (
    buffers_of,
    elements_of,
    fill_weight,
    partials_of,
)
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import HOPPER, CudaDevice
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import ConvWork, Operand

__all__ = ["HOPPER_STRIPS_TILES", "HopperDepthwiseStrips", "StripsTile"]

COST = LinearCost(4.27, 0.267, 0.0056, 2.01)
CHANNELS, WARPS = 32, 8
STRIP_COLUMNS, STRIPS = 8, 16
ALIGN_BYTES = 1024
MOST_SLOTS = 16
MOST_INDEX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class StripsTile:
    """The extent of a square kernel, and the adjacent strips of a product."""

    kernel: int
    side: int

    @property
    def images(self) -> int:
        """Images per product."""
        return STRIPS // self.side

    @property
    def x_columns(self) -> int:
        """Columns of x in shared memory, an odd number of pairs."""
        return _odd_pairs(STRIP_COLUMNS * self.side + self.kernel - 1)

    @property
    def y_columns(self) -> int:
        return _odd_pairs(STRIP_COLUMNS * self.side)

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage: a row of x and one of y."""
        return sum(
            ceil_div(self.images * columns * CHANNELS * 2, ALIGN_BYTES) * ALIGN_BYTES
            for columns in (self.x_columns, self.y_columns)
        )

    @property
    def sums_bytes(self) -> int:
        return CHANNELS * self.kernel * 2 * 32 * 4

    def slots(self, device: CudaDevice) -> int:
        """Return the stages that fit beside alignment, accumulators and mbarriers."""
        free = device.shared_bytes_per_block - ALIGN_BYTES - self.sums_bytes - 512
        return min(MOST_SLOTS, free // self.stage_bytes)


HOPPER_STRIPS_TILES = tuple(StripsTile(kernel, side) for kernel in (5, 7) for side in (4, 2))


# Elements of both tensors above which it is faster, and the least utilisation of products.
LEAST_ELEMENTS, LEAST_FILLED = 12 * 10**6, 0.8


HopperDepthwiseStripsArgs = structure(
    "depthwise/hopper_depthwise_strips.cu", "HopperDepthwiseStripsArgs"
)


class HopperDepthwiseStrips:
    """bwd_weight in 16-bit types with one channel per group, channels last."""

    name = "hopper_depthwise_strips"

    def __init__(
        self, tiles: tuple[StripsTile, ...] = HOPPER_STRIPS_TILES, always: bool = False
    ) -> None:
        self._tiles = tiles
        self._always = always

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        if device.architecture not in HOPPER:
            return f"needs Hopper; this is {device.architecture}"
        plane = plane_of(work)
        if isinstance(plane, str):
            return plane
        tile = self._tile(plane)
        if tile is None:
            return f"no instance for kernel {work.kernel} and stride {work.stride}"
        if not self._always:
            reason = _why_slower(work, plane, tile)
            if reason is not None:
                return reason
        if _items(plane, tile, plane.output[0]) > MOST_INDEX:
            return "more than 2^31 items"
        for one in _maps(work, plane, tile).values():
            reason = one[1].why_not()
            if reason is not None:
                return reason
        return why_not_counted(ceil_div(work.groups, CHANNELS))

    def launches(self, work: ConvWork, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        plane, tile = plane_and_tile(work, self._tile)
        return self.fragment(work, device, plane, tile)

    def fragment(
        self, work: ConvWork, device: CudaDevice, plane: Plane, tile: StripsTile
    ) -> Fragment:
        """Return the launch with a tile."""
        tiles = ceil_div(work.groups, CHANNELS)
        resident = max(1, device.multiprocessors // tiles)
        chunks = _chunks(plane, tile, resident)
        rows = ceil_div(plane.output[0], chunks)
        chunks = ceil_div(plane.output[0], rows)
        items = _items(plane, tile, chunks)
        blocks = ceil_div(items, ceil_div(items, resident))

        args = HopperDepthwiseStripsArgs()
        fill_weight(args, work, plane)
        args.groups = ceil_div(plane.output[1], STRIP_COLUMNS * tile.side)
        args.chunks, args.rows, args.items = chunks, rows, items
        args.blocks, args.slots = blocks, tile.slots(device)
        partials = partials_of(work, blocks, blocks * tiles * tile.kernel**2 * CHANNELS)
        launch = Launch(
            _instance(work.dtype, tile),
            (tiles, blocks, 1),
            (32 * (WARPS + 4), 1, 1),
            pack_maps(args, _maps(work, plane, tile), **buffers_of(work, partials)),
            ALIGN_BYTES + args.slots * tile.stage_bytes + tile.sums_bytes,
        )
        return Fragment(self.name, (launch,), partials, expected_s=COST.expected_s(work, device))

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        return [_instance(dtype, tile) for tile in self._tiles for dtype in IN_16_BITS]

    def _tile(self, plane: Plane) -> StripsTile | None:
        """Return the tile with the fewest empty strips."""
        if plane.stride != 1:
            return None
        strips = ceil_div(plane.output[1], STRIP_COLUMNS)
        tiles = [tile for tile in self._tiles if (tile.kernel,) * 2 == plane.kernel]
        return min(tiles, key=lambda tile: ceil_div(strips, tile.side) * tile.side, default=None)


def _why_slower(work: ConvWork, plane: Plane, tile: StripsTile) -> str | None:
    """Return why other families are expected to be faster, or None."""
    elements = elements_of(work)
    if elements < LEAST_ELEMENTS:
        return f"{elements} elements; other families are faster on few"
    sides = ((plane.output[1], STRIP_COLUMNS * tile.side), (plane.batch, tile.images))
    filled = prod(
        size / (ceil_div(size, of) * of) for size, of in (*sides, (work.groups, CHANNELS))
    )
    if filled < LEAST_FILLED:
        return f"products would be {filled:.0%} full; others are faster"
    return None


def _odd_pairs(columns: int) -> int:
    return (columns + 1) // 4 * 4 + 2


def _items(plane: Plane, tile: StripsTile, chunks: int) -> int:
    """Return the number of work items per tile of channels."""
    groups = ceil_div(plane.output[1], STRIP_COLUMNS * tile.side)
    return ceil_div(plane.batch, tile.images) * groups * chunks


def _chunks(plane: Plane, tile: StripsTile, resident: int) -> int:
    """Return the number of chunks of an image's rows that minimises the total time."""
    rows = plane.output[0]

    def steps(chunks: int) -> int:
        rounds = ceil_div(_items(plane, tile, chunks), resident)
        return rounds * (ceil_div(rows, chunks) + (tile.kernel - 1 if chunks > 1 else 0))

    return min(chunk_counts(rows), key=steps)


def _maps(
    work: ConvWork, plane: Plane, tile: StripsTile
) -> dict[str, tuple[Operand | str, TiledMap]]:
    def of(operand: Operand, size: tuple[int, int], columns: int) -> tuple[Operand | str, TiledMap]:
        item = operand.dtype.itemsize
        image, row, pixel = plane.strides(operand)
        return operand, TiledMap(
            operand.dtype,
            (work.groups, size[1], size[0], plane.batch),
            (pixel * item, row * item, image * item),
            swizzle=CHANNELS * item,
            box=(CHANNELS, columns, 1, tile.images),
            # With L2 promotion, data was fetched twice (as measured).
            l2_bytes=0,
        )

    return {
        "x_map": of(work.x, plane.input, tile.x_columns),
        "y_map": of(work.y, plane.output, tile.y_columns),
    }


def _instance(dtype: DType, tile: StripsTile) -> Instance:
    defines = {
        "ELEMENT": CUDA_TYPES[dtype],
        "KERNEL": tile.kernel,
        "SIDE": tile.side,
    }
    return Instance.of("depthwise/hopper_depthwise_strips.cu", defines, HOPPER)
