"""Depthwise convolutions on tensor cores that take pixels as they lie: ``depthwise_pairs.cu``."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.depthwise_strips import (
    DTYPES,
    STRIP_COLUMNS,
    resident_blocks,
    why_not_strips,
)
from convgrad_service.backends.cuda.kernels.depthwise_tiles import Plane, plane_of, why_not_plane
from convgrad_service.backends.cuda.kernels.elements import CUDA_TYPES, MAX_BLOCKS
from convgrad_service.backends.cuda.kernels.fused_shapes import Divider
from convgrad_service.backends.cuda.kernels.gather_args import gather_sides
from convgrad_service.plans.cuda_device import CudaDevice
from convgrad_service.plans.cuda_program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda_works import ConvWork

__all__ = ["PAIR_TILES", "DepthwisePairs", "PairTile"]

# Of a grid along y and z.
MOST_ALONG = 2**16 - 1
GROUP_STRIPS = 8


@dataclass(frozen=True, slots=True)
class PairTile:
    """The most kernel rows, the stride, units of 4 columns of x that a product takes; a block's
    octets of channels and groups of 8 strips; pairs of channels of a warp; rows between barriers,
    how many times as many are in shared memory, and the blocks that a multiprocessor is to hold.

    ``start`` is what a block takes beside its rows, in rows.
    """

    kernel_rows: int
    stride: int
    units: int
    octets: int = 4
    groups: int = 1
    pairs: int = 4
    rows: int = 1
    stages: int = 4
    blocks: int = 3
    wide: bool = False
    start: int = 4

    @property
    def channels(self) -> int:
        """Of a block."""
        return self.octets * 8

    @property
    def strips(self) -> int:
        """Of a block."""
        return self.groups * GROUP_STRIPS

    @property
    def threads(self) -> int:
        return self.octets * self.groups * 128 // self.pairs


# By kernel rows, stride and units, for each the octets that a block may have.
PAIR_TILES = (
    PairTile(3, 1, 2, 4, blocks=4),
    PairTile(3, 1, 2, 6, blocks=2),
    PairTile(5, 1, 2, 4, blocks=3),
    PairTile(5, 1, 2, 6, blocks=2),
    PairTile(7, 1, 3, 4, pairs=2, blocks=2),
    PairTile(7, 1, 3, 6, pairs=2, blocks=1),
    PairTile(3, 2, 1, 4, blocks=4),
    PairTile(3, 2, 1, 6, blocks=2),
    PairTile(5, 2, 1, 4, blocks=3),
    PairTile(5, 2, 1, 6, blocks=2),
)


class DepthwisePairsArgs(ctypes.Structure):
    """See ``depthwise_pairs.cuh``."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("x", "w", "y")),
        *((f"{name}_stride", ctypes.c_uint32 * 3) for name in ("x", "y")),
        ("w_stride", ctypes.c_int32 * 3),
        ("batch", ctypes.c_int32),
        ("channels", ctypes.c_int32),
        *((name, ctypes.c_int32 * 2) for name in ("x_size", "y_size", "pad", "kernel", "dilation")),
        ("w_first", ctypes.c_int32),
        ("w_step", ctypes.c_int32 * 2),
        *(
            (name, ctypes.c_int32)
            for name in ("flipped", "left", "first_tap", "base", "rows", "tiles", "share")
        ),
        *((name, ctypes.c_int32) for name in ("strips", "read")),
        ("row_bytes", ctypes.c_int32),
        ("by_rows", Divider),
        ("by_strips", Divider),
        ("by_units", Divider),
        ("by_dilation", Divider),
    )


