"""How depthwise kernels lay blocks and threads over channels and pixels; what they take."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from convgrad_service.plans.cuda_device import CudaDevice
from convgrad_service.plans.cuda_program import ceil_div
from convgrad_service.plans.cuda_works import ConvWork, Operand

__all__ = ["BLOCK_CHANNELS", "CHUNK_BYTES", "MAX_THREADS", "Cut", "Plane", "Tiling", "cut_plane"]
__all__ += ["blocks_of", "plane_of", "why_not_plane"]

BLOCK_CHANNELS = 32
"""Channels of a block: two sectors of memory a pixel for 16-bit types."""
CHUNK_BYTES = 16
MAX_THREADS = 128
"""Threads of a block: few, since each holds a hundred registers."""


class Tiling(ctypes.Structure):
    """See ``depthwise_args.cuh``."""

    _fields_ = tuple(
        (name, ctypes.c_int32)
        for name in ("strips", "segments", "rows", "tiles_w", "tiles_h", "channel_tiles")
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

    def strides(self, operand: Operand) -> tuple[int, int, int]:
        """Of an activation: N H W."""
        lead = operand.strides[0]
        if self.batch_axis is not None:
            lead = operand.strides[3 + self.batch_axis]
        return lead, *self._spatial(operand)

    def weight_strides(self, operand: Operand) -> tuple[int, int, int]:
        """Of the weight: C R S."""
        return operand.strides[0], *self._spatial(operand)

    def _spatial(self, operand: Operand) -> tuple[int, int]:
        first, second = self.axes
        return operand.strides[3 + first], 0 if second is None else operand.strides[3 + second]


@dataclass(frozen=True, slots=True)
class Cut:
    """A block's strips, segments and their rows, and how many tiles that makes."""

    strips: int
    segments: int
    rows: int
    tiles_w: int
    tiles_h: int

    @property
    def units(self) -> int:
        return self.strips * self.segments

    @property
    def tiles(self) -> int:
        return self.tiles_w * self.tiles_h

    def tiling(self, channels: int) -> Tiling:
        """As the kernels take it."""
        channel_tiles = ceil_div(channels, BLOCK_CHANNELS)
        return Tiling(
            self.strips, self.segments, self.rows, self.tiles_w, self.tiles_h, channel_tiles
        )


def why_not_plane(work: ConvWork) -> str | None:
    """Why a work is no depthwise convolution of channels-last planes in whole chunks."""
    if work.groups == 1 or work.in_channels != 1 or work.out_channels != 1:
        return "not one input and one output channel a group"
    if work.x.strides[1] != 1 or work.y.strides[1] != 1:
        return "the channels do not lie side by side"
    chunk = CHUNK_BYTES // work.dtype.itemsize
    if work.groups % chunk:
        return f"{work.groups} channels are no multiple of {chunk}"
    if any(d != 1 and k != 1 for d, k in zip(work.dilation, work.kernel, strict=True)):
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
    )


def cut_plane(rows: int, columns: int, strip: int, units: int, most_rows: int) -> Cut:
    """Tiles of at most ``units`` strips of ``strip`` columns, of about ``most_rows`` rows.

    The tiles along each dimension are as equal as whole strips and rows allow.
    """
    strips_in_all = ceil_div(columns, strip)
    tiles_w = ceil_div(strips_in_all, units)
    strips = ceil_div(strips_in_all, tiles_w)
    segments = max(1, min(units // strips, rows))
    tiles_h = ceil_div(rows, most_rows)
    per_segment = ceil_div(ceil_div(rows, tiles_h), segments)
    segments = ceil_div(ceil_div(rows, tiles_h), per_segment)
    return Cut(strips, segments, per_segment, tiles_w, ceil_div(rows, segments * per_segment))


def blocks_of(device: CudaDevice, tiles: int, columns: int, shared_bytes: int, blocks: int) -> int:
    """Blocks for each of ``columns`` equal parts of the work, of ``tiles`` tiles each.

    As many as run at once, where ``blocks`` of them fit in a multiprocessor's registers, and so
    that each has the same number of tiles or one less.
    """
    fitting = max(1, min(blocks, device.shared_bytes_per_multiprocessor // (shared_bytes + 1024)))
    resident = max(1, device.multiprocessors * fitting // columns)
    return ceil_div(tiles, ceil_div(tiles, resident))
