"""How depthwise kernels map blocks and threads to channels and pixels, and when they apply."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeVar

from convgrad_service.backends.cuda.kernels.core.elements import MAX_BLOCKS
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import ZEROS_BYTES, Launch, ceil_div
from convgrad_service.plans.cuda.works import ConvWork, Operand

__all__ = ["BLOCK_CHANNELS", "BYTES_S", "CHUNK_BYTES", "PIECES", "Kernel", "LinearCost"]
__all__ += ["Plane", "Planes", "Tiling"]
__all__ += [
    "bytes_of",
    "chunk_counts",
    "chunk_rows",
    "fill_operands",
    "fill_planes",
    "is_deep",
    "piece_of",
]
__all__ += ["kernel_of", "plane_and_kernel", "plane_and_tile", "plane_of", "resident_blocks"]
__all__ += ["channels_of", "spread_of", "strides_of", "vector_of"]
__all__ += ["strips_of_warp", "why_not_counted", "why_not_launched", "why_not_plane"]

T = TypeVar("T")
Kernel = tuple[int, int, int]
"""Rows and columns of taps of an instance, and its stride."""
PIECES = (16, 4)
"""Bytes per cp.async, which must divide pixels and channels; larger ones are faster."""
BLOCK_CHANNELS = 32
"""Channels of a warp: two sectors of memory per pixel for 16-bit types."""
CHUNK_BYTES = 16
BYTES_S = 4.2e12
"""Memory's bytes per second, for cost models."""
# Latency of a warp's first rows, in rows of computation; fitted to sweeps on an H200.
START_ROWS = 6


Tiling = structure("depthwise/depthwise_args.cuh", "Tiling")


Planes = structure("depthwise/depthwise_args.cuh", "Planes")


@dataclass(frozen=True, slots=True)
class Plane:
    """A depthwise work with two spatial dimensions.

    ``axes`` are their indices among D, H, W. For a 1D work, the second is None, or the first if the
    images are its rows. ``batch_axis`` is 0 if planes along D count as images.
    """

    batch: int
    kernel: tuple[int, int]
    stride: int
    input: tuple[int, int]
    output: tuple[int, int]
    pad: tuple[int, int]
    axes: tuple[int | None, int | None]
    batch_axis: int | None
    dilation: tuple[int, int]
    multiplier: int

    @property
    def reach(self) -> tuple[int, int]:
        """Extents of the dilated kernel."""
        first, second = (d * (k - 1) + 1 for d, k in zip(self.dilation, self.kernel, strict=True))
        return first, second

    @property
    def across(self) -> Plane:
        """The plane, transposed if the kernel has a single column, as a single row takes fewer
        accumulators.

        The rows of a 1D work are its images.
        """
        if self.kernel[1] > 1 or (self.kernel[0] == 1 and self.axes[1] is not None):
            return self
        turned = replace(
            self,
            kernel=self.kernel[::-1],
            input=self.input[::-1],
            output=self.output[::-1],
            pad=self.pad[::-1],
            axes=self.axes[::-1],
            dilation=self.dilation[::-1],
        )
        if self.axes[1] is not None:
            return turned
        rows = self.batch
        return replace(turned, batch=1, input=(rows, self.input[0]), output=(rows, self.output[0]))

    def strides(self, operand: Operand) -> tuple[int, int, int]:
        """Return an activation's strides of N H W."""
        lead = operand.strides[0]
        if self.batch_axis is not None:
            lead = operand.strides[3 + self.batch_axis]
        if self.axes[0] is None:
            return 0, lead, self._spatial(operand)[1]
        return lead, *self._spatial(operand)

    def weight_strides(self, operand: Operand) -> tuple[int, int, int]:
        """Return the weight's strides of K R S."""
        return operand.strides[0] // self.multiplier, *self._spatial(operand)

    def _spatial(self, operand: Operand) -> tuple[int, int]:
        first, second = (0 if axis is None else operand.strides[3 + axis] for axis in self.axes)
        return first, second


