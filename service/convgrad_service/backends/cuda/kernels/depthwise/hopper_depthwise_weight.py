"""The gradient of a depthwise convolution's weight on Hopper: ``hopper_depthwise_weight.cu``."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.core.elements import CUDA_TYPES
from convgrad_service.backends.cuda.kernels.core.tensor_maps import MapField, TileMap, pack_maps
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_tiles import (
    Plane,
    plane_of,
    why_not_counted,
    why_not_plane,
)
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_weight_args import (
    OPERANDS,
    SIZES,
    buffers_of,
    elements_of,
    fill_weight,
    partials_of,
)
from convgrad_service.plans.cuda.device import HOPPER, CudaDevice
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import ConvWork, Operand

__all__ = ["HOPPER_WEIGHT_TILES", "HopperDepthwiseWeight", "HopperWeightTile"]

DTYPES = (DType.FLOAT16, DType.BFLOAT16)
PAIR_COLUMNS = 16
ALIGN_BYTES = 1024
MOST_SLOTS, LEAST_SLOTS = 16, 4
MOST_ROWS = 256  # of a box
MOST_INDEX = 2**31 - 1
# What a stage takes beside its channels, in channels.
STAGE_START = 64


@dataclass(frozen=True, slots=True)
class HopperWeightTile:
    """Kernel and stride, how often a warp has 16 columns, the warps that multiply, a block's
    channels, and the rows of y in a stage, 0 for as many as leave LEAST_SLOTS stages."""

    kernel: int
    stride: int
    pairs: int
    warps: int
    channels: int = 32
    stage_rows: int = 0

    @property
    def most_pairs(self) -> int:
        """Of a stage, side by side."""
        return self.pairs * (self.warps // (self.channels // 8))

    @property
    def row_bytes(self) -> int:
        """Of a pixel in shared memory."""
        return self.channels * 2

    @property
    def sums_bytes(self) -> int:
        return self.warps * self.kernel**2 * 8 * 4


HOPPER_WEIGHT_TILES = (HopperWeightTile(3, 2, 1, 16),)
# Elements of both tensors from which it is faster than depthwise_weight: with 96 million it took
# 0.88 of its time on one H200.
LEAST_ELEMENTS = 27 * 10**6


class HopperDepthwiseWeightArgs(ctypes.Structure):
    """See ``hopper_depthwise_weight.cuh``."""

    _fields_ = (
        *((name, MapField) for name in ("x_map", "tail_map", "y_map")),
        *OPERANDS,
        *SIZES,
        *(
            (name, ctypes.c_int32)
            for name in (
                *("pairs", "across", "down", "stages", "stage_rows", "x_columns", "slots"),
                *("x_bytes", "tail_bytes", "slot_bytes", "blocks", "last_blocks"),
            )
        ),
    )


@dataclass(frozen=True, slots=True)
class Stage:
    """Of a row, ``across`` parts of ``pairs`` times 16 columns; ``rows`` rows of y."""

    tile: HopperWeightTile
    pairs: int
    across: int
    rows: int

    @property
    def x_columns(self) -> int:
        return (self.pairs * PAIR_COLUMNS - 1) * self.tile.stride + self.tile.kernel

    @property
    def x_rows(self) -> int:
        return self.tile.stride * self.rows

    @property
    def tail_rows(self) -> int:
        return self.tile.kernel - self.tile.stride

    def row_bytes(self, rows: int) -> int:
        """Of so many rows of x."""
        return aligned(rows * self.x_columns * self.tile.row_bytes)

    @property
    def slot_bytes(self) -> int:
        y = self.rows * self.pairs * PAIR_COLUMNS * self.tile.row_bytes
        x = self.row_bytes(self.x_rows) + self.row_bytes(self.tail_rows)
        return x + aligned(y)

    def slots(self, device: CudaDevice) -> int:
        """Of a ring, beside what aligns it, the sums and the barriers."""
        free = device.shared_bytes_per_block - ALIGN_BYTES - self.tile.sums_bytes - 512
        return min(MOST_SLOTS, free // self.slot_bytes)


class HopperDepthwiseWeight:
    """bwd_weight of 16-bit types, one channel a group, channels last."""

    name = "hopper_depthwise_weight"

    def __init__(
        self,
        tiles: tuple[HopperWeightTile, ...] = HOPPER_WEIGHT_TILES,
        least_elements: int = LEAST_ELEMENTS,
    ) -> None:
        self._tiles = tiles
        self._least_elements = least_elements

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        if device.architecture not in HOPPER:
            return f"needs Hopper; this is {device.architecture}"
        if work.dtype not in DTYPES:
            return f"{work.dtype}"
        reason = why_not_plane(work)
        if reason is not None:
            return reason
        plane = plane_of(work)
        if plane is None:
            return f"two strides, {work.stride[1]} and {work.stride[2]}"
        tile = self._tile(plane)
        if tile is None:
            return f"no instance for kernel {work.kernel} and stride {work.stride}"
        elements = elements_of(work, plane)
        if elements < self._least_elements:
            return f"{elements} elements; others are faster on few"
        stage = _stage(plane, tile, device)
        if stage.slots(device) < 2:
            return "no two stages in shared memory"
        if _stages(plane, stage) > MOST_INDEX:
            return "more than 2^31 stages"
        for one in _maps(work, plane, stage).values():
            reason = one[1].why_not()
            if reason is not None:
                return reason
        return why_not_counted(ceil_div(work.groups, tile.channels))

    def launches(self, work: ConvWork, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        plane = plane_of(work)
        tile = None if plane is None else self._tile(plane)
        if plane is None or tile is None:
            raise ValueError("no instance")
        return self.fragment(work, device, plane, tile)

    def fragment(
        self, work: ConvWork, device: CudaDevice, plane: Plane, tile: HopperWeightTile
    ) -> Fragment:
        """With this tile."""
        stage = _stage(plane, tile, device)
        tiles = ceil_div(work.groups, tile.channels)
        count = _stages(plane, stage)
        slots = stage.slots(device)
        blocks, last_blocks = blocks_of_tiles(work.groups, tile.channels, count, device)

        args = HopperDepthwiseWeightArgs()
        fill_weight(args, work, plane)
        args.pairs, args.across = stage.pairs, stage.across
        args.down = ceil_div(plane.output[0], stage.rows)
        args.stages, args.stage_rows = count, stage.rows
        args.x_columns, args.slots = stage.x_columns, slots
        args.x_bytes = stage.row_bytes(stage.x_rows)
        args.tail_bytes = stage.row_bytes(stage.tail_rows)
        args.slot_bytes = stage.slot_bytes
        args.blocks, args.last_blocks = blocks, last_blocks
        grid = (tiles - 1) * blocks + last_blocks
        sums = grid * tile.kernel**2 * tile.channels
        partials = partials_of(work, max(blocks, last_blocks), sums)
        launch = Launch(
            _instance(work.dtype, work.result_dtype, tile),
            (grid, 1, 1),
            (32 * (tile.warps + 4), 1, 1),
            pack_maps(args, _maps(work, plane, stage), **buffers_of(work, partials)),
            ALIGN_BYTES + slots * stage.slot_bytes + tile.sums_bytes,
        )
        return Fragment(self.name, (launch,), partials)

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        return [
            _instance(dtype, result, tile)
            for tile in self._tiles
            for dtype in DTYPES
            for result in (dtype, DType.FLOAT32)
        ]

    def _tile(self, plane: Plane) -> HopperWeightTile | None:
        if plane.axes[1] is None:
            return None
        for tile in self._tiles:
            if (tile.kernel, tile.kernel, tile.stride) == (*plane.kernel, plane.stride):
                return tile
        return None


def aligned(size_bytes: int) -> int:
    return ceil_div(size_bytes, ALIGN_BYTES) * ALIGN_BYTES


def _stage(plane: Plane, tile: HopperWeightTile, device: CudaDevice) -> Stage:
    """The longest that leaves LEAST_SLOTS of them, an image's rows in equal ones."""
    pairs = ceil_div(plane.output[1], PAIR_COLUMNS)
    across = ceil_div(pairs, tile.most_pairs)
    pairs = ceil_div(pairs, across)
    rows = plane.output[0]
    best = Stage(tile, pairs, across, 1)
    if tile.stage_rows:
        return Stage(tile, pairs, across, min(rows, tile.stage_rows))
    for down in range(rows, 0, -1):
        stage = Stage(tile, pairs, across, ceil_div(rows, down))
        if stage.x_rows > MOST_ROWS or stage.slots(device) < LEAST_SLOTS:
            break
        best = stage
    return best


