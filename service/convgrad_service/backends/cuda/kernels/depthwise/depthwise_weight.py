"""Channels-last depthwise wgrad by FMA (depthwise_weight.cu)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.elements import CUDA_TYPES
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_tiles import (
    DTYPES,
    LinearCost,
    Plane,
    chunk_rows,
    plane_of,
    resident_blocks,
    strides_of,
    why_not_counted,
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

__all__ = ["DepthwiseWeight"]

COST = LinearCost(5.64, 0.28, 0.055, 0.765)
# Many warps per block leave few partial sums to reduce.
WARPS = 8
# Rows in a warp's shared memory, by bytes of an element.
STAGES = {2: 4, 4: 3}


CHANNELS = 32
"""Channels of a warp: two sectors of memory per pixel for 16-bit types."""
PIECES = (16, 4)
"""Bytes per cp.async, which must divide pixels and channels; larger ones are faster."""


@dataclass(frozen=True, slots=True)
class WeightTile:
    """A lane's channels and columns, and blocks per SM."""

    vector: int
    columns: int
    blocks: int

    @property
    def strips(self) -> int:
        """Adjacent strips of a warp."""
        return 32 * self.vector // CHANNELS


Kernel = tuple[int, int]
"""Extent and stride of a square kernel."""
# By bytes of an element.
TILES: dict[int, dict[Kernel, WeightTile]] = {
    2: {
        (3, 1): WeightTile(1, 7, 2),
        (3, 2): WeightTile(1, 7, 2),
        (5, 1): WeightTile(1, 7, 2),
        (5, 2): WeightTile(1, 7, 1),
        (7, 1): WeightTile(1, 7, 1),
        (7, 2): WeightTile(1, 4, 1),
    },
    4: {
        (3, 1): WeightTile(2, 4, 1),
        (3, 2): WeightTile(1, 7, 1),
        (5, 1): WeightTile(2, 7, 1),
        (5, 2): WeightTile(2, 2, 2),
        (7, 1): WeightTile(1, 7, 1),
        (7, 2): WeightTile(1, 2, 2),
    },
}
FEW_ELEMENTS = 27 * 10**6
# In float32 with fewer elements of both tensors.
SMALL_TILES: dict[Kernel, WeightTile] = {(3, 1): WeightTile(2, 4, 2)}
# Elements above which tensor cores are faster in 16-bit types. On an H200, FMAs took 0.81 and 1.13 of
# their time with 10 and 58 million elements and 3x3 kernels, 0.7 to 1.0 below 12 million and 5x5
# ones, and with 7x7 ones 0.53 to 0.92 below 3.3 million and 0.78 to 1.53 above; with stride 2, always
# less.
TENSOR_CORES_FROM = {(3, 1): 27 * 10**6, (5, 1): 12 * 10**6, (7, 1): 33 * 10**5}


DepthwiseWeightArgs = structure("depthwise/depthwise_weight.cu", "DepthwiseWeightArgs")