def why_not_plane(
    work: ConvWork, general: bool = False, chunk_bytes: int = CHUNK_BYTES, deep: bool = False
) -> str | None:
    """Return why a work is not a depthwise convolution of channels-last planes in whole chunks.

    ``general`` allows dilation and several output channels per group; ``deep`` is for kernels with
    several planes.
    """
    if work.groups == 1 or work.in_channels != 1 or (work.out_channels != 1 and not general):
        return "not one input and one output channel a group"
    multiplier = work.out_channels
    if work.x.strides[1] != 1 or work.y.strides[1] != multiplier:
        return "the channels are not contiguous"
    if multiplier > 1 and (
        work.y.strides[2] != 1 or work.w.strides[0] != multiplier * work.w.strides[1]
    ):
        return "the channels of a group are not contiguous"
    chunk = max(1, chunk_bytes // work.dtype.itemsize)
    if work.groups % chunk and not (work.x.padded and work.y.padded):
        return f"{work.groups} channels are not a multiple of {chunk}"
    dilated = [d != 1 and k != 1 for d, k in zip(work.dilation, work.kernel, strict=True)]
    if any(dilated) and not general:
        return "dilated"
    if deep:
        if dilated[0] and work.direction == "bwd_data":
            return "dilated along D"
        rows = work.kernel[1] * work.w.strides[4]
        if work.w.strides[3] != rows:
            return f"planes of weights {work.w.strides[3]} elements apart, not {rows}"
    elif work.kernel[0] != 1 or work.stride[0] != 1 or work.pad[0] != 0:
        return "three dimensions"
    elif work.input[0] != work.output[0]:
        return "planes that meet nothing"
    for operand, size in ((work.x, work.input), (work.y, work.output)):
        if not deep and size[0] > 1 and operand.strides[0] != size[0] * operand.strides[3]:
            return "planes that are not contiguous"
        if any(stride % chunk for stride in (operand.strides[0], *operand.strides[3:])):
            return f"strides that are not multiples of {chunk}"
        spans = zip(operand.strides[3:], size, strict=True)
        if sum(stride * extent for stride, extent in spans) >= 2**31:
            return "an image of more than 2^31 elements"
    return None


def fill_operands(args: Any, work: ConvWork, plane: Plane, x: Operand, y: Operand) -> None:
    """Fill in the kernel parameters that all depthwise kernels share.

    ``x`` is read; ``y`` is written in fprop and dgrad.
    """
    args.x_stride[:], args.y_stride[:] = plane.strides(x), plane.strides(y)
    args.w_stride[:] = plane.weight_strides(work.w)
    if work.accumulate is not None:
        of_weight = work.direction == "bwd_weight"
        strides = plane.weight_strides if of_weight else plane.strides
        args.accumulate_stride[:] = strides(work.accumulate)
    args.alpha, args.beta, args.batch = work.alpha, work.beta, plane.batch


def piece_of(work: ConvWork) -> int:
    """Return the largest of ``PIECES`` that divides the channels of every pixel, or an element's
    bytes."""
    sides = ((work.x, work.in_channels), (work.y, work.out_channels))
    numbers = [
        stride for operand, _ in sides for stride in (operand.strides[0], *operand.strides[3:])
    ]
    numbers += [work.groups * channels for operand, channels in sides if not operand.padded]
    itemsize = work.dtype.itemsize
    fitting = (piece for piece in PIECES if not any(n * itemsize % piece for n in numbers))
    return next(fitting, itemsize)


def is_deep(work: ConvWork) -> bool:
    """Whether results are sums over planes along D."""
    return work.kernel[0] > 1 or work.stride[0] > 1 or work.pad[0] != 0


def _deep_plane_of(work: ConvWork) -> Plane | None:
    """Return the plane of a work with several kernel planes; its batch is all planes of the
    result."""
    return _plane_of_images(work, work.batch * work.sizes[1][0], None)


def _plane_of_images(work: ConvWork, batch: int, batch_axis: int | None) -> Plane | None:
    if work.stride[1] != work.stride[2]:
        return None
    return Plane(
        batch,
        (work.kernel[1], work.kernel[2]),
        work.stride[1],
        (work.input[1], work.input[2]),
        (work.output[1], work.output[2]),
        (work.pad[1], work.pad[2]),
        (1, 2),
        batch_axis,
        (work.dilation[1], work.dilation[2]),
        work.out_channels,
    )


def kernel_of(plane: Plane, kernels: Iterable[Kernel]) -> Kernel | None:
    """Return the instance's kernel that computes a plane's kernel, or None.

    For one row of taps, it is the smallest that holds the dilated kernel, with stride 1 along rows.
    """
    if plane.kernel[0] > 1:
        wanted = (*plane.kernel, plane.stride)
        return wanted if plane.dilation == (1, 1) and wanted in kernels else None
    if plane.stride > 1 and plane.axes[0] is not None:
        return None
    holding = [
        kernel
        for kernel in kernels
        if kernel[0] == 1 and kernel[1] >= plane.reach[1] and kernel[2] == plane.stride
    ]
    return min(holding, default=None)


def fill_planes(planes: Any, work: ConvWork, x: Operand, y: Operand) -> None:
    """Fill in the planes of a work along D; ``x`` and ``y`` as in `fill_operands`."""
    backward = work.direction == "bwd_data"
    sizes = (work.output[0], work.input[0]) if backward else (work.input[0], work.output[0])
    planes.x, planes.y = sizes
    planes.kernel, planes.stride = work.kernel[0], work.stride[0]
    planes.dilation, planes.pad = work.dilation[0], work.pad[0]
    planes.x_stride, planes.y_stride = x.strides[3], y.strides[3]
    if work.accumulate is not None:
        planes.accumulate_stride = work.accumulate.strides[3]


def strides_of(operand: Operand) -> tuple[int, ...]:
    """Return an activation's strides of N D H W."""
    return operand.strides[0], *operand.strides[3:]


def channels_of(work: ConvWork) -> int:
    """Return the channels of y."""
    return work.groups * work.out_channels


def spread_of(work: ConvWork) -> int:
    """Return the columns from one tap to the next."""
    return work.dilation[2] if work.kernel[2] > 1 else 1


def vector_of(work: ConvWork) -> int:
    """Return the channels of a thread's word: two, if every pixel is aligned to them."""
    if work.dtype.itemsize > 2 or work.out_channels > 1:
        return 1
    numbers = [n for operand in (work.x, work.y) for n in strides_of(operand)]
    return 1 if any(n % 2 for n in (work.groups, *numbers)) else 2


def bytes_of(work: ConvWork) -> int:
    """Return the bytes of input and output."""
    elements = sum(prod(size) for size in work.sizes)
    return elements * work.batch * work.groups * work.dtype.itemsize


# Of an H200.
FITTED_MULTIPROCESSORS = 132


@dataclass(frozen=True, slots=True)
class LinearCost:
    """A cost model, linear in input and output, products, and the kernel's extent; fitted to 40
    layers on an H200, on which families err by 6 to 12 %."""

    start_us: float
    megabyte_us: float
    megaproduct_us: float
    column_us: float

    def expected_s(self, work: ConvWork, device: CudaDevice) -> float:
        """Return the predicted time of a work."""
        products = work.pixels * work.groups * work.out_channels * work.taps
        us = self.start_us + self.column_us * work.kernel[2]
        sized_us = (bytes_of(work) * self.megabyte_us + products * self.megaproduct_us) * 1e-6
        return (us + sized_us * FITTED_MULTIPROCESSORS / device.multiprocessors) * 1e-6


def why_not_launched(launch: Launch, device: CudaDevice) -> str | None:
    """Return why a device does not run a launch, or None."""
    reason = device.why_not_shared(launch.shared_bytes)
    if reason is None and launch.grid[0] > MAX_BLOCKS:
        return f"{launch.grid[0]} blocks are more than a grid can have"
    return reason


def strips_of_warp(vector: int) -> int:
    """Return the adjacent strips of a warp whose lanes have ``vector`` channels."""
    return 32 * vector // BLOCK_CHANNELS


def why_not_counted(columns: int) -> str | None:
    """Return why there are not enough arrival counters for the columns of blocks, or None."""
    most = ZEROS_BYTES // 4
    return f"{columns} columns of blocks are more than {most}" if columns > most else None


def plane_of(work: ConvWork) -> Plane | None:
    """Return the work's plane if both dimensions have the same stride. A 1D work has one column."""
    depth = work.input[0]
    batch_axis = 0 if depth > 1 else None
    line = work.input[1] == 1 and work.output[1] == 1 and work.kernel[1] == 1 and work.pad[1] == 0
    if line:
        return Plane(
            work.batch * depth,
            (work.kernel[2], 1),
            work.stride[2],
            (work.input[2], 1),
            (work.output[2], 1),
            (work.pad[2], 0),
            (2, None),
            batch_axis,
            (work.dilation[2], 1),
            work.out_channels,
        )
    return _plane_of_images(work, work.batch * depth, batch_axis)


def plane_and_kernel(
    work: ConvWork, kernels: Iterable[Kernel]
) -> tuple[Plane | None, Kernel | None]:
    """Return the plane and the kernel of the instance that computes it."""
    plane = _deep_plane_of(work) if is_deep(work) else plane_of(work)
    if plane is None:
        return None, None
    return plane.across, kernel_of(plane.across, kernels)


def plane_and_tile(work: ConvWork, tile_of: Callable[[Plane], T | None]) -> tuple[Plane, T]:
    """Return the plane and the tile of a work that `Family.why_not` does not refuse."""
    plane = plane_of(work)
    tile = None if plane is None else tile_of(plane)
    if plane is None or tile is None:
        raise ValueError("no instance")
    return plane, tile


def chunk_counts(rows: int) -> Iterator[int]:
    """Yield numbers of chunks of rows, ascending, each with shorter chunks than the last.

    For a million rows there are 2,000 of them.
    """
    chunks, each = 1, rows
    yield chunks
    while each > 1:
        chunks = ceil_div(rows, each - 1)
        each = ceil_div(rows, chunks)
        yield chunks


def chunk_rows(rows: int, reach: int, items: int, resident: int, start: int = START_ROWS) -> int:
    """Return the rows per chunk that minimise the total time.

    A chunk costs its rows, ``reach`` halo rows and a fixed ``start``, in rows. Each chunk has
    ``items``, of which ``resident`` run at once.
    """
    best = min(
        chunk_counts(rows),
        key=lambda chunks: (
            ceil_div(items * chunks, resident) * (ceil_div(rows, chunks) + reach + start)
        ),
    )
    return ceil_div(rows, best)


def resident_blocks(device: CudaDevice, shared_bytes: int, blocks: int) -> int:
    """Return the blocks resident on the device if the registers of an SM suffice for ``blocks``."""
    return device.multiprocessors * max(1, min(blocks, device.fitting_blocks(shared_bytes)))
