"""Host side of ``first_windows.cuh``, and rows of a first layer's input."""

from __future__ import annotations

from dataclasses import replace
from math import gcd, prod
from typing import Any

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.core.limits import why_not_32bit_positions
from convgrad_service.backends.cuda.kernels.layout.channels_last import (
    CHUNK_BYTES,
    COPIES,
    Prepared,
)
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import CudaDevice, architectures_before
from convgrad_service.plans.cuda.families import choose
from convgrad_service.plans.cuda.program import Workspace, ceil_div
from convgrad_service.plans.cuda.works import (
    ConvWork,
    Copy,
    CopyAxis,
    Operand,
    contiguous_strides,
)

__all__ = [
    "BEFORE_BLACKWELL",
    "BLACKWELL",
    "MOST_CHANNELS",
    "MOST_WARPS",
    "STAGES",
    "STATIC_BYTES",
    "WindowArgs",
    "blocks_per_sm",
    "column_tiles",
    "padded_width",
    "prepare_rows",
    "why_not_first",
    "window_args",
    "window_bytes",
]

MOST_CHANNELS = 4
"""The most input channels of a first layer."""

MOST_WARPS = 12
BLACKWELL = (10, 0)
BEFORE_BLACKWELL = architectures_before(BLACKWELL)
"""Architectures with enough registers for the largest instances."""

STAGES = 4
"""Pipeline stages: work units whose input rows are in shared memory or in flight."""

STATIC_BYTES = 4096
REGISTERS = 65536
REGISTERS_OF_THREAD = 168
MAX_INDEX = 2**31 - 1


WindowArgs = structure("conv/first_windows.cuh", "WindowArgs")


def why_not_first(work: ConvWork, device: CudaDevice) -> str | None:
    """Return why the kernels of windows do not take a convolution, or None.

    Splitting along N or a spatial dimension does not change the answer.
    """
    if work.groups != 1:
        return f"{work.groups} groups"
    if work.in_channels > MOST_CHANNELS:
        return f"{work.in_channels} channels of the input are more than {MOST_CHANNELS}"
    if work.dtype is DType.FLOAT64:
        return "tensor cores that sum in float64 are not used"
    if work.dtype is DType.FLOAT32 and work.precision != "high":
        return "TF32 is less than the float32 that was asked for"
    if device.capability < (8, 0):
        return f"{device.name} is older than sm_80"
    if work.dilated:
        return "dilated"
    if column_tiles(work) > MOST_WARPS:
        return f"{work.kernel[2]} taps of {work.in_channels} channels in a row of the kernel"
    if work.accumulate is not None and work.accumulate.strides != work.result.strides:
        return "accumulate does not lie as the result does"
    if work.pixels * 16 > MAX_INDEX or prod(work.input[1:]) * work.in_channels * 16 > MAX_INDEX:
        return "positions are more than 32 bits count"
    # Even small tensors may have huge padding and strides.
    return why_not_32bit_positions(work)


def column_tiles(work: ConvWork) -> int:
    """Return the number of 8-column tiles (taps x channels) in a kernel row."""
    return ceil_div(work.kernel[2] * work.in_channels, 8)


def window_args(work: ConvWork, x: Operand, rows: int, unit_rows: int, segment: int) -> Any:
    """Return the kernel parameters that describe windows of the input.

    Parameters
    ----------
    x
        The input as `prepare_rows` returns it.
    rows
        Kernel rows per block.
    unit_rows, segment
        Rows and positions of a work unit.
    """
    args = WindowArgs()
    sizes = (work.batch, 1, work.in_channels, *work.input)
    args.x_end = 1 + sum((size - 1) * stride for size, stride in zip(sizes, x.strides, strict=True))
    args.channels = work.in_channels
    args.x_size[:], args.y_size[:] = work.input, work.output
    for name in ("kernel", "stride", "pad"):
        getattr(args, name)[:] = getattr(work, name)
    args.column_tiles, args.rows = column_tiles(work), rows
    args.unit_rows, args.segment = unit_rows, segment
    args.segments = ceil_div(work.output[2], segment)
    args.row_units = ceil_div(work.output[1], unit_rows)
    args.units = work.batch * work.output[0] * args.row_units * args.segments
    args.row_words = _row_words(work, segment)
    return args


def window_bytes(work: ConvWork, rows: int, unit_rows: int, segment: int) -> int:
    """Return the bytes of shared memory: the windows, the pipeline of input rows, static arrays."""
    size, stride = work.dtype.itemsize, work.stride[1]
    input_rows = stride * (unit_rows - 1) + rows
    windows = (input_rows + stride * unit_rows) * segment * (column_tiles(work) | 1) * 8 * size
    return windows + STAGES * input_rows * _row_words(work, segment) * 4 + STATIC_BYTES


def _row_words(work: ConvWork, segment: int) -> int:
    """Return the 32-bit words that a work unit loads of a row of x, in whole chunks."""
    size = work.dtype.itemsize
    elements = (segment - 1) * work.stride[2] * work.in_channels + column_tiles(work) * 8
    return ceil_div(elements * size + 2 * CHUNK_BYTES + 4, CHUNK_BYTES) * (CHUNK_BYTES // 4)


def blocks_per_sm(device: CudaDevice, threads: int, shared_bytes: int) -> int:
    """Return the number of resident blocks per SM."""
    by_shared = device.fitting_blocks(shared_bytes)
    return max(1, min(by_shared, REGISTERS // (threads * REGISTERS_OF_THREAD)))


def padded_width(work: ConvWork, chunk: int) -> int:
    """Return the positions of a row of the input, padded to a multiple of ``chunk`` elements."""
    whole = chunk // gcd(chunk, work.in_channels)
    return ceil_div(work.input[2], whole) * whole


def prepare_rows(work: ConvWork, device: CudaDevice, chunk: int = 1) -> Prepared:
    """Return the input with contiguous rows (W, C), copied if necessary.

    Rows start at multiples of ``chunk`` elements; a copy's are `padded_width` positions, zero
    beyond W.
    """
    x, channels, width = work.x, work.in_channels, work.input[2]
    padded = padded_width(work, chunk)
    shape = (work.batch, *work.input[:2], padded, channels)
    n, d, h, w, c = contiguous_strides(shape)
    outer = [
        CopyAxis(extent, x.strides[axis], stride)
        for extent, axis, stride in zip(shape[:3], (0, 3, 4), (n, d, h), strict=True)
    ]
    rows = (channels == 1 or x.strides[2] == 1) and (width == 1 or x.strides[5] == channels)
    aligned = all(axis.source % chunk == 0 for axis in outer if axis.extent > 1)
    if rows and aligned and padded == width:
        return Prepared(x)
    axes, bound = (
        [*outer, CopyAxis(padded, x.strides[5], w), CopyAxis(channels, x.strides[2], c)],
        width,
    )
    if rows:
        axes, bound = [*outer, CopyAxis(padded * channels, 1, 1)], width * channels
    bounds: tuple[tuple[int, int, int], ...] = ()
    if padded != width:
        # A bound refers to two axes; the outer one here has extent 1.
        axes, bounds = [CopyAxis(1, 0, 0), *axes], ((0, 4, bound),)
    name = f"{work.prefix}input_rows"
    copy = Copy(x.buffer, name, x.dtype, tuple(axes), bounds, pads=bool(bounds))
    return Prepared(
        replace(x, buffer=name, strides=(n, 0, c, d, h, w)),
        choose(COPIES, copy, device).fragment.steps,
        (Workspace(name, prod(shape) * x.dtype.itemsize),),
    )