class DepthwiseWeight:
    """bwd_weight of the kernels in ``TILES`` with one channel per group, channels last."""

    name = "depthwise_weight"

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        plane = plane_of(work, dtypes=DTYPES, chunk_bytes=PIECES[-1])
        if isinstance(plane, str):
            return plane
        tile = _tile(work, plane)
        if tile is None:
            return f"no instance for kernel {work.kernel} and stride {work.stride}"
        elements = elements_of(work, plane)
        if work.dtype.itemsize == 2 and _piece(work) == PIECES[0]:
            most = TENSOR_CORES_FROM.get((plane.kernel[0], plane.stride))
            if most is not None and elements >= most:
                return f"tensor cores are faster on {elements} elements"
        reason = why_not_counted(ceil_div(work.groups, CHANNELS))
        return reason or device.why_not_shared(_shared_bytes(work.dtype, plane, tile))

    def launches(self, work: ConvWork, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        plane = plane_of(work, dtypes=DTYPES, chunk_bytes=PIECES[-1])
        tile = None if isinstance(plane, str) else _tile(work, plane)
        if isinstance(plane, str) or tile is None:
            raise ValueError("no instance")
        shared_bytes, tiles = (
            _shared_bytes(work.dtype, plane, tile),
            ceil_div(work.groups, CHANNELS),
        )
        on_device = resident_blocks(device, shared_bytes, tile.blocks)
        resident = max(1, on_device // tiles)
        groups = ceil_div(plane.output[1], tile.strips * tile.columns)
        reach = ceil_div(plane.kernel[0], plane.stride) - 1
        rows = chunk_rows(plane.output[0], reach, plane.batch * groups, resident * WARPS)
        chunks = ceil_div(plane.output[0], rows)
        # As many blocks as are resident; items per warp differ by at most one.
        items = plane.batch * groups * chunks
        blocks = ceil_div(items, ceil_div(items, resident * WARPS) * WARPS)
        blocks = fitting_blocks(device, blocks, tiles, on_device)

        args = DepthwiseWeightArgs()
        fill_weight(args, work, plane)
        args.groups, args.chunks, args.rows = groups, chunks, rows
        clustered = is_clustered(device, blocks)
        sums = blocks * tiles * plane.kernel[0] ** 2 * CHANNELS
        partials = partials_of(work, 1 if clustered else blocks, sums)
        launch = Launch(
            _instance(work.dtype, (plane.kernel[0], plane.stride), tile, _piece(work)),
            (blocks, tiles, 1),
            (WARPS * 32, 1, 1),
            pack(args, **buffers_of(work, partials)),
            shared_bytes,
            cluster=blocks if clustered else 1,
        )
        return Fragment(self.name, (launch,), partials, expected_s=COST.expected_s(work, device))

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        return [
            _instance(dtype, kernel, tile, piece)
            for dtype in DTYPES
            for tiles in (TILES[dtype.itemsize], SMALL_TILES if dtype.itemsize == 4 else {})
            for kernel, tile in tiles.items()
            for piece in PIECES
        ]


def _tile(work: ConvWork, plane: Plane) -> WeightTile | None:
    if plane.kernel[0] != plane.kernel[1]:
        return None
    kernel, itemsize = (plane.kernel[0], plane.stride), work.dtype.itemsize
    if itemsize == 4 and kernel in SMALL_TILES and elements_of(work, plane) < FEW_ELEMENTS:
        return SMALL_TILES[kernel]
    return TILES[itemsize].get(kernel)


def _piece(work: ConvWork) -> int:
    """Return the largest of ``PIECES`` that divides the channels of every pixel."""
    numbers = [n for operand in (work.x, work.y) for n in strides_of(operand)]
    if not (work.x.padded and work.y.padded):
        numbers.append(work.groups)
    whole = not any(n * work.dtype.itemsize % PIECES[0] for n in numbers)
    return PIECES[0] if whole else PIECES[1]


def _shared_bytes(dtype: DType, plane: Plane, tile: WeightTile) -> int:
    """Return the bytes of the warps' rows, reused for the accumulators of strips."""
    columns, kernel = tile.strips * tile.columns, plane.kernel[0]
    read = (columns - 1) * plane.stride + kernel + columns
    rows, taps = STAGES[dtype.itemsize] * read * dtype.itemsize, kernel**2
    used = CHANNELS * WARPS * max(rows, taps * tile.strips * 4)
    return used + received_bytes(taps * CHANNELS)


def _instance(dtype: DType, kernel: Kernel, tile: WeightTile, piece: int) -> Instance:
    defines = {
        "ELEMENT": CUDA_TYPES[dtype],
        "VECTOR": tile.vector,
        "LANES": CHANNELS // tile.vector,
        "KERNEL": kernel[0],
        "STRIDE": kernel[1],
        "COLUMNS": tile.columns,
        "WARPS": WARPS,
        "STAGES": STAGES[dtype.itemsize],
        "BLOCKS": tile.blocks,
        "PIECE": piece,
    }
    return Instance.of("depthwise/depthwise_weight.cu", defines)
