"""Operands for tensor-core kernels: contiguous channels in whole 16-byte chunks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import gcd, prod

from convgrad_service.backends.cuda.kernels.layout.strided_copy import (
    StridedCopy,
    padding_copy,
)
from convgrad_service.backends.cuda.kernels.layout.transpose import RowCopy, Transpose
from convgrad_service.plans.cuda.device import OVERLAPPING, CudaDevice
from convgrad_service.plans.cuda.families import choose
from convgrad_service.plans.cuda.program import Launch, Step, Workspace, ceil_div
from convgrad_service.plans.cuda.works import ConvWork, CopyAxis, Operand, contiguous_strides
from convgrad_service.problems.sizes import Size3

__all__ = ["CHUNK_BYTES", "Prepared", "every_channel", "in_whole_chunks", "overlapping"]
__all__ += ["padded_width", "prepare_activation", "prepare_out_channels", "prepare_rows"]
__all__ += ["prepare_side", "prepare_weight", "why_not_contiguous_groups"]

CHUNK_BYTES = 16

COPIES = (Transpose(), RowCopy(), StridedCopy())
# Kernels that use programmatic dependent launch.
WAITING = ("transpose", "transpose_planes", "transpose_runs", "row_copy", "row_pack", "float_parts")
# Of a copy's launch by the bytes of an element, and bytes that it reads and writes per second:
# fitted on an H200 to 137 weight gradients, 1x1, channels first, and in float32 to 48 layers.
COPY_S, COPY_BYTES_S = {2: 2.5e-6, 4: 1e-6}, 4e12
# Cache line of a GPU.
LINE_BYTES = 128


@dataclass(frozen=True, slots=True)
class Prepared:
    """An operand to read, and the steps that make it if it is a copy."""

    operand: Operand
    steps: tuple[Step, ...] = ()
    workspace: tuple[Workspace, ...] = ()

    @property
    def expected_s(self) -> float:
        """The expected seconds of the steps."""
        copied = sum(item.size_bytes for item in self.workspace)
        each_s = COPY_S.get(self.operand.dtype.itemsize, 0.0)
        return len(self.steps) * each_s + 2 * copied / COPY_BYTES_S


def overlapping(steps: Iterable[Step], device: CudaDevice, first: bool = False) -> tuple[Step, ...]:
    """Launch copies so that they overlap the previous step.

    That includes a copy at the start if ``first``: a launch of the same plan precedes it.
    """
    found: list[Step] = []
    for step in steps:
        after = isinstance(found[-1], Launch) if found else first
        if isinstance(step, Launch) and step.instance.entry in WAITING and after:
            step = replace(step, overlaps=device.capability >= OVERLAPPING)
        found.append(step)
    return tuple(found)


def in_whole_chunks(operand: Operand, extents: tuple[int, ...], channel_axis: int) -> bool:
    """Whether each pixel's channels start and end at multiples of 16 bytes."""
    chunk = CHUNK_BYTES // operand.dtype.itemsize
    if operand.strides[channel_axis] != 1 or extents[channel_axis] % chunk:
        return False
    return all(
        stride % chunk == 0
        for axis, (stride, extent) in enumerate(zip(operand.strides, extents, strict=True))
        if axis != channel_axis and extent > 1
    )


def every_channel(operand: Operand, groups: int, channels: int) -> int:
    """Return the channels of a pixel from the first group's first to the last group's last, with
    the padding between groups of so many ``channels``."""
    apart = operand.strides[1] // operand.strides[2] if groups > 1 else 0
    return (groups - 1) * apart + channels


def why_not_contiguous_groups(work: ConvWork) -> str | None:
    """Return why the channels of all groups are not equally far apart in an activation, or None."""
    for operand, channels in ((work.x, work.in_channels), (work.y, work.out_channels)):
        if work.groups > 1 and operand.strides[1] != channels * operand.strides[2]:
            return "groups are not contiguous"
    return None


