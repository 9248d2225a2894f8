"""Results whose channels are not whole chunks of 16 bytes: computed with padding, then packed.

Kernels store results in vectors of 16 bytes, and load operands so. With other channel counts they
store element by element, which takes several times as long as the sums. Here the result and the
operand that shares its channels are padded with zeros, and a copy at memory bandwidth removes the
padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod

from convgrad_service.backends.cuda.kernels.conv.lowering import Lowered, LoweringFamily
from convgrad_service.backends.cuda.kernels.layout.channels_last import (
    CHUNK_BYTES,
    overlapping,
    prepare_out_channels,
    prepare_side,
    prepare_weight,
)
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Family, choose
from convgrad_service.plans.cuda.program import Instance, Launch, Step, Workspace, ceil_div
from convgrad_service.plans.cuda.works import ConvWork, Copy, CopyAxis, contiguous_strides

__all__ = ["PaddedResult"]

# `Col2im` computes layers with fewer.
LEAST_CHANNELS = 9
# The fewest elements of a result for which the copies cost less than they save. On an H200
# (bfloat16, 9 to 330 channels), 71 random forward passes and input gradients of this size or larger
# took 0.32 to 1.15 of the best other kernel's time (geometric mean 0.69), and 89 smaller ones 0.69
# to 1.73 of it (1.24).
LEAST_ELEMENTS = 500_000


class PaddedResult(LoweringFamily):
    """Ungrouped 16-bit convolutions in any direction."""

    name, suffix = "padded_result", "padded"

    def __init__(
        self,
        families: Sequence[Family[ConvWork]],
        copies: Sequence[Family[Copy]],
        *,
        least_elements: int = LEAST_ELEMENTS,
    ) -> None:
        super().__init__(families)
        self._copies, self._least = copies, least_elements

    def lowered(self, work: ConvWork, device: CudaDevice) -> Lowered | str:
        if work.groups != 1:
            return f"{work.groups} groups"
        if not work.epilogue_free or work.result_dtype is not work.dtype:
            return "an epilogue"
        if work.dtype.itemsize != 2:
            return f"{work.dtype.value}: not measured"
        channels = _channels(work)
        if channels < LEAST_CHANNELS:
            return f"{channels} channels are fewer than {LEAST_CHANNELS}"
        if not channels * work.dtype.itemsize % CHUNK_BYTES:
            return "channels in whole chunks"
        if prod(_rows(work)) * channels < self._least:
            return f"a result of fewer than {self._least} elements"
        if work.result.strides[2] != 1:
            return "the result's channels are not contiguous"
        return _padded(work, device)

    def after(
        self, work: ConvWork, device: CudaDevice, lowered: Lowered, last: Step
    ) -> Iterable[Step]:
        steps = choose(self._copies, _copy_out(work, lowered.work), device).fragment.steps
        return overlapping(steps, device, first=isinstance(last, Launch))

    def instances(self) -> Iterable[Instance]:
        """None of its own; see `Family.instances`."""
        return ()


def _padded(given: ConvWork, device: CudaDevice) -> Lowered:
    """Return the convolution with padded channels of the result."""
    chunk = CHUNK_BYTES // given.dtype.itemsize
    channels = ceil_div(_channels(given), chunk) * chunk
    extents = (*_rows(given), channels)
    outer, *spatial, _ = contiguous_strides(extents)
    weight = given.direction == "bwd_weight"
    first, second = (extents[0] * outer, outer) if weight else (outer, channels)
    buffer = f"{given.prefix}{given.direction}.padded_result"
    result = replace(
        given.result, buffer=buffer, strides=(first, second, 1, spatial[0], spatial[1], spatial[2])
    )
    forward = given.direction == "fwd"
    conv = given.conv
    conv = replace(conv, out_channels=channels) if forward else replace(conv, in_channels=channels)
    work = replace(given, conv=conv, follows=False, leads=False)
    if weight:
        read = prepare_side(given, "input", device)
        work = replace(work, w=result, x=read.operand)
    elif forward:
        read = prepare_out_channels(given, device)
        work = replace(work, y=result, w=read.operand)
    else:
        read = prepare_weight(given, device)
        work = replace(work, x=result, w=read.operand)
    size = prod(extents) * given.dtype.itemsize
    return Lowered(work, read.steps, (*read.workspace, Workspace(buffer, size)))


def _copy_out(given: ConvWork, padded: ConvWork) -> Copy:
    """Return the copy that removes the padding."""
    source, target = padded.result, given.result
    outer = 1 if given.direction == "bwd_weight" else 0
    axes = (
        CopyAxis(extent, source.strides[axis], target.strides[axis])
        for extent, axis in zip((*_rows(given), _channels(given)), (outer, 3, 4, 5, 2), strict=True)
    )
    return Copy(source.buffer, target.buffer, source.dtype, tuple(axes))


def _channels(work: ConvWork) -> int:
    """Return the channels of the result, which are its last axis in memory."""
    return work.out_channels if work.direction == "fwd" else work.in_channels


def _rows(work: ConvWork) -> tuple[int, int, int, int]:
    """Return the extents of the result without its channels."""
    if work.direction == "bwd_weight":
        return work.out_channels, *work.kernel
    return work.batch, *(work.output if work.direction == "fwd" else work.input)