class DepthwisePairs:
    """bwd_data of 16-bit types, and fwd of stride 1, one channel a group, channels last."""

    name = "depthwise_pairs"

    def __init__(self, tiles: tuple[PairTile, ...] = PAIR_TILES) -> None:
        self._tiles = tiles

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        reason = why_not_plane(work, general=True)
        if reason is not None:
            return reason
        if work.out_channels > 1:
            return f"{work.out_channels} channels a group"
        if not work.epilogue_free:
            return "an epilogue"
        plane = plane_of(work)
        if plane is None:
            return f"two strides, {work.stride[1]} and {work.stride[2]}"
        reason = why_not_strips(plane, work)
        if reason is not None:
            return reason
        tile = self._tile(work, plane)
        if tile is None:
            return f"no instance for kernel {work.kernel} and stride {work.stride}"
        launch = self.launch(work, device, plane, tile)
        reason = device.why_not_shared(launch.shared_bytes)
        if reason is not None:
            return reason
        if max(launch.grid[1:]) > MOST_ALONG or launch.grid[0] > MAX_BLOCKS:
            return f"{launch.grid} blocks are more than one grid holds"
        return None

    def launches(self, work: ConvWork, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        plane = plane_of(work)
        tile = None if plane is None else self._tile(work, plane)
        if plane is None or tile is None:
            raise ValueError("no instance")
        return Fragment(f"{self.name}_{work.direction}", (self.launch(work, device, plane, tile),))

    def launch(
        self,
        work: ConvWork,
        device: CudaDevice,
        plane: Plane,
        tile: PairTile,
        share: int | None = None,
    ) -> Launch:
        """With this tile, and so many rows a block (times the stride)."""
        stride, (source, result) = plane.stride, gather_sides(work)
        flipped = work.direction == "fwd"
        x_size, y_size = (plane.input, plane.output)[:: 1 if flipped else -1]
        pad = plane.pad
        if flipped:
            pad = plane.reach[0] - 1 - pad[0], plane.reach[1] - 1 - pad[1]
        args = DepthwisePairsArgs()
        args.x_stride[:] = [stride // 8 for stride in plane.strides(source)]
        args.y_stride[:] = [stride // 8 for stride in plane.strides(result)]
        args.w_stride[:] = plane.weight_strides(work.w)
        args.batch, args.channels, args.flipped = plane.batch, work.groups, flipped
        args.x_size[:], args.y_size[:], args.pad[:] = x_size, y_size, pad
        args.kernel[:], args.dilation[:] = plane.reach, plane.dilation
        args.by_dilation = Divider.of(plane.dilation[1])
        _, *steps = args.w_stride
        if flipped:
            args.w_first = sum(s * (k - 1) for s, k in zip(steps, plane.kernel, strict=True))
        args.w_step[:] = [-step if flipped else step for step in steps]
        args.left, args.first_tap, reads = _columns(plane.reach[1], stride, pad[1])
        args.read = reads + 4 // stride
        args.base = pad[0] // stride
        args.rows = rows = (y_size[0] - 1 + pad[0]) // stride - args.base + 1
        args.by_rows = Divider.of(rows)
        args.strips = ceil_div(y_size[1], STRIP_COLUMNS)
        args.by_strips, args.by_units = Divider.of(args.strips), Divider.of(args.strips + 1)
        args.row_bytes = _row_bytes(tile, _most_images(args.strips, tile.strips, plane.batch))

        args.tiles = tiles = ceil_div(plane.batch * args.strips, tile.strips)
        channel_tiles = ceil_div(work.groups, tile.channels)
        results = 2 * stride * _place(tile, tile.strips * STRIP_COLUMNS, 64)
        shared_bytes = tile.rows * (tile.stages * args.row_bytes + results)
        if share is None:
            resident = max(1, resident_blocks(device, shared_bytes, tile.blocks) // channel_tiles)
            share = ceil_div(tiles * rows, resident)
        args.share = share
        return Launch(
            _instance(work.dtype, tile),
            (channel_tiles, ceil_div(tiles * rows, share), 1),
            (tile.threads, 1, 1),
            pack(args, x=source, w=work.w, y=result),
            shared_bytes,
        )

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        return [_instance(dtype, tile) for tile in self._tiles for dtype in DTYPES]

    def _tile(self, work: ConvWork, plane: Plane) -> PairTile | None:
        """The smallest that holds the kernel, of those the one that leaves the fewest channels
        empty."""
        if work.direction == "fwd" and plane.stride > 1:
            return None
        pad = plane.pad[1] if work.direction != "fwd" else plane.reach[1] - 1 - plane.pad[1]
        reads = _columns(plane.reach[1], plane.stride, pad)[2]
        holding = [
            tile
            for tile in self._tiles
            if tile.stride == plane.stride
            and plane.reach[0] <= tile.kernel_rows
            and reads <= tile.units * 4
        ]
        return min(
            holding,
            key=lambda tile: (
                tile.kernel_rows,
                tile.units,
                ceil_div(work.groups, tile.channels) * tile.channels,
                -tile.octets,
            ),
            default=None,
        )


def _columns(kernel: int, stride: int, pad: int) -> tuple[int, int, int]:
    """The first column of x that the first four of the result need, which of the kernel's columns
    takes it to the first of those, and how many they need."""
    left = -((kernel - 1 - pad) // stride)
    return left, pad - stride * left, (pad + 3) // stride - left + 1


def _most_images(strips: int, tile_strips: int, batch: int) -> int:
    """Images that a tile has strips of, at most."""
    return min(batch, (tile_strips + strips - 2) // strips + 1)


def _place(tile: PairTile, pixels: int, apart_bytes: int) -> int:
    pixel_bytes = (tile.octets | 1) * 16
    return pixels * pixel_bytes + pixels // 8 * apart_bytes


def _row_bytes(tile: PairTile, images: int) -> int:
    """Room for a tile's strips, and one more unit behind each image's, in whole rounds."""
    pixels = (tile.strips + images) * STRIP_COLUMNS // tile.stride
    each = tile.threads // tile.octets
    return _place(tile, ceil_div(pixels, each) * each, 64 if tile.stride == 1 else 0)


def _instance(dtype: DType, tile: PairTile) -> Instance:
    defines = {
        "ELEMENT": CUDA_TYPES[dtype],
        "KERNEL_H": tile.kernel_rows,
        "STRIDE": tile.stride,
        "UNITS": tile.units,
        "OCTETS": tile.octets,
        "GROUPS": tile.groups,
        "PAIRS": tile.pairs,
        "ROWS": tile.rows,
        "STAGES": tile.stages,
        "BLOCKS": tile.blocks,
        "WIDE": int(tile.wide),
    }
    return Instance.of("depthwise_pairs.cu", defines)
