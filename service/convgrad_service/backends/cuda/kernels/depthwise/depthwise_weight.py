"""Channels-last depthwise wgrad by FMA (depthwise_weight.cu)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_tiles import (
    DTYPES,
    LinearCost,
    chunk_rows,
    resident_blocks,
    strides_of,
    why_not_counted,
)
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_weight_args import (
    buffers_of,
    elements_of,
    fill_volume,
    fitting_blocks,
    is_clustered,
    partials_of,
    received_bytes,
    why_not_volume,
)
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Solver
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div, macros_of
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["DepthwiseWeight"]

COST = LinearCost(5.64, 0.28, 0.055, 0.765)
# Many warps per block leave few partial sums to reduce.
WARPS = 8
# Rows in a warp's shared memory, by bytes of an element.
STAGES = {2: 4, 4: 3}
# The limit of gridDim.y and gridDim.z.
MOST_ALONG = 2**16 - 1


CHANNELS = 32
"""Channels of a warp: two sectors of memory per pixel for 16-bit types."""
PIECES = {2: (16, 4), 4: (16,)}
"""Bytes per cp.async by those of an element, which must divide pixels and channels; larger ones are
faster."""


@dataclass(frozen=True, slots=True)
class WeightTile:
    """Extent and stride of the taps of a lane, its channels and columns, and blocks per SM."""

    kernel: int
    stride: int
    vector: int
    columns: int
    blocks: int
    rolled: bool = False
    """Whether the code of a row is there once, not once for each row of taps."""

    @property
    def strips(self) -> int:
        """Adjacent strips of a warp."""
        return 32 * self.vector // CHANNELS


KERNELS, STRIDES = (3, 5, 7), (1, 2)
# By bytes of an element. Of two, the second is for fewer elements.
TILES: dict[int, tuple[WeightTile, ...]] = {
    2: (
        WeightTile(3, 1, 1, 7, 2),
        WeightTile(3, 2, 1, 7, 2),
        WeightTile(5, 1, 1, 7, 2),
        WeightTile(5, 2, 1, 7, 1),
        WeightTile(7, 1, 1, 7, 1, rolled=True),
        WeightTile(7, 2, 1, 4, 1),
    ),
    4: (
        WeightTile(3, 1, 2, 4, 1),
        WeightTile(3, 1, 2, 4, 2),
        WeightTile(3, 2, 1, 7, 1),
        WeightTile(5, 1, 2, 7, 1),
        WeightTile(5, 2, 2, 2, 2),
        WeightTile(7, 1, 1, 7, 1),
        WeightTile(7, 2, 1, 2, 2),
    ),
}
FEW_ELEMENTS = 27 * 10**6
# Elements of both tensors above which tensor cores are faster in 16-bit types with stride 1. On an
# H200, FMAs took 0.86 to 1.12 of their time with 24 to 58 million elements and 3x3 kernels, 0.76 to
# 1.0 below 15 million and 0.98 to 1.06 at 24 million with 5x5 ones, and with 7x7 ones 0.77 at 4.8
# million and 1.19 at 9.6 million; with stride 2, 0.3 to 0.9.
TENSOR_CORES_FROM = {3: 45 * 10**6, 5: 20 * 10**6, 7: 5 * 10**6}


DepthwiseWeightArgs = structure("depthwise/depthwise_weight.cu", "DepthwiseWeightArgs")


class DepthwiseWeight(Solver[ConvWork, WeightTile]):
    """bwd_weight with one channel per group, channels last, of any kernel, in two or three
    dimensions."""

    name = "depthwise_weight"

    def __init__(self, always: bool = False) -> None:
        """Create the family; with ``always``, it also takes work at which others are faster."""
        self._always = always

    def solve(self, work: ConvWork, device: CudaDevice) -> WeightTile | str:
        reason = why_not_volume(work)
        if reason is not None:
            return reason
        if work.out_channels > 1:
            return f"{work.out_channels} channels per group"
        piece = _piece(work)
        if piece == 0:
            return f"{work.groups} channels are not whole chunks"
        if work.stride[1] != work.stride[2] or work.stride[2] not in STRIDES:
            return f"strides of {work.stride[1]} and {work.stride[2]}"
        if work.dilation[2] * work.dilation[1] > 1 and work.kernel[1] * work.kernel[2] > 1:
            return "dilated"
        tile = _tile(work)
        in_chunks = work.dtype.itemsize == 2 and piece == max(PIECES[2])
        if in_chunks and work.stride[2] == work.kernel[0] == 1:
            elements, kernel = elements_of(work), work.kernel[2]
            least = TENSOR_CORES_FROM.get(kernel, 0) if work.kernel[1] == kernel else 0
            if elements >= least and not self._always:
                return f"tensor cores are faster on {elements} elements"
        columns = ceil_div(work.groups, CHANNELS) * _parts(work, tile)[2]
        if columns > MOST_ALONG:
            return f"{columns} tiles are more than a grid can have"
        reason = why_not_counted(columns)
        return reason or device.why_not_shared(_shared_bytes(work.dtype, tile)) or tile

    def fragment(self, work: ConvWork, device: CudaDevice, tile: WeightTile) -> Fragment:
        shared_bytes, tiles = _shared_bytes(work.dtype, tile), ceil_div(work.groups, CHANNELS)
        *parts, all_parts = _parts(work, tile)
        columns = tiles * all_parts
        on_device = resident_blocks(device, shared_bytes, tile.blocks)
        resident = max(1, on_device // columns)
        planes = work.batch * work.output[0]
        groups = ceil_div(work.output[2], tile.strips * tile.columns)
        reach = ceil_div(tile.kernel, tile.stride) - 1
        rows = chunk_rows(work.output[1], reach, planes * groups, resident * WARPS)
        chunks = ceil_div(work.output[1], rows)
        # As many blocks as are resident; items per warp differ by at most one.
        items = planes * groups * chunks
        blocks = ceil_div(items, ceil_div(items, resident * WARPS) * WARPS)
        blocks = fitting_blocks(device, blocks, columns, on_device)

        args = DepthwiseWeightArgs()
        fill_volume(args, work, CHANNELS // tile.vector)
        args.planes, args.groups, args.chunks, args.rows = planes, groups, chunks, rows
        args.kernel[:], args.parts[:] = work.kernel[1:], parts
        clustered = is_clustered(device, blocks)
        sums = blocks * columns * tile.kernel**2 * CHANNELS
        partials = partials_of(work, 1 if clustered else blocks, sums)
        launch = Launch(
            _instance(work.dtype, tile, _piece(work)),
            (blocks, tiles, all_parts),
            (WARPS * 32, 1, 1),
            pack(args, **buffers_of(work, partials)),
            shared_bytes,
            cluster=blocks if clustered else 1,
        )
        order = f"{groups} groups, {rows} rows, {blocks} blocks"
        reads, taps = all_parts, all_parts * tile.kernel**2
        expected = COST.expected_s(work, device, reads, taps)
        return Fragment(self.name, (launch,), partials, expected_s=expected, order=order)

    def instances(self) -> Iterable[Instance]:
        return [
            _instance(dtype, tile, piece)
            for dtype in DTYPES
            for tile in TILES[dtype.itemsize]
            for piece in PIECES[dtype.itemsize]
        ]


def _tile(work: ConvWork) -> WeightTile:
    """Return the instance for a work."""
    kernel = next((one for one in KERNELS if one >= max(work.kernel[1:])), KERNELS[-1])
    small = work.dtype.itemsize == 4 and elements_of(work) < FEW_ELEMENTS
    tiles = [
        one
        for one in TILES[work.dtype.itemsize]
        if (one.kernel, one.stride) == (kernel, work.stride[2])
    ]
    return tiles[-1 if small else 0]


def _parts(work: ConvWork, tile: WeightTile) -> tuple[int, int, int]:
    """Return the parts of a plane of the kernel down and across, and those of all planes."""
    down, across = (ceil_div(taps, tile.kernel) for taps in work.kernel[1:])
    return down, across, work.kernel[0] * down * across


def _alignments(work: ConvWork) -> list[int]:
    """Return the numbers of elements that the bytes of a copy divide."""
    numbers = [n for operand in (work.x, work.y) for n in strides_of(operand)]
    return numbers if work.x.padded and work.y.padded else [*numbers, work.groups]


def _piece(work: ConvWork) -> int:
    """Return the largest of ``PIECES`` that divides the channels of every pixel, or 0."""
    together = gcd(*_alignments(work)) * work.dtype.itemsize
    return next((one for one in PIECES[work.dtype.itemsize] if together % one == 0), 0)


def _shared_bytes(dtype: DType, tile: WeightTile) -> int:
    """Return the bytes of the warps' rows, reused for the accumulators of strips."""
    columns, taps = tile.strips * tile.columns, tile.kernel**2
    read = (columns - 1) * tile.stride + tile.kernel + columns
    rows = STAGES[dtype.itemsize] * read * dtype.itemsize
    used = CHANNELS * WARPS * max(rows, taps * tile.strips * 4)
    return used + received_bytes(taps * CHANNELS)


def _instance(dtype: DType, tile: WeightTile, piece: int) -> Instance:
    return Instance.of(
        "depthwise/depthwise_weight.cu",
        ELEMENT=dtype,
        VECTOR=tile.vector,
        LANES=CHANNELS // tile.vector,
        **macros_of(tile, "kernel", "stride", "columns", "rolled"),
        WARPS=WARPS,
        STAGES=STAGES[dtype.itemsize],
        BLOCKS=tile.blocks,
        PIECE=piece,
    )
