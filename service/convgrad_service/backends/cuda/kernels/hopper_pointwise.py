"""A 1x1 convolution of stride 1 whose channels lie apart, forward or in its input, on Hopper."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.channels_last import CHUNK_BYTES
from convgrad_service.backends.cuda.kernels.elements import CUDA_TYPES
from convgrad_service.backends.cuda.kernels.gather_args import gather_sides
from convgrad_service.backends.cuda.kernels.planes import flat_planes
from convgrad_service.backends.cuda.kernels.tensor_maps import MapField, TileMap, pack_maps
from convgrad_service.plans.cuda_device import H200, HOPPER, CudaDevice
from convgrad_service.plans.cuda_program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda_works import ConvWork, Operand

__all__ = ["HopperPointwise"]

DTYPES = (DType.FLOAT16, DType.BFLOAT16)
# With fewer on either side most of a tile or of a step would be empty.
LEAST_CHANNELS = 48
BOX, ROW_BYTES, GROUPS, THREADS = 64, 128, 2, 384
BUFFERS = 2  # of a warpgroup's results
ALIGNMENT, BARRIER_BYTES, MOST_STAGES = 1024, 8, 8
MAX_TILES = 2**31 - 1
# What an H200 does a second: products, bytes from its L2 cache (see hopper_tiles.py).
FLOPS, L2_BYTES_S = 865e12, 12e12


class HopperPointwiseArgs(ctypes.Structure):
    """See ``hopper_pointwise.cu``."""

    _fields_ = (
        *((name, MapField) for name in ("x_map", "w_map", "y_map")),
        *((name, ctypes.c_int32) for name in ("channels", "channel_tiles", "pixel_tiles", "tiles")),
    )


@dataclass(frozen=True, slots=True)
class PointwiseTile:
    """Channels of the result x pixels."""

    m: int
    n: int

    @property
    def stage_bytes(self) -> int:
        return (self.m + self.n) * ROW_BYTES

    def stages(self, device: CudaDevice) -> int:
        room = device.shared_bytes_per_block - self.shared_bytes(0)
        return min(MOST_STAGES, room // (self.stage_bytes + 2 * BARRIER_BYTES))

    def shared_bytes(self, stages: int) -> int:
        ring = stages * (self.stage_bytes + 2 * BARRIER_BYTES)
        return ALIGNMENT + ring + GROUPS * BUFFERS * BOX * ROW_BYTES


# By the result's channels up to which each is taken: so few channel tiles that the source is read
# from memory once, and no more channels than there are.
TILES = {64: PointwiseTile(64, 256), 128: PointwiseTile(128, 256)}
LARGEST = PointwiseTile(256, 128)


class HopperPointwise:
    """fwd and bwd_data in 16 bits, of planes as they lie."""

    name = "hopper_pointwise"

    def __init__(self, least_channels: int = LEAST_CHANNELS) -> None:
        self._least_channels = least_channels

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        if device.architecture not in HOPPER:
            return f"{device.name} has no copy engine and products of warpgroups"
        if work.dtype not in DTYPES:
            return f"{work.dtype}: products read planes in 16 bits alone"
        if work.groups != 1:
            return f"{work.groups} groups"
        if not work.epilogue_free:
            return "an epilogue"
        if min(work.in_channels, work.out_channels) < self._least_channels:
            return f"{work.in_channels} to {work.out_channels} channels would leave most of a tile"
        flat = flat_planes(work)
        if flat is None:
            return "not one tap, or no planes of whole chunks of 16 bytes"
        if work.x.strides[2] == 1 or work.y.strides[2] == 1:
            return "the channels lie side by side"
        chunk = CHUNK_BYTES // work.dtype.itemsize
        if work.w.strides[2] != 1 or work.w.strides[1] % chunk:
            return "the weight's rows are no whole chunks of 16 bytes"
        tile = _tile(flat)
        if _tiles(flat, tile)[2] > MAX_TILES:
            return "its tiles are more than can be counted"
        maps = _maps(flat, tile)
        return next((reason for _, one in maps.values() if (reason := one.why_not())), None)

    def launches(self, work: ConvWork, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        work = flat_planes(work) or work
        tile = _tile(work)
        backward = work.direction == "bwd_data"
        args = HopperPointwiseArgs()
        args.channels = work.out_channels if backward else work.in_channels
        args.channel_tiles, args.pixel_tiles, args.tiles = _tiles(work, tile)
        stages = tile.stages(device)
        blocks = min(device.multiprocessors, args.tiles)
        launch = Launch(
            _instance(work.dtype, tile, stages, across=backward),
            (blocks, 1, 1),
            (THREADS, 1, 1),
            pack_maps(args, _maps(work, tile)),
            tile.shared_bytes(stages),
        )
        steps = ceil_div(args.tiles, blocks) * ceil_div(args.channels, BOX)
        step_s = max(tile.m * tile.n * ROW_BYTES / FLOPS, tile.stage_bytes / L2_BYTES_S)
        return Fragment(
            f"{self.name}_{work.direction}_{tile.m}x{tile.n}",
            (launch,),
            expected_s=steps * step_s * device.multiprocessors,
        )

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        return [
            _instance(dtype, tile, tile.stages(H200), across=across)
            for dtype in DTYPES
            for tile in (*TILES.values(), LARGEST)
            for across in (False, True)
        ]


def _tile(work: ConvWork) -> PointwiseTile:
    written = work.in_channels if work.direction == "bwd_data" else work.out_channels
    return next((tile for most, tile in TILES.items() if written <= most), LARGEST)


def _tiles(work: ConvWork, tile: PointwiseTile) -> tuple[int, int, int]:
    """Of channels, of an image's pixels, and all."""
    written = work.in_channels if work.direction == "bwd_data" else work.out_channels
    channels, pixels = ceil_div(written, tile.m), ceil_div(work.output[2], tile.n)
    return channels, pixels, channels * pixels * work.batch


def _maps(work: ConvWork, tile: PointwiseTile) -> dict[str, tuple[Operand | str, TileMap]]:
    source, result = gather_sides(work)
    read, written = work.in_channels, work.out_channels
    backward = work.direction == "bwd_data"
    if backward:
        read, written = written, read
    weight = TileMap(
        work.dtype,
        (work.in_channels, work.out_channels),
        (work.w.strides[1] * work.dtype.itemsize,),
        swizzle=ROW_BYTES,
        box=(BOX, BOX if backward else tile.m),
    )
    return {
        "x_map": (source, _planes(source, work, read)),
        "w_map": (work.w, weight),
        "y_map": (result, _planes(result, work, written)),
    }


def _planes(operand: Operand, work: ConvWork, channels: int) -> TileMap:
    image, _, channel, *_ = operand.strides
    itemsize = operand.dtype.itemsize
    return TileMap(
        operand.dtype,
        (work.output[2], channels, work.batch),
        (channel * itemsize, (image if work.batch > 1 else channel) * itemsize),
        swizzle=ROW_BYTES,
        box=(BOX, BOX, 1),
    )


def _instance(dtype: DType, tile: PointwiseTile, stages: int, *, across: bool) -> Instance:
    defines = {
        "ELEMENT": CUDA_TYPES[dtype],
        "ACROSS": int(across),
        "BM": tile.m,
        "BN": tile.n,
        "STAGES": stages,
    }
    return Instance.of("hopper_pointwise.cu", defines, HOPPER)
