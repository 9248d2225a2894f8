"""Channels-first 1x1 convolutions of stride 1, and dgrad with non-overlapping windows, on Hopper
(hopper_pointwise.cu)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.core.elements import CUDA_TYPES
from convgrad_service.backends.cuda.kernels.core.tensor_maps import TiledMap, pack_maps
from convgrad_service.backends.cuda.kernels.layout.channels_last import CHUNK_BYTES
from convgrad_service.backends.cuda.kernels.layout.planes import (
    flat_planes,
    plane_map,
    plane_pixels,
)
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import H200, HOPPER, CudaDevice
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import ConvWork, Operand

__all__ = ["HopperPointwise"]

DTYPES = (DType.FLOAT16, DType.BFLOAT16)
# With fewer channels on either side, most of a tile or k-tile would be padding.
LEAST_CHANNELS = 48
BOX, ROW_BYTES, GROUPS, THREADS = 64, 128, 2, 384
BUFFERS = 2  # of the results of a warpgroup
# Taps along W that interleave in the result, and pixels of an accumulator fragment.
SPREAD_TAPS, FRAGMENT = 2, 8
ALIGNMENT, BARRIER_BYTES, MOST_STAGES = 1024, 8, 8
MAX_TILES = 2**31 - 1
# FLOP/s of an H200, and bytes/s from its L2 cache (see hopper_gather_tiles.py).
FLOPS, L2_BYTES_S = 865e12, 12e12


HopperPointwiseArgs = structure("conv/hopper_pointwise.cu", "HopperPointwiseArgs")


@dataclass(frozen=True, slots=True)
class PointwiseTile:
    """A tile shape: rows of the result x pixels."""

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


# By the most rows of the result for which each is used. Tall tiles read the source fewer times, but
# rows beyond the result's would be padding.
TILES = {64: PointwiseTile(64, 256), 128: PointwiseTile(128, 256)}
LARGEST = PointwiseTile(256, 128)


class HopperPointwise:
    """fwd and bwd_data in 16-bit types, directly on channels-first tensors."""

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
        if work.x.strides[2] == 1 or work.y.strides[2] == 1:
            return "the channels lie side by side"
        product = _product(work)
        if product is None:
            return "no product of planes of whole chunks of 16 bytes"
        if product.tiles[2] > MAX_TILES:
            return "its tiles are more than can be counted"
        return next(
            (reason for _, one in product.maps().values() if (reason := one.why_not())), None
        )

    def launches(self, work: ConvWork, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        product = cast(_Product, _product(work))
        tile, result = product.tile, work.result
        args = HopperPointwiseArgs()
        args.channels, args.rows = product.read, product.rows
        args.channel_tiles, args.pixel_tiles, args.tiles = product.tiles
        args.y_stride[:], args.taps[:], args.size[:] = result.strides, work.kernel, work.output
        stages = tile.stages(device)
        blocks = min(device.multiprocessors, args.tiles)
        launch = Launch(
            _instance(work.dtype, tile, stages, product.across, product.spread),
            (blocks, 1, 1),
            (THREADS, 1, 1),
            pack_maps(args, product.maps(), y=result),
            tile.shared_bytes(stages),
        )
        steps = ceil_div(args.tiles, blocks) * ceil_div(product.read, BOX)
        step_s = max(tile.m * tile.n * ROW_BYTES / FLOPS, tile.stage_bytes / L2_BYTES_S)
        spread = "_spread" if product.spread else ""
        return Fragment(
            f"{self.name}_{work.direction}_{tile.m}x{tile.n}{spread}",
            (launch,),
            expected_s=steps * step_s * device.multiprocessors,
        )

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        return [
            _instance(dtype, tile, tile.stages(H200), across, spread)
            for dtype in DTYPES
            for tile in (*TILES.values(), LARGEST)
            for across, spread in ((False, False), (True, False), (True, True))
        ]


@dataclass(frozen=True, slots=True)
class _Product:
    """The GEMM per image: ``rows`` (M) are result channels, or channels x taps with ``spread``."""

    batch: int
    source: Operand
    weight: Operand
    result: Operand
    read: int
    rows: int
    pixels: int
    across: bool
    spread: bool

    @property
    def tile(self) -> PointwiseTile:
        return next((tile for most, tile in TILES.items() if self.rows <= most), LARGEST)

    @property
    def tiles(self) -> tuple[int, int, int]:
        """Tiles along the rows, along an image's pixels, and in total."""
        rows, pixels = ceil_div(self.rows, self.tile.m), ceil_div(self.pixels, self.tile.n)
        return rows, pixels, rows * pixels * self.batch

    def maps(self) -> dict[str, tuple[Operand | str, TiledMap]]:
        weight = TiledMap(
            self.weight.dtype,
            (self.rows, self.read) if self.across else (self.read, self.rows),
            (self.weight.strides[1] * self.weight.dtype.itemsize,),
            swizzle=ROW_BYTES,
            box=(BOX, BOX if self.across else self.tile.m),
        )
        source = self.source, plane_map(self.source, self.batch, self.read, self.pixels, BOX)
        # The kernel ignores the result's map if results are spread.
        result = (
            source
            if self.spread
            else (self.result, plane_map(self.result, self.batch, self.rows, self.pixels, BOX))
        )
        return {"x_map": source, "w_map": (self.weight, weight), "y_map": result}


def _product(work: ConvWork) -> _Product | None:
    """Return the work as a GEMM per image, or None if it is not one."""
    source, result = work.sides
    backward = work.direction == "bwd_data"
    read, written = work.channels
    _, k, c, *kernel = work.w.strides
    inner = 1
    for extent, stride in zip(reversed(work.kernel), reversed(kernel), strict=True):
        if extent > 1 and stride != inner:
            return None
        inner *= extent
    if c != inner or k * work.dtype.itemsize % CHUNK_BYTES:
        return None
    flat = flat_planes(work)
    if flat is not None:
        source, result = flat.sides
        pixels = flat.output[2]
        return _Product(
            work.batch, source, work.w, result, read, written, pixels, backward, spread=False
        )
    found = plane_pixels(source, work.batch, work.output) if backward and _apart(work) else None
    if found is None:
        return None
    rows = written * work.taps
    return _Product(work.batch, source, work.w, result, read, rows, found, across=True, spread=True)


def _apart(work: ConvWork) -> bool:
    """Return whether windows tile the input exactly, with two taps along W, whole fragments of
    pixels per row, and rows aligned for vector stores."""
    whole = zip(work.input, work.output, work.kernel, strict=True)
    x = work.x.strides
    return (
        work.kernel == work.stride
        and work.kernel[2] == SPREAD_TAPS
        and not any(work.pad)
        and max(work.dilation) == 1
        and all(size == count * taps for size, count, taps in whole)
        and work.output[2] % FRAGMENT == 0
        and x[5] == 1
        and not any(stride % (2 * SPREAD_TAPS) for stride in (x[0], x[2], x[3], x[4]))
    )


def _instance(
    dtype: DType, tile: PointwiseTile, stages: int, across: bool, spread: bool
) -> Instance:
    defines = {
        "ELEMENT": CUDA_TYPES[dtype],
        "ACROSS": int(across),
        "SPREAD": int(spread),
        "BM": tile.m,
        "BN": tile.n,
        "STAGES": stages,
    }
    return Instance.of("conv/hopper_pointwise.cu", defines, HOPPER)
