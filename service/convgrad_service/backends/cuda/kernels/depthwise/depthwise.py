"""Channels-last depthwise fprop and dgrad by FMA (depthwise.cu)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.elements import ACTIVATIONS, CUDA_TYPES
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_tiles import (
    BLOCK_CHANNELS,
    CHUNK_BYTES,
    PIECES,
    Kernel,
    LinearCost,
    Plane,
    Tiling,
    chunk_rows,
    fill_operands,
    fill_planes,
    is_deep,
    kernel_of,
    piece_of,
    plane_and_kernel,
    resident_blocks,
    strips_of_warp,
    why_not_launched,
    why_not_plane,
)
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import (
    ARCHITECTURES,
    CudaDevice,
    architectures_before,
    architectures_since,
)
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["TILES", "Depthwise", "Tile"]

DTYPES = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32)
# Kernels taken in 16-bit types, besides those of one row: tensor cores are not faster, or have no
# instance. Tensor-core families require whole chunks of channels.
IN_16_BITS = ((3, 3, 1), (3, 3, 2), (5, 5, 2), (7, 7, 2))
# For kernels with several planes, in whole chunks.
DEEP = ((3, 3, 1), (3, 3, 2))
# Registers suffice for the sums only.
TOO_LARGE_FOR_EPILOGUES = ((13, 13, 1),)


# In copies of 16 bytes; in smaller ones; of several planes.
COST, SMALL_COST = LinearCost(4.6, 0.11, 0.09, 0.58), LinearCost(-2.0, 0.44, 0.225, 3.6)
DEEP_COST = LinearCost(20.0, 1.0, 0.2, 0.0)
WARPS = 4
# Rows in a warp's shared memory, by bytes of an element.
STAGES = {2: 4, 4: 4}
# The same for kernels of one row, whose rows of pixels are long.
LINE_STAGES = {2: 4, 4: 2}


@dataclass(frozen=True, slots=True)
class Tile:
    """A lane's channels and columns (in dgrad, times the stride), blocks per SM, the most rows of a
    chunk, and the architectures."""

    vector: int
    columns: int
    blocks: int
    most_rows: int = 2**20
    architectures: tuple[str, ...] = ARCHITECTURES


# Before this capability fewer registers are available.
NARROW_BEFORE = (8, 9)
# By kernel rows, kernel columns and stride.
TILES: dict[Kernel, Tile] = {
    (3, 3, 1): Tile(2, 7, 4),
    # Chunks longer than 8 rows were up to a quarter slower.
    (3, 3, 2): Tile(2, 4, 4, 8),
    (5, 5, 1): Tile(2, 7, 3),
    (5, 5, 2): Tile(2, 2, 4),
    (7, 7, 1): Tile(1, 7, 4),
    (7, 7, 2): Tile(2, 2, 3),
    (13, 13, 1): Tile(1, 3, 2, architectures=architectures_since(NARROW_BEFORE)),
    (1, 5, 1): Tile(2, 14, 4),
    (1, 15, 1): Tile(2, 14, 3),
    (1, 31, 1): Tile(2, 14, 3),
    (1, 5, 2): Tile(2, 7, 4),
    (1, 15, 2): Tile(2, 7, 3),
    (1, 31, 2): Tile(2, 7, 2),
}


# Narrower alternatives, for rows that would leave much of a strip empty.
NARROWER: dict[Kernel, tuple[Tile, ...]] = {(3, 3, 1): (Tile(2, 5, 4), Tile(2, 4, 4))}
# Fixed cost of a strip, in columns.
STRIP_COLUMNS = 2.5
NARROW_TILES = {(13, 13, 1): (Tile(1, 1, 2, architectures=architectures_before(NARROW_BEFORE)),)}


DepthwiseArgs = structure("depthwise/depthwise_args.cuh", "DepthwiseArgs")


@dataclass(frozen=True, slots=True)
class Variant:
    """An instance's bytes per cp.async, and whether it supports epilogues and several kernel
    planes."""

    piece: int = CHUNK_BYTES
    epilogue: bool = False
    deep: bool = False

    @classmethod
    def of(cls, work: ConvWork) -> Variant:
        """Return the variant of a work. With small copies or several planes, all support
        epilogues."""
        piece, deep = piece_of(work), is_deep(work)
        return cls(piece, deep or piece < CHUNK_BYTES or not work.epilogue_free, deep)


VARIANTS = (
    Variant(),
    Variant(epilogue=True),
    Variant(PIECES[1], epilogue=True),
    Variant(epilogue=True, deep=True),
)


class Depthwise:
    """fwd and bwd_data of the kernels in ``TILES`` with one channel per group, channels last."""

    name = "depthwise"

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        if work.dtype not in DTYPES:
            return f"{work.dtype}"
        variant = Variant.of(work)
        reason = why_not_plane(work, general=True, chunk_bytes=PIECES[-1], deep=variant.deep)
        if reason is not None:
            return reason
        if work.out_channels > 1:
            return f"{work.out_channels} channels a group"
        plane, kernel = plane_and_kernel(work, TILES)
        if plane is None or kernel is None or not _has_instance(work.dtype, kernel, variant):
            return f"no instance for kernel {work.kernel} and stride {work.stride}"
        launch = self.launch(work, device, plane, _tile(work, plane, kernel, device))
        return why_not_launched(launch, device)

    def launches(self, work: ConvWork, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        plane, kernel = plane_and_kernel(work, TILES)
        if plane is None or kernel is None:
            raise ValueError("not a plane")
        tile = _tile(work, plane, kernel, device)
        launch = self.launch(work, device, plane, tile)
        variant = Variant.of(work)
        cost = DEEP_COST if variant.deep else COST if variant.piece == CHUNK_BYTES else SMALL_COST
        return Fragment(
            f"{self.name}_{work.direction}", (launch,), expected_s=cost.expected_s(work, device)
        )

    def launch(
        self, work: ConvWork, device: CudaDevice, plane: Plane, tile: Tile, chunk: int | None = None
    ) -> Launch:
        """Return the launch with a tile and ``chunk`` rows (in dgrad, times the stride)."""
        backward = work.direction == "bwd_data"
        source, result = work.sides
        sizes = plane.output, plane.input
        x_size, y_size = sizes if backward else sizes[::-1]
        rows, columns = y_size
        kernel, variant = kernel_of(plane, TILES), Variant.of(work)
        if kernel is None:
            raise ValueError("no instance")
        if backward:
            # In units of the stride, from the last multiple of it that is at most the padding.
            strides = 1 if kernel[0] == 1 else plane.stride, plane.stride
            rows, columns = (
                ceil_div(extent + pad, stride) - pad // stride
                for extent, pad, stride in zip(y_size, plane.pad, strides, strict=True)
            )
        shared_bytes = _shared_bytes(work, kernel, tile)
        channel_tiles = ceil_div(work.groups, BLOCK_CHANNELS)
        groups = ceil_div(columns, strips_of_warp(tile.vector) * tile.columns)
        per_chunk = plane.batch * groups
        if chunk is None:
            resident = resident_blocks(device, shared_bytes, _blocks(tile, variant)) * WARPS
            reach = ceil_div(kernel[0], plane.stride) - 1
            chunk = chunk_rows(rows, reach, per_chunk * channel_tiles, resident)
            chunk = min(chunk, tile.most_rows)
        chunks = ceil_div(rows, chunk)

        args = DepthwiseArgs()
        fill_operands(args, work, plane, source, result)
        fill_planes(args.planes, work, source, result)
        args.channels = work.groups
        args.x_size[:], args.y_size[:], args.pad[:] = x_size, y_size, plane.pad
        args.columns, args.dilation = plane.kernel[1], plane.dilation[1]
        args.activation = ACTIVATIONS[work.activation]
        args.tiling = Tiling(groups, chunks, chunk, channel_tiles)
        return Launch(
            _instance(work.dtype, kernel, tile, backward, variant),
            (ceil_div(per_chunk * chunks, WARPS) * channel_tiles, 1, 1),
            (WARPS * 32, 1, 1),
            pack(args, x=source, w=work.w, y=result, accumulate=work.accumulate, bias=work.bias),
            shared_bytes,
        )

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        return [
            _instance(dtype, kernel, tile, backward, variant)
            for kernel in TILES
            for dtype in DTYPES
            for backward in (False, True)
            for variant in VARIANTS
            if _has_instance(dtype, kernel, variant)
            for tile in (*NARROW_TILES.get(kernel, ()), *_tiles_of(kernel, dtype, variant))
        ]


def _has_instance(dtype: DType, kernel: Kernel, variant: Variant) -> bool:
    if kernel not in TILES or (variant.epilogue and kernel in TOO_LARGE_FOR_EPILOGUES):
        return False
    if variant not in VARIANTS:
        return False
    if variant.deep:
        return kernel in DEEP
    if dtype.itemsize == 4 or variant.piece < CHUNK_BYTES:
        return True
    return kernel[0] == 1 or kernel in IN_16_BITS


def _tiles_of(kernel: Kernel, dtype: DType, variant: Variant) -> tuple[Tile, ...]:
    """Return the tiles, which give bitwise equal results. With small copies, a lane has one
    each."""
    tile = TILES[kernel]
    if variant.piece < CHUNK_BYTES:
        return (replace(tile, vector=1) if dtype.itemsize == variant.piece else tile,)
    return (tile,) if variant.deep else (tile, *NARROWER.get(kernel, ()))


def _blocks(tile: Tile, variant: Variant) -> int:
    """Return the blocks per SM; an epilogue takes registers."""
    return max(1, tile.blocks - variant.epilogue)


def _tile(work: ConvWork, plane: Plane, kernel: Kernel, device: CudaDevice) -> Tile:
    width = (plane.input if work.direction == "bwd_data" else plane.output)[1]
    tiles = _tiles_of(kernel, work.dtype, Variant.of(work))
    if device.capability < NARROW_BEFORE:
        tiles = NARROW_TILES.get(kernel, tiles)
    return min(
        tiles,
        key=lambda tile: (
            ceil_div(width, strips_of_warp(tile.vector) * tile.columns)
            * (tile.columns + STRIP_COLUMNS)
        ),
    )


def _stages(dtype: DType, kernel: Kernel) -> int:
    return (LINE_STAGES if kernel[0] == 1 else STAGES)[dtype.itemsize]


def _shared_bytes(work: ConvWork, kernel: Kernel, tile: Tile) -> int:
    height, width, stride = kernel
    columns = strips_of_warp(tile.vector) * tile.columns
    read = (columns - 1) * stride + width
    if work.direction == "bwd_data":
        read = columns + ceil_div(width, stride) - 1
    rows = WARPS * _stages(work.dtype, kernel) * read
    taps = height * width * (work.kernel[0] if is_deep(work) else 1)
    return BLOCK_CHANNELS * (taps * 4 + rows * work.dtype.itemsize)


def _instance(
    dtype: DType, kernel: Kernel, tile: Tile, backward: bool, variant: Variant
) -> Instance:
    defines = {
        "ELEMENT": CUDA_TYPES[dtype],
        "VECTOR": tile.vector,
        "LANES": BLOCK_CHANNELS // tile.vector,
        "KERNEL_H": kernel[0],
        "KERNEL_W": kernel[1],
        "STRIDE": kernel[2],
        "COLUMNS": tile.columns,
        "WARPS": WARPS,
        "STAGES": _stages(dtype, kernel),
        "BLOCKS": _blocks(tile, variant),
        "BACKWARD": int(backward),
        "EPILOGUE": int(variant.epilogue),
        "PIECE": variant.piece,
        "PLANES": int(variant.deep),
    }
    return Instance.of("depthwise/depthwise.cu", defines, tile.architectures)
