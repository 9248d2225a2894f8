"""What depthwise families share: a work's channels and plane, and how it is divided."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from operator import mul
from typing import TypeVar

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.core.limits import (
    DTYPES,
    IN_16_BITS,
    why_not_32bit_positions,
)
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import ZEROS_BYTES, ceil_div
from convgrad_service.plans.cuda.works import ConvWork, Operand

__all__ = ["BYTES_S", "DTYPES", "IN_16_BITS", "STRIP_COLUMNS", "LinearCost", "Plane", "bytes_of"]
__all__ += ["channel_strides_of", "channels_of", "chunk_counts", "is_in_planes", "lines_of"]
__all__ += ["plane_of", "resident_blocks", "rows_adjacent", "spread_of", "strides_of", "turned"]
__all__ += ["turns_of", "vector_of", "why_not_counted", "why_not_depthwise", "why_not_images"]

V = TypeVar("V")
BYTES_S = 4.2e12
"""Memory's bytes per second, for cost models."""
LINE_BYTES = 128
STRIP_COLUMNS = 8
"""Columns of a strip, which tensor cores multiply together."""
CHUNK = 8
"""Elements of 16 bytes in 16-bit types."""
MOST_ELEMENTS, MOST_IMAGE = 2**33, 2**31
# Kernels add up to 40 of them to a position, in 32 bits.
MOST_SPREAD = 2**24


@dataclass(frozen=True, slots=True)
class Plane:
    """A depthwise work with two spatial dimensions of the same stride.

    ``batch`` is that of images, or of all planes along D, which are ``image_axis`` 3 of strides.
    """

    batch: int
    kernel: tuple[int, int]
    stride: int
    input: tuple[int, int]
    output: tuple[int, int]
    pad: tuple[int, int]
    dilation: tuple[int, int]
    multiplier: int
    image_axis: int

    @property
    def reach(self) -> tuple[int, int]:
        """Extents of the dilated kernel."""
        first, second = (d * (k - 1) + 1 for d, k in zip(self.dilation, self.kernel, strict=True))
        return first, second

    def strides(self, operand: Operand) -> tuple[int, int, int]:
        """Return an activation's strides of N H W."""
        return operand.strides[self.image_axis], operand.strides[4], operand.strides[5]

    def weight_strides(self, operand: Operand) -> tuple[int, int, int]:
        """Return the weight's strides of K R S."""
        return operand.strides[0] // self.multiplier, operand.strides[4], operand.strides[5]


def why_not_depthwise(
    work: ConvWork, dtypes: Sequence[DType] = DTYPES, *, in_planes: bool = False
) -> str | None:
    """Return why a work is not depthwise in one of ``dtypes``, and channels last; None if it is.

    With ``in_planes``, its channels are not contiguous.
    """
    multiplier = work.out_channels
    if work.dtype not in dtypes:
        return f"{work.dtype}"
    if work.groups == 1 or work.in_channels != 1:
        return "not one input channel per group"
    each, group, channel = work.x.strides[1], work.y.strides[1], work.y.strides[2]
    if (each == 1 and group == multiplier) is in_planes:
        return f"the channels are {'' if in_planes else 'not '}contiguous"
    whole = work.direction != "bwd_weight" or work.w.strides[0] == multiplier * work.w.strides[1]
    if multiplier > 1 and not (group == multiplier * channel and whole):
        return "the channels of a group are not contiguous"
    if spread_of(work) > MOST_SPREAD:
        return f"taps that are more than {MOST_SPREAD} columns apart"
    return why_not_32bit_positions(work)


def why_not_images(work: ConvWork, most: int) -> str | None:
    """Return why offsets in an image are not below ``most`` elements; None if they are."""
    for operand, size in ((work.x, work.input), (work.y, work.output)):
        if sum(map(mul, operand.strides[3:], size)) > most:
            return f"an image of more than {most} elements"
    return None


def plane_of(work: ConvWork) -> Plane | str:
    """Return the plane of a 16-bit, channels-last work in whole chunks; or why it has none."""
    multiplier, deep = work.out_channels, work.input[0] > 1
    if (reason := why_not_depthwise(work, IN_16_BITS)) is not None:
        return reason
    if work.groups % CHUNK and not (work.x.padded and work.y.padded):
        return f"{work.groups} channels are not a multiple of {CHUNK}"
    if work.kernel[0] != 1 or work.stride[0] != 1 or work.pad[0] != 0:
        return "three dimensions"
    if work.input[0] != work.output[0]:
        return "input and output have different depths"
    if work.stride[1] != work.stride[2]:
        return f"two strides, {work.stride[1]} and {work.stride[2]}"
    if work.input[1] == work.output[1] == work.kernel[1] == 1 and work.pad[1] == 0:
        return "one dimension: its strips would depend on how the problem is split"
    plane = Plane(
        batch=work.batch * work.input[0],
        kernel=(work.kernel[1], work.kernel[2]),
        stride=work.stride[1],
        input=(work.input[1], work.input[2]),
        output=(work.output[1], work.output[2]),
        pad=(work.pad[1], work.pad[2]),
        dilation=(work.dilation[1], work.dilation[2]),
        multiplier=multiplier,
        image_axis=3 if deep else 0,
    )
    for operand, size in ((work.x, plane.input), (work.y, plane.output)):
        if deep and operand.strides[0] != work.input[0] * operand.strides[3]:
            return "planes that are not contiguous"
        strides = plane.strides(operand)
        if any(stride % CHUNK for stride in strides):
            return f"strides that are not multiples of {CHUNK}"
        image = sum(n * stride for n, stride in zip(size, strides[1:], strict=True))
        if image >= MOST_IMAGE or image + plane.batch * strides[0] >= MOST_ELEMENTS:
            return f"a tensor of more than {MOST_ELEMENTS} elements, or an image of {MOST_IMAGE}"
    return plane


