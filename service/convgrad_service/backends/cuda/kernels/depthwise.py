"""Depthwise convolutions, forward and backward in the input, channels last: ``depthwise.cu``."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.depthwise_tiles import (
    BLOCK_CHANNELS,
    Plane,
    Tiling,
    chunk_rows,
    fill_operands,
    plane_of,
    resident_blocks,
    why_not_plane,
)
from convgrad_service.backends.cuda.kernels.elements import ACTIVATIONS, CUDA_TYPES, MAX_BLOCKS
from convgrad_service.backends.cuda.kernels.gather_args import gather_sides
from convgrad_service.plans.cuda_device import (
    ARCHITECTURES,
    CudaDevice,
    architectures_before,
    architectures_since,
)
from convgrad_service.plans.cuda_program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda_works import ConvWork

__all__ = ["TILES", "Depthwise", "Tile"]

DTYPES = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32)
# Of 16-bit types, beside one-dimensional kernels: where tensor cores are not faster, or have none.
IN_16_BITS = ((3, 3, 1), (3, 3, 2), (7, 7, 2))
# Their registers do not suffice for more than the sums.
TOO_LARGE_FOR_EPILOGUES = ((13, 13, 1),)


WARPS = 4
# Rows that a warp keeps in shared memory, by the bytes of an element.
STAGES = {2: 4, 4: 4}
# Of lines, whose rows are short.
LINE_STAGES = {2: 8, 4: 4}


@dataclass(frozen=True, slots=True)
class Tile:
    """A lane's channels and columns (backward, times the stride), the blocks that a
    multiprocessor is to hold, the most rows of a chunk, and what it is compiled for."""

    vector: int
    columns: int
    blocks: int
    most_rows: int = 2**20
    architectures: tuple[str, ...] = ARCHITECTURES


# Before this capability the compiler finds fewer registers.
NARROW_BEFORE = (8, 9)
# By kernel rows, kernel columns and stride.
TILES = {
    (3, 3, 1): Tile(2, 7, 4),
    # Chunks longer than 8 rows were up to a quarter slower.
    (3, 3, 2): Tile(2, 4, 4, 8),
    (5, 5, 1): Tile(2, 7, 3),
    (5, 5, 2): Tile(2, 2, 4),
    (7, 7, 1): Tile(1, 7, 4),
    (7, 7, 2): Tile(2, 2, 3),
    (13, 13, 1): Tile(1, 3, 2, architectures=architectures_since(NARROW_BEFORE)),
    (3, 1, 1): Tile(2, 1, 5),
    (4, 1, 1): Tile(2, 1, 5),
    (5, 1, 1): Tile(2, 1, 5),
    (7, 1, 1): Tile(2, 1, 5),
    (9, 1, 1): Tile(2, 1, 5),
    (15, 1, 1): Tile(2, 1, 4),
    (31, 1, 1): Tile(2, 1, 3),
}


# Beside them, for rows that strips of those columns would leave mostly empty.
NARROWER = {(3, 3, 1): (Tile(2, 5, 4), Tile(2, 4, 4))}
# What a strip takes beside its columns, in columns.
STRIP_COLUMNS = 2.5
NARROW_TILES = {(13, 13, 1): Tile(1, 1, 2, architectures=architectures_before(NARROW_BEFORE))}


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
        if plane is None or not _has_instance(
            work.dtype, (*plane.kernel, plane.stride), not work.epilogue_free
        ):
            return f"no instance for kernel {work.kernel} and stride {work.stride}"
        launch = self.launch(work, device, plane, _tile(work, plane, device))
        reason = device.why_not_shared(launch.shared_bytes)
        if reason is not None:
            return reason
        if launch.grid[0] > MAX_BLOCKS:
            return f"{launch.grid[0]} blocks are more than one grid holds"
        return None

    def launches(self, work: ConvWork, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        plane = plane_of(work)
        if plane is None:
            raise ValueError("not a plane")
        return Fragment(
            f"{self.name}_{work.direction}",
            (self.launch(work, device, plane, _tile(work, plane, device)),),
        )

    def launch(
        self, work: ConvWork, device: CudaDevice, plane: Plane, tile: Tile, chunk: int | None = None
    ) -> Launch:
        """With this tile, and chunks of so many rows (backward, times the stride)."""
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
        kernel = (*plane.kernel, plane.stride)
        shared_bytes = _shared_bytes(work.dtype, kernel, tile, backward)
        channel_tiles = ceil_div(work.groups, BLOCK_CHANNELS)
        groups = ceil_div(columns, _strips(tile) * tile.columns)
        per_chunk = plane.batch * groups
        if chunk is None:
            blocks = _blocks(tile, not work.epilogue_free)
            resident = resident_blocks(device, shared_bytes, blocks) * WARPS
            reach = ceil_div(plane.kernel[0], plane.stride) - 1
            chunk = chunk_rows(rows, reach, per_chunk * channel_tiles, resident)
            chunk = min(chunk, tile.most_rows)
        chunks = ceil_div(rows, chunk)

        args = DepthwiseArgs()
        fill_operands(args, work, plane, source, result)
        args.channels = work.groups
        args.x_size[:], args.y_size[:], args.pad[:] = x_size, y_size, plane.pad
        args.activation = ACTIVATIONS[work.activation]
        args.tiling = Tiling(groups, chunks, chunk, channel_tiles)
        return Launch(
            _instance(work.dtype, kernel, tile, backward, not work.epilogue_free),
            (ceil_div(per_chunk * chunks, WARPS) * channel_tiles, 1, 1),
            (WARPS * 32, 1, 1),
            pack(args, x=source, w=work.w, y=result, accumulate=work.accumulate, bias=work.bias),
            shared_bytes,
        )

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        return [
            _instance(dtype, kernel, tile, backward, epilogue)
            for kernel, tile in _tiles()
            for dtype in DTYPES
            for backward in (False, True)
            for epilogue in (False, True)
            if _has_instance(dtype, kernel, epilogue)
        ]


def _tiles() -> Iterator[tuple[tuple[int, int, int], Tile]]:
    """By kernel."""
    yield from TILES.items()
    yield from NARROW_TILES.items()
    for kernel, tiles in NARROWER.items():
        for tile in tiles:
            yield kernel, tile


def _has_instance(dtype: DType, kernel: tuple[int, int, int], epilogue: bool) -> bool:
    if kernel not in TILES or (epilogue and kernel in TOO_LARGE_FOR_EPILOGUES):
        return False
    return dtype.itemsize == 4 or kernel[1] == 1 or kernel in IN_16_BITS


def _blocks(tile: Tile, epilogue: bool) -> int:
    """An epilogue takes registers."""
    return max(1, tile.blocks - epilogue)


def _tile(work: ConvWork, plane: Plane, device: CudaDevice) -> Tile:
    """All that a kernel has give the same bits."""
    width = (plane.input if work.direction == "bwd_data" else plane.output)[1]
    kernel = (*plane.kernel, plane.stride)
    narrow = NARROW_TILES if device.capability < NARROW_BEFORE else {}
    return narrow.get(kernel) or min(
        (TILES[kernel], *NARROWER.get(kernel, ())),
        key=lambda tile: (
            ceil_div(width, _strips(tile) * tile.columns) * (tile.columns + STRIP_COLUMNS)
        ),
    )


def _strips(tile: Tile) -> int:
    """Side by side in a warp."""
    return 32 * tile.vector // BLOCK_CHANNELS


def _stages(dtype: DType, kernel: tuple[int, int, int]) -> int:
    return (LINE_STAGES if kernel[1] == 1 else STAGES)[dtype.itemsize]


def _shared_bytes(dtype: DType, kernel: tuple[int, int, int], tile: Tile, backward: bool) -> int:
    height, width, stride = kernel
    columns = _strips(tile) * tile.columns
    read = columns + ceil_div(width, stride) - 1 if backward else (columns - 1) * stride + width
    rows = WARPS * _stages(dtype, kernel) * read
    return BLOCK_CHANNELS * (height * width * 4 + rows * dtype.itemsize)


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
        "WARPS": WARPS,
        "STAGES": _stages(dtype, kernel),
        "BLOCKS": _blocks(tile, epilogue),
        "BACKWARD": int(backward),
        "EPILOGUE": int(epilogue),
    }
    return Instance.of(
        "depthwise.cu",
        defines,
        tile.architectures,
    )
