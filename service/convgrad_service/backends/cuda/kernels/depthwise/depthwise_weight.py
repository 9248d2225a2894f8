"""Channels-last depthwise wgrad by FMA (depthwise_weight.cu)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.elements import CUDA_TYPES
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_tiles import (
    BLOCK_CHANNELS,
    CHUNK_BYTES,
    PIECES,
    Kernel,
    LinearCost,
    Plane,
    Tiling,
    chunk_rows,
    fill_planes,
    is_deep,
    piece_of,
    plane_and_kernel,
    resident_blocks,
    strips_of_warp,
    why_not_counted,
    why_not_plane,
)
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_weight_args import (
    buffers_of,
    elements_of,
    fill_weight,
    fitting_blocks,
    is_clustered,
    partials_of,
    received_bytes,
)
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["WEIGHT_TILES", "DepthwiseWeight", "WeightTile"]

# Result dtypes by input dtype.
RESULTS = {
    DType.FLOAT16: (DType.FLOAT16, DType.FLOAT32),
    DType.BFLOAT16: (DType.BFLOAT16, DType.FLOAT32),
    DType.FLOAT32: (DType.FLOAT32,),
}


COST = LinearCost(5.64, 0.28, 0.055, 0.765)
# Many warps per block leave few partial sums to reduce.
WARPS = 8
# Rows in a warp's shared memory, by bytes of an element.
STAGES = {2: 4, 4: 3}


@dataclass(frozen=True, slots=True)
class WeightTile:
    """A lane's kernel rows, channels and columns, and blocks per SM."""

    kernel_rows: int
    vector: int
    columns: int
    blocks: int


# Tiles in 16-bit types in whole chunks, besides kernels of one row.
TILES_IN_16_BITS: dict[Kernel, WeightTile] = {
    (3, 3, 1): WeightTile(3, 1, 7, 2),
    (3, 3, 2): WeightTile(3, 1, 7, 2),
    (5, 5, 1): WeightTile(5, 1, 7, 2),
    (5, 5, 2): WeightTile(5, 1, 7, 1),
    (7, 7, 1): WeightTile(7, 1, 7, 1),
    (7, 7, 2): WeightTile(7, 1, 4, 1),
}
# Elements of both tensors above which tensor cores are faster in 16-bit types. On an H200, FMAs
# took 0.81 and 1.13 of their time with 10 and 58 million elements and 3x3 kernels, 0.7 to 1.0 below
# 12 million and 5x5 ones, and with 7x7 ones 0.53 to 0.92 below 3.3 million and 0.78 to 1.53 above;
# with stride 2, always less.
TENSOR_CORES_FROM = {(3, 3, 1): 27 * 10**6, (5, 5, 1): 12 * 10**6, (7, 7, 1): 33 * 10**5}
FEW_ELEMENTS = 27 * 10**6
# Tiles in float32 with fewer elements.
SMALL_TILES: dict[Kernel, WeightTile] = {(3, 3, 1): WeightTile(3, 2, 4, 2)}
# By kernel rows, kernel columns and stride.
WEIGHT_TILES: dict[Kernel, WeightTile] = {
    (3, 3, 1): WeightTile(3, 2, 4, 1),
    (3, 3, 2): WeightTile(3, 1, 7, 1),
    (5, 5, 1): WeightTile(5, 2, 7, 1),
    (5, 5, 2): WeightTile(5, 2, 2, 2),
    (7, 7, 1): WeightTile(7, 1, 7, 1),
    (7, 7, 2): WeightTile(7, 1, 2, 2),
    (13, 13, 1): WeightTile(5, 1, 4, 1),
    (1, 5, 1): WeightTile(1, 2, 14, 2),
    (1, 15, 1): WeightTile(1, 1, 20, 2),
    (1, 31, 1): WeightTile(1, 1, 14, 2),
    (1, 5, 2): WeightTile(1, 2, 7, 2),
    (1, 15, 2): WeightTile(1, 1, 10, 2),
    (1, 31, 2): WeightTile(1, 1, 8, 2),
}
# For kernels with several planes, in whole chunks.
DEEP = ((3, 3, 1), (3, 3, 2))


DepthwiseWeightArgs = structure("depthwise/depthwise_args.cuh", "DepthwiseWeightArgs")


