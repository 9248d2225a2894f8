"""How depthwise kernels lay blocks and threads over channels and pixels; what they take."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from convgrad_service.plans.cuda_device import CudaDevice
from convgrad_service.plans.cuda_program import ZEROS_BYTES, ceil_div
from convgrad_service.plans.cuda_works import ConvWork, Operand

__all__ = ["BLOCK_CHANNELS", "CHUNK_BYTES", "Plane", "Tiling", "chunk_rows", "plane_of"]
__all__ += ["chunk_counts", "fill_operands", "resident_blocks", "why_not_counted", "why_not_plane"]

BLOCK_CHANNELS = 32
"""Channels of a warp: two sectors of memory a pixel for 16-bit types."""
CHUNK_BYTES = 16
# What a warp's first rows take to arrive, in rows computed meanwhile; from sweeps on one H200.
START_ROWS = 6


class Tiling(ctypes.Structure):
    """See ``depthwise_args.cuh``."""

    _fields_ = tuple(
        (name, ctypes.c_int32) for name in ("groups", "chunks", "rows", "channel_tiles")
    )


@dataclass(frozen=True, slots=True)
class Plane:
    """A depthwise work as two spatial dimensions. ``axes`` are which of D, H, W they are, the
    second None for a 1D work; ``batch_axis`` is 0 where the planes of D count as images."""

    batch: int
    kernel: tuple[int, int]
    stride: int
    input: tuple[int, int]
    output: tuple[int, int]
    pad: tuple[int, int]
    axes: tuple[int, int | None]
    batch_axis: int | None
    dilation: tuple[int, int]
    multiplier: int

    @property
    def reach(self) -> tuple[int, int]:
        """The kernel's extents, dilated."""
        first, second = (d * (k - 1) + 1 for d, k in zip(self.dilation, self.kernel, strict=True))
        return first, second

    def strides(self, operand: Operand) -> tuple[int, int, int]:
        """Of an activation: N H W."""
        lead = operand.strides[0]
        if self.batch_axis is not None:
            lead = operand.strides[3 + self.batch_axis]
        return lead, *self._spatial(operand)

    def weight_strides(self, operand: Operand) -> tuple[int, int, int]:
        """Of the weight: K R S."""
        return operand.strides[0] // self.multiplier, *self._spatial(operand)

    def _spatial(self, operand: Operand) -> tuple[int, int]:
        first, second = self.axes
        return operand.strides[3 + first], 0 if second is None else operand.strides[3 + second]


def why_not_plane(work: ConvWork, general: bool = False) -> str | None:
    """Why a work is no depthwise convolution of channels-last planes in whole chunks.

    ``general`` ones may be dilated, and have several output channels a group.
    """
    if work.groups == 1 or work.in_channels != 1 or (work.out_channels != 1 and not general):
        return "not one input and one output channel a group"
    multiplier = work.out_channels
    if work.x.strides[1] != 1 or work.y.strides[1] != multiplier:
        return "the channels do not lie side by side"
    if multiplier > 1 and (
        work.y.strides[2] != 1 or work.w.strides[0] != multiplier * work.w.strides[1]
    ):
        return "the channels of a group do not lie side by side"
    chunk = CHUNK_BYTES // work.dtype.itemsize
    if work.groups % chunk:
        return f"{work.groups} channels are no multiple of {chunk}"
    dilated = any(d != 1 and k != 1 for d, k in zip(work.dilation, work.kernel, strict=True))
    if dilated and not general:
        return "dilated"
    if work.kernel[0] != 1 or work.stride[0] != 1 or work.pad[0] != 0:
        return "three dimensions"
    if work.input[0] != work.output[0]:
        return "planes without a counterpart"
    for operand, size in ((work.x, work.input), (work.y, work.output)):
        if size[0] > 1 and operand.strides[0] != size[0] * operand.strides[3]:
            return "planes that do not follow one another"
        if any(stride % chunk for stride in (operand.strides[0], *operand.strides[3:])):
            return f"strides that are no multiples of {chunk}"
        spans = zip(operand.strides[3:], size, strict=True)
        if sum(stride * extent for stride, extent in spans) >= 2**31:
            return "an image of more than 2^31 elements"
    return None


def fill_operands(args: Any, work: ConvWork, plane: Plane, x: Operand, y: Operand) -> None:
    """What the arguments of all depthwise kernels have in common; ``x`` is read, and forward and in
    the input ``y`` is written."""
    args.x_stride[:], args.y_stride[:] = plane.strides(x), plane.strides(y)
    args.w_stride[:] = plane.weight_strides(work.w)
    if work.accumulate is not None:
        of_weight = work.direction == "bwd_weight"
        strides = plane.weight_strides if of_weight else plane.strides
        args.accumulate_stride[:] = strides(work.accumulate)
    args.alpha, args.beta, args.batch = work.alpha, work.beta, plane.batch


def why_not_counted(columns: int) -> str | None:
    """Why the blocks of so many columns cannot count each other."""
    most = ZEROS_BYTES // 4
    return f"{columns} columns of blocks are more than {most}" if columns > most else None


def plane_of(work: ConvWork) -> Plane | None:
    """The work's plane, where both dimensions share a stride; a 1D work becomes one column."""
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
    if work.stride[1] != work.stride[2]:
        return None
    return Plane(
        work.batch * depth,
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


def chunk_counts(rows: int) -> Iterator[int]:
    """Into how many chunks so many rows are worth cutting, ascending: more chunks that are as long
    take more time. Of a million rows that is 2,000 numbers."""
    chunks, each = 1, rows
    yield chunks
    while each > 1:
        chunks = ceil_div(rows, each - 1)
        each = ceil_div(rows, chunks)
        yield chunks


def chunk_rows(rows: int, reach: int, items: int, resident: int, start: int = START_ROWS) -> int:
    """Rows of a chunk, such that all warps (or blocks, where those share an item) are done soonest.

    Each takes its rows, ``reach`` that it reads beside, and a ``start`` in rows; a chunk is
    ``items`` of them, and ``resident`` run at once.
    """
    best = min(
        chunk_counts(rows),
        key=lambda chunks: (
            ceil_div(items * chunks, resident) * (ceil_div(rows, chunks) + reach + start)
        ),
    )
    return ceil_div(rows, best)


def resident_blocks(device: CudaDevice, shared_bytes: int, blocks: int) -> int:
    """Blocks that run at once where ``blocks`` fit in a multiprocessor's registers."""
    fitting = device.shared_bytes_per_multiprocessor // (shared_bytes + 1024)
    return device.multiprocessors * max(1, min(blocks, fitting))
