"""Channels-last depthwise wgrad by FMA (depthwise_weight.cu)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import ceil, gcd

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_tiles import (
    BYTES_S,
    DTYPES,
    bytes_of,
    chunk_counts,
    resident_blocks,
    strides_of,
    why_not_counted,
)
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_weight_args import (
    CLUSTERED,
    MOST_CLUSTER,
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

__all__ = ["DepthwiseWeight", "expected_s"]

# Of the cost model, fitted on an H200 to 236 configurations of 22 layers in bfloat16 and TF32, and
# to 73 networks' layers: it errs by 6 %, and by 7 % on the half of the layers that it is not fitted
# to. Seconds of a launch, and of a step at least; the steps that an item's start takes;
# instructions of a step and of an element that it reads, besides one for each product; those that a
# scheduler of an SM issues, if it has enough warps; the part of the lesser of computation's and
# memory's time that is not hidden; seconds of a reduction over a cluster and over the grid.
LAUNCH_S, STEP_S, START_STEPS = 6.26e-6, {2: 0.201e-6, 4: 0.229e-6}, 1.9
INSTRUCTIONS, PER_READ, CLOCKS_S, ENOUGH_WARPS = 58.7, 1.05, 1.94e9, 2.55
APART, CLUSTER_S, GRID_S = 0.61, 0.14e-6, 1.93e-6
# Many warps per block leave few partial sums to reduce.
WARPS = 8
# Rows in a warp's shared memory, by bytes of an element.
STAGES = {2: 4, 4: 3}
SCHEDULERS = 4


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


@dataclass(frozen=True, slots=True)
class WeightShare:
    """A tile, the rows of y of an item, and the blocks that share the items of a tile of channels
    and a part of the kernel."""

    tile: WeightTile
    rows: int
    blocks: int


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


class DepthwiseWeight(Solver[ConvWork, WeightShare]):
    """bwd_weight with one channel per group, channels last, of any kernel, in two or three
    dimensions."""

    name = "depthwise_weight"

    def __init__(self, always: bool = False) -> None:
        """Create the family; with ``always``, it also takes work at which others are faster."""
        self._always = always

    def solve(self, work: ConvWork, device: CudaDevice) -> WeightShare | str:
        if (reason := why_not_volume(work)) is not None:
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
        if (reason := why_not_counted(columns)) is not None:
            return reason
        return min(shares_of(work, device, tile), key=lambda one: expected_s(work, device, one))

    def fragment(self, work: ConvWork, device: CudaDevice, share: WeightShare) -> Fragment:
        tile, rows, blocks = share.tile, share.rows, share.blocks
        shared_bytes, tiles = _shared_bytes(work.dtype, tile), ceil_div(work.groups, CHANNELS)
        *parts, all_parts = _parts(work, tile)
        columns, groups = tiles * all_parts, _groups(work, tile)
        args = DepthwiseWeightArgs()
        fill_volume(args, work, CHANNELS // tile.vector)
        args.planes, args.groups, args.rows = work.batch * work.output[0], groups, rows
        args.chunks = ceil_div(work.output[1], rows)
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
        expected = expected_s(work, device, share)
        return Fragment(self.name, (launch,), partials, expected_s=expected, order=order)

    def instances(self) -> Iterable[Instance]:
        return [
            _instance(dtype, tile, piece)
            for dtype in DTYPES
            for tile in TILES[dtype.itemsize]
            for piece in PIECES[dtype.itemsize]
        ]


def shares_of(work: ConvWork, device: CudaDevice, tile: WeightTile) -> Iterator[WeightShare]:
    """Yield the configurations of a tile: chunks of rows, and for each as many blocks as are
    resident."""
    columns = ceil_div(work.groups, CHANNELS) * _parts(work, tile)[2]
    on_device = _resident(work, device, tile)
    warps = max(1, on_device // columns) * WARPS
    for chunks in chunk_counts(work.output[1]):
        rows = ceil_div(work.output[1], chunks)
        # Items per warp differ by at most one.
        items = _items(work, tile, rows)
        blocks = ceil_div(items, ceil_div(items, warps) * WARPS)
        yield WeightShare(tile, rows, fitting_blocks(device, blocks, columns, on_device))


def expected_s(work: ConvWork, device: CudaDevice, share: WeightShare) -> float:
    """Return the predicted time of a configuration."""
    tile, blocks = share.tile, share.blocks
    parts = _parts(work, tile)[2]
    columns, items = ceil_div(work.groups, CHANNELS) * parts, _items(work, tile, share.rows)
    of_x, of_y = (tile.columns - 1) * tile.stride + tile.kernel, tile.columns / tile.stride
    products = tile.kernel**2 * of_y * tile.vector
    instructions = INSTRUCTIONS + (of_x + of_y) * (PER_READ + tile.vector) + products
    # Blocks of an SM, and warps of its schedulers that have an item.
    processors = device.multiprocessors * (CLUSTERED if 2 < blocks <= MOST_CLUSTER else 1.0)
    resident = max(1, _resident(work, device, tile) // device.multiprocessors)
    held = min(ceil(blocks * columns / processors), resident)
    waves = ceil(blocks * columns / (held * processors))
    warps = held * min(items / blocks, WARPS) / SCHEDULERS
    issue_s = max(ENOUGH_WARPS, warps) * instructions / CLOCKS_S
    steps = (share.rows - 1) * tile.stride + tile.kernel + START_STEPS
    a_warp = ceil_div(items, blocks * WARPS) * steps
    busy_s = waves * a_warp * max(STEP_S[work.dtype.itemsize], issue_s)
    memory_s = bytes_of(work) * parts / BYTES_S
    total_s = LAUNCH_S + max(busy_s, memory_s) + APART * min(busy_s, memory_s)
    if blocks > 1:
        total_s += CLUSTER_S if is_clustered(device, blocks) else GRID_S
    return total_s


def _resident(work: ConvWork, device: CudaDevice, tile: WeightTile) -> int:
    """Return the blocks that run at once."""
    return resident_blocks(device, _shared_bytes(work.dtype, tile), tile.blocks)


def _groups(work: ConvWork, tile: WeightTile) -> int:
    """Return the groups of adjacent strips of a row of y."""
    return ceil_div(work.output[2], tile.strips * tile.columns)


def _items(work: ConvWork, tile: WeightTile, rows: int) -> int:
    chunks = ceil_div(work.output[1], rows)
    return work.batch * work.output[0] * _groups(work, tile) * chunks


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