def strides_of(operand: Operand) -> tuple[int, ...]:
    """Return an activation's strides of N D H W."""
    return operand.strides[0], *operand.strides[3:]


def channel_strides_of(work: ConvWork) -> tuple[int, int]:
    """Return the distances between channels of x and of y."""
    return work.x.strides[1], work.y.strides[1] // work.out_channels


def is_in_planes(work: ConvWork) -> bool:
    """Return whether the channels of x or of y are not adjacent."""
    return channel_strides_of(work) != (1, 1)


def channels_of(work: ConvWork) -> int:
    """Return the channels of y."""
    return work.groups * work.out_channels


def spread_of(work: ConvWork) -> int:
    """Return the distance between taps along W, in columns."""
    return work.dilation[2] if work.kernel[2] > 1 else 1


def vector_of(work: ConvWork) -> int:
    """Return the channels of a thread's word: two, if every pixel is aligned to them."""
    if work.dtype.itemsize > 2 or work.out_channels > 1 or is_in_planes(work):
        return 1
    numbers = [n for operand in (work.x, work.y) for n in strides_of(operand)]
    return 1 if any(n % 2 for n in (work.groups, *numbers)) else 2


@lru_cache(maxsize=1024)
def turned(work: ConvWork) -> ConvWork:
    """Return a work with H and W exchanged."""

    def of(values: tuple[V, ...]) -> tuple[V, ...]:
        return *values[:-2], values[-1], values[-2]

    def strides(operand: Operand) -> Operand:
        n, g, c, d, h, w = operand.strides
        return replace(operand, strides=(n, g, c, d, w, h))

    conv = work.conv
    return replace(
        work,
        conv=replace(
            conv,
            input_size=of(conv.input_size),
            kernel_size=of(conv.kernel_size),
            output_size=of(conv.output_size),
            stride=of(conv.stride),
            padding=of(conv.padding),
            dilation=of(conv.dilation),
        ),
        x=strides(work.x),
        w=strides(work.w),
        y=strides(work.y),
        accumulate=None if work.accumulate is None else strides(work.accumulate),
    )


def turns_of(work: ConvWork) -> tuple[bool, ...]:
    """Return whether a work may be computed as it is, and `turned`: so that a kernel of a single
    column has a single row, and in planes so that adjacent threads, each with results of a
    column, have adjacent pixels."""
    flat, rows, columns = work.kernel
    if flat == columns == 1 < rows:
        return (True,)
    both = is_in_planes(work) and min(work.input[1], work.output[1]) > 1
    return (False, True) if both else (False,)


def rows_adjacent(work: ConvWork) -> bool:
    """Return whether pixels of adjacent rows are closer than those of adjacent columns."""
    result = work.sides[1] if work.direction != "bwd_weight" else work.y
    return result.strides[4] < result.strides[5]


def lines_of(dtype: DType, distance: int, adjacent: int) -> float:
    """Return the cache lines that a warp reads of planes whose threads read ``distance`` elements
    apart, ``adjacent`` of them without a gap."""
    run = max(1, min(32, adjacent))
    return min(32.0, 32 / run * max(1.0, run * distance * dtype.itemsize / LINE_BYTES))


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
        """Return the predicted time of a work; instances compute products of square kernels."""
        extent = max(work.kernel)
        products = work.pixels * channels_of(work) * extent**2
        us = self.start_us + self.column_us * extent
        sized_us = bytes_of(work) * self.megabyte_us + products * self.megaproduct_us
        us += sized_us * 1e-6 * FITTED_MULTIPROCESSORS / device.multiprocessors
        return us * 1e-6


def why_not_counted(columns: int) -> str | None:
    """Return why there are not enough arrival counters for the columns of blocks, or None."""
    most = ZEROS_BYTES // 4
    return f"{columns} columns of blocks are more than {most}" if columns > most else None


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


def resident_blocks(device: CudaDevice, shared_bytes: int, blocks: int) -> int:
    """Return the blocks resident on the device if the registers of an SM suffice for ``blocks``."""
    return device.multiprocessors * max(1, min(blocks, device.fitting_blocks(shared_bytes)))
