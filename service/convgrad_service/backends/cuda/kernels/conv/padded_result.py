"""Gradients whose channels are not whole chunks of 16 bytes: computed with padding, then packed.

Kernels store results in vectors of 16 bytes, and load operands so. With other channel counts they
store element by element, which takes several times as long as the sums. Here the result and the
operand that shares its channels are padded with zeros, and a copy at memory bandwidth removes the
padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

from convgrad_service.backends.cuda.kernels.layout.channels_last import (
    CHUNK_BYTES,
    Prepared,
    overlapping,
    prepare_side,
    prepare_weight,
)
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Family, choose
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, Workspace, ceil_div
from convgrad_service.plans.cuda.works import ConvWork, Copy, CopyAxis, contiguous_strides

__all__ = ["PaddedResult"]

# With fewer channels, most of a tile would be padding in any case.
LEAST_CHANNELS = 16
# The fewest elements of a result for which the copies cost less than they save. On an H200
# (bfloat16, 18 to 921 channels), 21 gradients of the input of this size or larger took 0.48 to 0.98
# of the best other kernel's time, and 12 smaller ones 1.09 to 1.34 of it; 7 large gradients of a
# weight took 0.76 to 1.07.
LEAST_ELEMENTS = 700_000


class PaddedResult:
    """bwd_data and bwd_weight of ungrouped 16-bit convolutions, by the first of ``families`` that
    takes the padded convolution."""

    name = "padded_result"

    def __init__(
        self,
        families: Sequence[Family[ConvWork]],
        copies: Sequence[Family[Copy]],
        *,
        least_elements: int = LEAST_ELEMENTS,
    ) -> None:
        self._families, self._copies = families, copies
        self._least = least_elements

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        if work.direction == "fwd":
            return "a forward pass"
        if work.groups != 1:
            return f"{work.groups} groups"
        if not work.epilogue_free or work.result_dtype is not work.dtype:
            return "an epilogue"
        if work.dtype.itemsize != 2:
            return f"{work.dtype.value}: not measured"
        if work.in_channels < LEAST_CHANNELS:
            return f"{work.in_channels} channels would leave most of a tile"
        if not work.in_channels * work.dtype.itemsize % CHUNK_BYTES:
            return "channels in whole chunks"
        if prod(_rows(work)) * work.in_channels < self._least:
            return f"a result of fewer than {self._least} elements"
        if work.result.strides[2] != 1:
            return "the result's channels are not contiguous"
        inner = _Padded.of(work, device).work
        reasons = [family.why_not(inner, device) for family in self._families]
        return None if None in reasons else "; ".join(map(str, reasons))

    def launches(self, work: ConvWork, device: CudaDevice) -> Fragment:
        padded = _Padded.of(work, device)
        chosen = choose(self._families, padded.work, device)
        inner, read = chosen.fragment, padded.read
        after = choose(self._copies, padded.copy_out(), device).fragment.steps
        after = overlapping(after, device, first=isinstance(inner.steps[-1], Launch))
        return replace(
            inner,
            kernel=f"{inner.kernel}_padded",
            steps=(*read.steps, *inner.steps, *after),
            workspace=(*read.workspace, padded.result, *inner.workspace),
            expected_s=None,
            order=f"{chosen.family} {inner.order}",
        )

    def instances(self) -> Iterable[Instance]:
        """None of its own; see `Family.instances`."""
        return ()


@dataclass(frozen=True, slots=True)
class _Padded:
    """The convolution with padded input channels, the operand copied for it, and its result."""

    given: ConvWork
    work: ConvWork
    read: Prepared
    result: Workspace

    @classmethod
    def of(cls, given: ConvWork, device: CudaDevice) -> _Padded:
        chunk = CHUNK_BYTES // given.dtype.itemsize
        channels = ceil_div(given.in_channels, chunk) * chunk
        extents = (*_rows(given), channels)
        outer, *spatial, _ = contiguous_strides(extents)
        weight = given.direction == "bwd_weight"
        first, second = (extents[0] * outer, outer) if weight else (outer, channels)
        buffer = f"{given.prefix}{given.direction}.padded_result"
        result = replace(
            given.result,
            buffer=buffer,
            strides=(first, second, 1, spatial[0], spatial[1], spatial[2]),
        )
        conv = replace(given.conv, in_channels=channels)
        work = replace(given, conv=conv, follows=False, leads=False)
        if weight:
            read = prepare_side(given, "input", device)
            work = replace(work, w=result, x=read.operand)
        else:
            read = prepare_weight(given, device)
            work = replace(work, x=result, w=read.operand)
        size = prod(extents) * given.dtype.itemsize
        return cls(given, work, read, Workspace(buffer, size))

    def copy_out(self) -> Copy:
        """Return the copy that removes the padding."""
        source, target = self.work.result, self.given.result
        outer = 1 if self.given.direction == "bwd_weight" else 0
        extents = (*_rows(self.given), self.given.in_channels)
        axes = (
            CopyAxis(extent, source.strides[axis], target.strides[axis])
            for extent, axis in zip(extents, (outer, 3, 4, 5, 2), strict=True)
        )
        return Copy(source.buffer, target.buffer, source.dtype, tuple(axes))


def _rows(work: ConvWork) -> tuple[int, int, int, int]:
    """Return the extents of the result without its channels."""
    if work.direction == "bwd_weight":
        return work.out_channels, *work.kernel
    return work.batch, *work.input
