"""Depthwise convolutions on Hopper: ``hopper_depthwise.cu``."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.depthwise_tiles import (
    Plane,
    plane_of,
    why_not_plane,
)
from convgrad_service.backends.cuda.kernels.elements import CUDA_TYPES
from convgrad_service.backends.cuda.kernels.gather_args import gather_sides
from convgrad_service.backends.cuda.kernels.hopper_depthwise_weight import (
    ALIGN_BYTES,
    DTYPES,
    LEAST_SLOTS,
    MOST_INDEX,
    MOST_ROWS,
    MOST_SLOTS,
    PAIR_COLUMNS,
    aligned,
    blocks_of_tiles,
)
from convgrad_service.backends.cuda.kernels.tensor_maps import MapField, TileMap, pack_maps
from convgrad_service.plans.cuda_device import HOPPER, CudaDevice
from convgrad_service.plans.cuda_program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda_works import ConvWork, Operand

__all__ = ["HOPPER_TILES", "HopperDepthwise", "HopperDepthwiseTile"]

RESULTS = 3
"""Stages' results in shared memory."""


@dataclass(frozen=True, slots=True)
class HopperDepthwiseTile:
    """Kernel and stride, how often a warp has 16 columns, the warps that multiply, a block's
    channels, and the rows of x in a stage, 0 for as many as leave LEAST_SLOTS stages."""

    kernel: int
    stride: int
    pairs: int
    warps: int
    channels: int = 64
    stage_rows: int = 0
    start: int = 64
    fetch: int = 256

    @property
    def most_pairs(self) -> int:
        """Of a stage, side by side."""
        return self.pairs * (self.warps // (self.channels // 8))

    @property
    def met(self) -> int:
        """Rows of x that a row of the result meets."""
        return ceil_div(self.kernel, self.stride)

    @property
    def row_bytes(self) -> int:
        """Of a pixel in shared memory."""
        return self.channels * 2


HOPPER_TILES = (
    HopperDepthwiseTile(3, 1, 2, 16),
    HopperDepthwiseTile(3, 2, 1, 16),
    HopperDepthwiseTile(5, 1, 1, 16),
    HopperDepthwiseTile(7, 1, 2, 8),
)


class HopperDepthwiseArgs(ctypes.Structure):
    """See ``hopper_depthwise.cuh``."""

    _fields_ = (
        *((name, MapField) for name in ("x_map", "head_map", "y_map")),
        *((name, ctypes.c_uint64) for name in ("x", "w", "y")),
        *((f"{name}_stride", ctypes.c_int64 * 3) for name in ("x", "w", "y")),
        ("batch", ctypes.c_int32),
        ("channels", ctypes.c_int32),
        *((name, ctypes.c_int32 * 2) for name in ("x_size", "y_size", "pad", "lowest")),
        *(
            (name, ctypes.c_int32)
            for name in (
                *("flipped", "pairs", "across", "down", "stages", "stage_rows", "x_columns"),
                *("slots", "x_bytes", "slot_bytes", "result_bytes", "blocks", "last_blocks"),
            )
        ),
    )


@dataclass(frozen=True, slots=True)
class Stage:
    """Of a row, ``across`` parts of ``pairs`` times 16 columns; ``rows`` rows of x."""

    tile: HopperDepthwiseTile
    pairs: int
    across: int
    rows: int

    @property
    def x_columns(self) -> int:
        return self.pairs * PAIR_COLUMNS + self.tile.met - 1

    def row_bytes(self, rows: int) -> int:
        """Of so many rows of x."""
        return aligned(rows * self.x_columns * self.tile.row_bytes)

    @property
    def slot_bytes(self) -> int:
        return self.row_bytes(self.rows) + self.row_bytes(self.tile.met - 1)

    @property
    def result_bytes(self) -> int:
        return self.rows * self.pairs * PAIR_COLUMNS * self.tile.row_bytes * self.tile.stride**2

    def slots(self, device: CudaDevice) -> int:
        """Of a ring, beside what aligns it, the results and the barriers."""
        free = device.shared_bytes_per_block - ALIGN_BYTES - RESULTS * self.result_bytes - 512
        return min(MOST_SLOTS, free // self.slot_bytes)


class HopperDepthwise:
    """fwd and bwd_data of 16-bit types, one channel a group, channels last."""

    name = "hopper_depthwise"

    def __init__(self, tiles: tuple[HopperDepthwiseTile, ...] = HOPPER_TILES) -> None:
        self._tiles = tiles

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        if device.architecture not in HOPPER:
            return f"needs Hopper; this is {device.architecture}"
        if work.dtype not in DTYPES:
            return f"{work.dtype}"
        if not work.epilogue_free:
            return "a result that is not the sum itself"
        reason = why_not_plane(work)
        if reason is not None:
            return reason
        plane = plane_of(work)
        if plane is None:
            return f"two strides, {work.stride[1]} and {work.stride[2]}"
        if work.direction == "fwd" and plane.stride > 1:
            return f"forward with stride {plane.stride}"
        tile = self._tile(plane)
        if tile is None:
            return f"no instance for kernel {work.kernel} and stride {work.stride}"
        stage = _stage(work, plane, tile, device)
        if stage.slots(device) < 2:
            return "no two stages in shared memory"
        if _stages(work, plane, stage) > MOST_INDEX:
            return "more than 2^31 stages"
        for _, tensor_map in _maps(work, plane, stage).values():
            reason = tensor_map.why_not()
            if reason is not None:
                return reason
        return None

    def launches(self, work: ConvWork, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        plane = plane_of(work)
        tile = None if plane is None else self._tile(plane)
        if plane is None or tile is None:
            raise ValueError("no instance")
        return Fragment(f"{self.name}_{work.direction}", (self.launch(work, device, plane, tile),))

    def launch(
        self, work: ConvWork, device: CudaDevice, plane: Plane, tile: HopperDepthwiseTile
    ) -> Launch:
        """With this tile."""
        stage = _stage(work, plane, tile, device)
        count, slots = _stages(work, plane, stage), stage.slots(device)
        tiles = ceil_div(work.groups, tile.channels)
        blocks, last_blocks = blocks_of_tiles(work.groups, tile.channels, count, device, tile.start)
        source, result = gather_sides(work)

        args = HopperDepthwiseArgs()
        args.x_stride[:], args.y_stride[:] = plane.strides(source), plane.strides(result)
        args.w_stride[:] = plane.weight_strides(work.w)
        args.batch, args.channels = plane.batch, work.groups
        args.x_size[:], args.y_size[:] = _sizes(work, plane)
        args.pad[:], args.lowest[:] = _pads(work, plane, tile), _lowest(work, plane, tile)
        args.flipped = work.direction == "fwd"
        args.pairs, args.across = stage.pairs, stage.across
        args.down = ceil_div(ceil_div(args.y_size[0], tile.stride), stage.rows)
        args.stages, args.stage_rows, args.x_columns = count, stage.rows, stage.x_columns
        args.slots, args.x_bytes = slots, stage.row_bytes(stage.rows)
        args.slot_bytes, args.result_bytes = stage.slot_bytes, stage.result_bytes
        args.blocks, args.last_blocks = blocks, last_blocks
        return Launch(
            _instance(work.dtype, tile),
            ((tiles - 1) * blocks + last_blocks, 1, 1),
            (32 * (tile.warps + 4), 1, 1),
            pack_maps(args, _maps(work, plane, stage), x=source, w=work.w, y=result),
            ALIGN_BYTES + slots * stage.slot_bytes + RESULTS * stage.result_bytes,
        )

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        return [_instance(dtype, tile) for tile in self._tiles for dtype in DTYPES]

    def _tile(self, plane: Plane) -> HopperDepthwiseTile | None:
        if plane.axes[1] is None:
            return None
        for tile in self._tiles:
            if (tile.kernel, tile.kernel, tile.stride) == (*plane.kernel, plane.stride):
                return tile
        return None


def _sizes(work: ConvWork, plane: Plane) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of the source and of the result."""
    if work.direction == "fwd":
        return plane.input, plane.output
    return plane.output, plane.input


def _pads(work: ConvWork, plane: Plane, tile: HopperDepthwiseTile) -> tuple[int, int]:
    """As the gradient of the input has them, of which a forward is one."""
    down, right = plane.pad
    if work.direction == "fwd":
        return tile.kernel - 1 - down, tile.kernel - 1 - right
    return down, right


def _lowest(work: ConvWork, plane: Plane, tile: HopperDepthwiseTile) -> tuple[int, int]:
    """The first row, and column, of x that y's first one meets."""
    down, right = (
        ceil_div(pad - (tile.kernel - 1), tile.stride) for pad in _pads(work, plane, tile)
    )
    return down, right


def _stage(work: ConvWork, plane: Plane, tile: HopperDepthwiseTile, device: CudaDevice) -> Stage:
    """The longest that leaves LEAST_SLOTS of them, an image's rows in equal ones."""
    rows, columns = (ceil_div(extent, tile.stride) for extent in _sizes(work, plane)[1])
    pairs = ceil_div(columns, PAIR_COLUMNS)
    across = ceil_div(pairs, tile.most_pairs)
    pairs = ceil_div(pairs, across)
    if tile.stage_rows:
        return Stage(tile, pairs, across, min(rows, tile.stage_rows))
    best = Stage(tile, pairs, across, 1)
    for down in range(rows, 0, -1):
        stage = Stage(tile, pairs, across, ceil_div(rows, down))
        if stage.rows * tile.stride > MOST_ROWS or stage.slots(device) < LEAST_SLOTS:
            break
        best = stage
    return best


def _stages(work: ConvWork, plane: Plane, stage: Stage) -> int:
    rows = ceil_div(_sizes(work, plane)[1][0], stage.tile.stride)
    return plane.batch * stage.across * ceil_div(rows, stage.rows)


def _maps(work: ConvWork, plane: Plane, stage: Stage) -> dict[str, tuple[Operand, TileMap]]:
    tile = stage.tile
    source, result = gather_sides(work)
    x_size, y_size = _sizes(work, plane)

    def of(
        operand: Operand, size: tuple[int, int], columns: int, rows: int
    ) -> tuple[Operand, TileMap]:
        item = operand.dtype.itemsize
        image, row, pixel = plane.strides(operand)
        return operand, TileMap(
            operand.dtype,
            (work.groups, size[1], size[0], plane.batch),
            (pixel * item, row * item, image * item),
            swizzle=tile.row_bytes,
            box=(tile.channels, columns, rows, 1),
            l2_bytes=tile.fetch,
        )

    columns = stage.pairs * PAIR_COLUMNS * tile.stride
    return {
        "x_map": of(source, x_size, stage.x_columns, stage.rows),
        "head_map": of(source, x_size, stage.x_columns, tile.met - 1),
        "y_map": of(result, y_size, columns, stage.rows * tile.stride),
    }


def _instance(dtype: DType, tile: HopperDepthwiseTile) -> Instance:
    defines = {
        "ELEMENT": CUDA_TYPES[dtype],
        "KERNEL": tile.kernel,
        "STRIDE": tile.stride,
        "PAIRS": tile.pairs,
        "WARPS": tile.warps,
        "CHANNELS": tile.channels,
    }
    return Instance.of("hopper_depthwise.cu", defines, HOPPER)
