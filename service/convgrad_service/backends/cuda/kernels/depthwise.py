"""Depthwise convolutions, forward and backward in the input, channels last: ``depthwise.cu``."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.depthwise_tiles import (
    BLOCK_CHANNELS,
    MAX_THREADS,
    Cut,
    Plane,
    Tiling,
    blocks_of,
    cut_plane,
    plane_of,
    why_not_plane,
)
from convgrad_service.backends.cuda.kernels.elements import ACTIVATIONS, CUDA_TYPES, MAX_BLOCKS
from convgrad_service.backends.cuda.kernels.gather_args import gather_sides
from convgrad_service.plans.cuda_device import CudaDevice
from convgrad_service.plans.cuda_program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda_works import ConvWork

__all__ = ["TILES", "Depthwise", "Tile"]

DTYPES = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32)


@dataclass(frozen=True, slots=True)
class Tile:
    """A thread's channels and columns (backward, times the stride), the rows that a block's tile
    may have (half of them in float32), and the blocks that a multiprocessor is to hold."""

    vector: int
    columns: int
    rows: int
    blocks: int


# By kernel rows, kernel columns and stride.
TILES = {
    (3, 3, 1): Tile(2, 7, 7, 4),
    (3, 3, 2): Tile(2, 4, 14, 4),
    (5, 5, 1): Tile(2, 4, 14, 4),
    (5, 5, 2): Tile(2, 2, 14, 4),
    (7, 7, 1): Tile(2, 4, 14, 4),
    (7, 7, 2): Tile(2, 2, 14, 3),
    (13, 13, 1): Tile(1, 4, 28, 3),
    (3, 1, 1): Tile(2, 1, 256, 5),
    (4, 1, 1): Tile(2, 1, 256, 5),
    (5, 1, 1): Tile(2, 1, 256, 5),
    (7, 1, 1): Tile(2, 1, 256, 5),
    (9, 1, 1): Tile(2, 1, 256, 5),
    (15, 1, 1): Tile(2, 1, 256, 4),
    (31, 1, 1): Tile(2, 1, 512, 3),
}


class DepthwiseArgs(ctypes.Structure):
    """See ``depthwise_args.cuh``."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("x", "w", "y", "accumulate", "bias")),
        *((f"{name}_stride", ctypes.c_int64 * 3) for name in ("x", "w", "y", "accumulate")),
        ("alpha", ctypes.c_double),
        ("beta", ctypes.c_double),
        ("batch", ctypes.c_int32),
        ("channels", ctypes.c_int32),
        *((name, ctypes.c_int32 * 2) for name in ("x_size", "y_size", "pad")),
        ("activation", ctypes.c_int32),
        ("tiling", Tiling),
    )


class Depthwise:
    """fwd and bwd_data of the kernels in ``TILES``, one channel a group, channels last."""

    name = "depthwise"

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        if work.dtype not in DTYPES:
            return f"{work.dtype}"
        reason = why_not_plane(work)
        if reason is not None:
            return reason
        plane = plane_of(work)
        if plane is None or (*plane.kernel, plane.stride) not in TILES:
            return f"no instance for kernel {work.kernel} and stride {work.stride}"
        launch = self.launch(work, device, plane, _tile(plane))
        if launch.shared_bytes > device.shared_bytes_per_block:
            return (
                f"a block needs {launch.shared_bytes} bytes of shared memory and there are "
                f"{device.shared_bytes_per_block}"
            )
        if launch.grid[0] > MAX_BLOCKS:
            return f"{launch.grid[0]} blocks are more than one grid holds"
        return None

    def launches(self, work: ConvWork, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        plane = plane_of(work)
        if plane is None:
            raise ValueError("not a plane")
        return Fragment(
            f"{self.name}_{work.direction}", (self.launch(work, device, plane, _tile(plane)),)
        )

    def launch(self, work: ConvWork, device: CudaDevice, plane: Plane, tile: Tile) -> Launch:
        """With this tile."""
        backward = work.direction == "bwd_data"
        source, result = gather_sides(work)
        sizes = plane.output, plane.input
        x_size, y_size = sizes if backward else sizes[::-1]
        rows, columns = y_size
        if backward:
            # From the last multiple of the stride up to the padding, in units of the stride.
            rows, columns = (
                ceil_div(extent + pad, plane.stride) - pad // plane.stride
                for extent, pad in zip(y_size, plane.pad, strict=True)
            )
        lanes = BLOCK_CHANNELS // tile.vector
        most_rows = max(1, tile.rows * 2 // work.dtype.itemsize)
        cut = cut_plane(rows, columns, tile.columns, MAX_THREADS // lanes, most_rows)

        args = DepthwiseArgs()
        args.x_stride[:], args.y_stride[:] = plane.strides(source), plane.strides(result)
        args.w_stride[:] = plane.weight_strides(work.w)
        if work.accumulate is not None:
            args.accumulate_stride[:] = plane.strides(work.accumulate)
        args.alpha, args.beta = work.alpha, work.beta
        args.batch, args.channels = plane.batch, work.groups
        args.x_size[:], args.y_size[:], args.pad[:] = x_size, y_size, plane.pad
        args.activation = ACTIVATIONS[work.activation]
        args.tiling = cut.tiling(work.groups)
        kernel = (*plane.kernel, plane.stride)
        shared_bytes = _shared_bytes(work.dtype, kernel, tile, cut, backward)
        columns = args.tiling.channel_tiles
        tiles = plane.batch * cut.tiles
        blocks = blocks_of(device, tiles, columns, shared_bytes, tile.blocks) * columns
        return Launch(
            _instance(work.dtype, kernel, tile, backward, not work.epilogue_free),
            (blocks, 1, 1),
            (cut.units * lanes, 1, 1),
            pack(args, x=source, w=work.w, y=result, accumulate=work.accumulate, bias=work.bias),
            shared_bytes,
        )

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        return [
            _instance(dtype, kernel, tile, backward, epilogue)
            for kernel, tile in TILES.items()
            for dtype in DTYPES
            for backward in (False, True)
            for epilogue in (False, True)
        ]


def _tile(plane: Plane) -> Tile:
    return TILES[(*plane.kernel, plane.stride)]


def _shared_bytes(
    dtype: DType, kernel: tuple[int, int, int], tile: Tile, cut: Cut, backward: bool
) -> int:
    height, width, stride = kernel
    rows, columns = cut.segments * cut.rows, cut.strips * tile.columns
    if backward:
        rows, columns = rows + ceil_div(height, stride) - 1, columns + ceil_div(width, stride) - 1
    else:
        rows, columns = (rows - 1) * stride + height, (columns - 1) * stride + width
    return BLOCK_CHANNELS * (height * width * 4 + 2 * rows * columns * dtype.itemsize)


def _instance(
    dtype: DType, kernel: tuple[int, int, int], tile: Tile, backward: bool, epilogue: bool
) -> Instance:
    defines = {
        "ELEMENT": CUDA_TYPES[dtype],
        "VECTOR": tile.vector,
        "LANES": BLOCK_CHANNELS // tile.vector,
        "KERNEL_H": kernel[0],
        "KERNEL_W": kernel[1],
        "STRIDE": kernel[2],
        "COLUMNS": tile.columns,
        "MAX_THREADS": MAX_THREADS,
        "BLOCKS": tile.blocks,
        "BACKWARD": int(backward),
        "EPILOGUE": int(epilogue),
    }
    return Instance(
        "depthwise.cu", "depthwise", tuple((name, str(value)) for name, value in defines.items())
    )