def prepare_activation(
    operand: Operand,
    batch: int,
    groups: int,
    channels: int,
    size: Size3,
    name: str,
    device: CudaDevice,
    follows: bool = False,
) -> Prepared:
    """Return (N, D, H, W, G, C/G), with a group's channels zero-padded to whole chunks.

    ``follows``: the previous launch may write the operand.
    """
    order = 0, 3, 4, 5, 1, 2
    extents = batch, groups, channels, *size
    return _prepare(operand, extents, order, name, device, follows=follows)


def prepare_side(work: ConvWork, name: str, device: CudaDevice) -> Prepared:
    """Return the "input", the "grad_output" or a gather's "source" as `prepare_activation` does."""
    reads_y = name == "grad_output" or (name == "source" and work.direction == "bwd_data")
    operand, channels, size = (
        (work.y, work.out_channels, work.output)
        if reads_y
        else (work.x, work.in_channels, work.input)
    )
    copy = f"{work.prefix}{name}_channels_last"
    return prepare_activation(
        operand, work.batch, work.groups, channels, size, copy, device, work.follows
    )


def prepare_weight(
    work: ConvWork, device: CudaDevice, out_channels_last: bool = False, whole_lines: bool = False
) -> Prepared:
    """Return (G, K/G, T, R, S, C/G) or (G, C/G, T, R, S, K/G), zero-padded to whole chunks.

    With ``whole_lines``, channels of more than a cache line are padded to whole lines.
    """
    order = (0, 2, 3, 4, 5, 1) if out_channels_last else (0, 1, 3, 4, 5, 2)
    name = f"{work.prefix}weight_channels_last"
    return _prepare(work.w, _weight_extents(work), order, name, device, whole_lines=whole_lines)


def prepare_out_channels(work: ConvWork, device: CudaDevice) -> Prepared:
    """Return (G, K/G, T, R, S, C/G), with a group's out channels zero-padded to whole chunks."""
    name = f"{work.prefix}weight_out_channels"
    order = 0, 1, 3, 4, 5, 2
    return _prepare(work.w, _weight_extents(work), order, name, device, padded_axis=1)


def _weight_extents(work: ConvWork) -> tuple[int, ...]:
    return work.groups, work.out_channels, work.in_channels, *work.kernel


def _prepare(
    operand: Operand,
    extents: tuple[int, ...],
    order: tuple[int, ...],
    name: str,
    device: CudaDevice,
    *,
    whole_lines: bool = False,
    follows: bool = False,
    padded_axis: int | None = None,
) -> Prepared:
    """Copy an operand to the ``order`` of axes in memory, padding one of them (the last one)."""
    last, dtype = order[-1] if padded_axis is None else padded_axis, operand.dtype
    chunk, line = (unit // dtype.itemsize for unit in (CHUNK_BYTES, LINE_BYTES))
    whole_lines = whole_lines and extents[last] > line and extents[last] % line != 0
    whole = extents[last] % chunk == 0 if padded_axis else in_whole_chunks(operand, extents, last)
    if whole and not whole_lines:
        return Prepared(operand)
    if whole_lines:
        chunk = line
    channels = extents[last]
    padded = ceil_div(channels, chunk) * chunk
    shape = tuple(padded if axis == last else extents[axis] for axis in order)
    strides = [0] * 6
    for axis, stride in zip(order, contiguous_strides(shape), strict=True):
        strides[axis] = stride
    axes = [
        CopyAxis(padded if axis == last else extents[axis], operand.strides[axis], strides[axis])
        for axis in order
    ]
    at = order.index(last)
    copy = padding_copy(operand.buffer, name, dtype, axes, at, channels, follows)
    target = replace(
        operand,
        buffer=name,
        strides=(strides[0], strides[1], strides[2], strides[3], strides[4], strides[5]),
    )
    return Prepared(
        target,
        choose(COPIES, copy, device).fragment.steps,
        (Workspace(name, prod(shape) * dtype.itemsize),),
    )


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
    name = f"{work.prefix}input_rows"
    copy = padding_copy(x.buffer, name, x.dtype, axes, 3, bound)
    return Prepared(
        replace(x, buffer=name, strides=(n, 0, c, d, h, w)),
        choose(COPIES, copy, device).fragment.steps,
        (Workspace(name, prod(shape) * x.dtype.itemsize),),
    )