class DepthwiseWeight:
    """bwd_weight of the kernels in ``WEIGHT_TILES`` with one channel per group, channels last."""

    name = "depthwise_weight"

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        if work.dtype not in RESULTS:
            return f"{work.dtype}"
        deep, piece = is_deep(work), piece_of(work)
        reason = why_not_plane(work, general=True, chunk_bytes=PIECES[-1], deep=deep)
        if reason is not None:
            return reason
        if work.out_channels > 1:
            return f"{work.out_channels} channels a group"
        plane, kernel = plane_and_kernel(work, WEIGHT_TILES)
        if plane is None or kernel is None or not _has_instance(work.dtype, kernel, piece, deep):
            return f"no instance for kernel {work.kernel} and stride {work.stride}"
        elements = elements_of(work, plane)
        if (
            work.dtype.itemsize == 2
            and (piece, deep) == (CHUNK_BYTES, False)
            and elements >= TENSOR_CORES_FROM.get(kernel, elements + 1)
        ):
            return f"tensor cores are faster on {elements} elements"
        tile = _tile(work, plane, kernel)
        reason = why_not_counted(_columns(work, kernel, tile))
        if reason is not None:
            return reason
        return device.why_not_shared(_shared_bytes(work.dtype, kernel, tile))

    def launches(self, work: ConvWork, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        plane, kernel = plane_and_kernel(work, WEIGHT_TILES)
        if plane is None or kernel is None:
            raise ValueError("not a plane")
        return self.fragment(work, device, plane, kernel, _tile(work, plane, kernel))

    def fragment(
        self,
        work: ConvWork,
        device: CudaDevice,
        plane: Plane,
        kernel: Kernel,
        tile: WeightTile,
        chunk: int | None = None,
    ) -> Fragment:
        """Return the launch with a tile and ``chunk`` rows."""
        shared_bytes = _shared_bytes(work.dtype, kernel, tile)
        channel_tiles = ceil_div(work.groups, BLOCK_CHANNELS)
        columns = _columns(work, kernel, tile)
        held = _blocks(kernel, tile, piece_of(work))
        on_device = resident_blocks(device, shared_bytes, held)
        resident = max(1, on_device // columns)
        groups = ceil_div(plane.output[1], strips_of_warp(tile.vector) * tile.columns)
        if chunk is None:
            reach = ceil_div(kernel[0], plane.stride) - 1
            chunk = chunk_rows(plane.output[0], reach, plane.batch * groups, resident * WARPS)
        chunks = ceil_div(plane.output[0], chunk)
        # As many blocks as are resident; items per warp differ by at most one.
        items = plane.batch * groups * chunks
        blocks = ceil_div(items, ceil_div(items, resident * WARPS) * WARPS)
        blocks = fitting_blocks(device, blocks, columns, on_device)

        args = DepthwiseWeightArgs()
        fill_weight(args, work, plane)
        fill_planes(args.planes, work, work.x, work.y)
        args.kernel_rows = plane.kernel[0] * args.planes.kernel
        args.columns, args.dilation = plane.kernel[1], plane.dilation[1]
        args.tiling = Tiling(groups, chunks, chunk, channel_tiles)
        part = tile.kernel_rows * kernel[1] * BLOCK_CHANNELS
        clustered = is_clustered(device, blocks)
        partials = partials_of(work, 1 if clustered else blocks, blocks * columns * part)
        launch = Launch(
            _instance(work.dtype, work.result_dtype, kernel, tile, piece_of(work), is_deep(work)),
            (blocks, channel_tiles, columns // channel_tiles),
            (WARPS * 32, 1, 1),
            pack(args, **buffers_of(work, partials)),
            shared_bytes,
            cluster=blocks if clustered else 1,
        )
        return Fragment(self.name, (launch,), partials, expected_s=COST.expected_s(work, device))

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        return [
            _instance(dtype, result, kernel, tile, piece, deep)
            for kernel in WEIGHT_TILES
            for dtype, results in RESULTS.items()
            for result in results
            for deep in (False, True)
            for piece in PIECES
            if _has_instance(dtype, kernel, piece, deep)
            for tile in {_tile_of(dtype, kernel, small): None for small in (False, True)}
        ]


def _has_instance(dtype: DType, kernel: Kernel, piece: int, deep: bool) -> bool:
    if kernel not in WEIGHT_TILES or piece not in PIECES:
        return False
    if deep:
        return kernel in DEEP and piece == CHUNK_BYTES
    if dtype.itemsize == 4 or piece < CHUNK_BYTES:
        return True
    return kernel[0] == 1 or kernel in TILES_IN_16_BITS


def _tile_of(dtype: DType, kernel: Kernel, small: bool) -> WeightTile:
    if dtype.itemsize == 2 and kernel in TILES_IN_16_BITS:
        return TILES_IN_16_BITS[kernel]
    if dtype.itemsize == 4 and small and kernel in SMALL_TILES:
        return SMALL_TILES[kernel]
    return WEIGHT_TILES[kernel]


def _tile(work: ConvWork, plane: Plane, kernel: Kernel) -> WeightTile:
    small = elements_of(work, plane) < FEW_ELEMENTS
    return _tile_of(work.dtype, kernel, small)


def _columns(work: ConvWork, kernel: Kernel, tile: WeightTile) -> int:
    """Return the number of columns of blocks; blocks of a column reduce to the same results."""
    planes = work.kernel[0] if is_deep(work) else 1
    return ceil_div(work.groups, BLOCK_CHANNELS) * ceil_div(kernel[0], tile.kernel_rows) * planes


def _blocks(kernel: Kernel, tile: WeightTile, piece: int) -> int:
    """Return the blocks per SM; small copies of long rows take registers."""
    return 1 if piece < CHUNK_BYTES and kernel[1] > 15 else tile.blocks


def _shared_bytes(dtype: DType, kernel: Kernel, tile: WeightTile) -> int:
    """Return the bytes of the warps' rows, reused for the accumulators of strips."""
    strips, (_, width, stride) = strips_of_warp(tile.vector), kernel
    columns = strips * tile.columns
    read = (columns - 1) * stride + width + columns
    rows, taps = STAGES[dtype.itemsize] * read * dtype.itemsize, tile.kernel_rows * width
    used = BLOCK_CHANNELS * WARPS * max(rows, taps * strips * 4)
    return used + received_bytes(taps * BLOCK_CHANNELS)


def _instance(
    dtype: DType, result: DType, kernel: Kernel, tile: WeightTile, piece: int, deep: bool
) -> Instance:
    defines = {
        "ELEMENT": CUDA_TYPES[dtype],
        "RESULT": CUDA_TYPES[result],
        "VECTOR": tile.vector,
        "LANES": BLOCK_CHANNELS // tile.vector,
        "KERNEL_H": tile.kernel_rows,
        "KERNEL_W": kernel[1],
        "STRIDE": kernel[2],
        "COLUMNS": tile.columns,
        "WARPS": WARPS,
        "STAGES": STAGES[dtype.itemsize],
        "BLOCKS": _blocks(kernel, tile, piece),
        "PIECE": piece,
        "PLANES": int(deep),
    }
    return Instance.of("depthwise/depthwise_weight.cu", defines)