def _stages(plane: Plane, stage: Stage) -> int:
    return plane.batch * stage.across * ceil_div(plane.output[0], stage.rows)


def blocks_of_tiles(
    channels: int, of_tile: int, stages: int, device: CudaDevice
) -> tuple[int, int]:
    """Of a tile of channels, and of the last one, which may have fewer: all run at once, and take
    about as long."""
    tiles = ceil_div(channels, of_tile)
    rest = channels - (tiles - 1) * of_tile
    if tiles > device.multiprocessors:
        return 1, 1
    full, last = of_tile + STAGE_START, rest + STAGE_START
    last_blocks = max(1, device.multiprocessors * last // ((tiles - 1) * full + last))
    if tiles == 1:
        return min(stages, last_blocks), min(stages, last_blocks)
    blocks = max(1, (device.multiprocessors - last_blocks) // (tiles - 1))
    return min(stages, blocks), min(stages, last_blocks)


def _maps(work: ConvWork, plane: Plane, stage: Stage) -> dict[str, tuple[Operand | str, TileMap]]:
    tile = stage.tile

    def of(
        operand: Operand, size: tuple[int, int], columns: int, rows: int
    ) -> tuple[Operand | str, TileMap]:
        item = operand.dtype.itemsize
        image, row, pixel = plane.strides(operand)
        return operand, TileMap(
            operand.dtype,
            (work.groups, size[1], size[0], plane.batch),
            (pixel * item, row * item, image * item),
            swizzle=tile.row_bytes,
            box=(tile.channels, columns, rows, 1),
            # Fetching more than is asked for fetched it twice: 1.7 times the bytes.
            l2_bytes=0,
        )

    y_columns = stage.pairs * PAIR_COLUMNS
    return {
        "x_map": of(work.x, plane.input, stage.x_columns, stage.x_rows),
        "tail_map": of(work.x, plane.input, stage.x_columns, stage.tail_rows),
        "y_map": of(work.y, plane.output, y_columns, stage.rows),
    }


def _instance(dtype: DType, result: DType, tile: HopperWeightTile) -> Instance:
    defines = {
        "ELEMENT": CUDA_TYPES[dtype],
        "RESULT": CUDA_TYPES[result],
        "KERNEL": tile.kernel,
        "STRIDE": tile.stride,
        "PAIRS": tile.pairs,
        "WARPS": tile.warps,
        "CHANNELS": tile.channels,
    }
    return Instance.of("depthwise/hopper_depthwise_weight.cu", defines, HOPPER)
