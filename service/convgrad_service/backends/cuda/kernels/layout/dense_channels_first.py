"""Dense layers with channels-first results: written channels last, then copied.

The accumulators of dense kernels have adjacent channels, so a channels-first result takes one store
for each element. On an H200 (bfloat16, gradient of the input) that takes 13 to 460 us more than
channels last, and a copy 2 to 80. The kernels read channels-first sources themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from convgrad_service.backends.cuda.kernels.conv.hopper_gather_plan import stores_planes
from convgrad_service.backends.cuda.kernels.layout.channels_first import ThroughChannelsLast
from convgrad_service.backends.cuda.kernels.layout.channels_last import CHUNK_BYTES, overlapping
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Family, choose
from convgrad_service.plans.cuda.program import Fragment, Launch, Step, Workspace
from convgrad_service.plans.cuda.works import (
    ConvWork,
    Copy,
    CopyAxis,
    Operand,
    contiguous_strides,
)

__all__ = ["ResultThroughChannelsLast"]

# Elements of a weight below which a second launch takes as long as strided stores.
LEAST_WEIGHT = 1 << 18


class ResultThroughChannelsLast(ThroughChannelsLast[ConvWork]):
    """An ungrouped convolution by a family with channels-last results."""

    def __init__(
        self, inner: Family[ConvWork], copies: Sequence[Family[Copy]], *, anywhere: bool = False
    ) -> None:
        """``anywhere``: also apply where this is not faster."""
        super().__init__(inner, copies)
        self._anywhere = anywhere

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        if work.groups != 1:
            return f"{work.groups} groups"
        given, extents = _result(work)
        channels = extents[-1]
        if given.strides[2] == 1 or channels == 1:
            return "the result's channels are contiguous"
        if channels * given.dtype.itemsize % CHUNK_BYTES:
            return f"the result's {channels} channels are not whole chunks of {CHUNK_BYTES} bytes"
        few = work.taps == 1 or (prod(extents) < LEAST_WEIGHT and not self._anywhere)
        if work.direction == "bwd_weight" and few:
            return f"a weight of {prod(extents)} elements"
        if work.accumulate is not None and work.accumulate.strides != given.strides:
            return "accumulate and the result have different strides"
        if work.direction != "bwd_weight" and stores_planes(work) and not self._anywhere:
            return "the kernel stores planes"
        return self._inner.why_not(_lasting(work), device)

    def launches(self, work: ConvWork, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        given, extents = _result(work)
        lasting = _lasting(work)
        last, _ = _result(lasting)
        inner = self._inner.launches(lasting, device)
        outer = 1 if work.direction == "bwd_weight" else 0
        before: tuple[Step, ...] = ()
        size = prod(extents) * given.dtype.itemsize
        workspace = [Workspace(last.buffer, size)]
        if work.accumulate is not None and lasting.accumulate is not None:
            copy = _copy(work.accumulate, lasting.accumulate, extents, outer)
            before = choose(self._copies, copy, device).fragment.steps
            workspace.append(Workspace(lasting.accumulate.buffer, size))
        after = choose(self._copies, _copy(last, given, extents, outer), device).fragment.steps
        after = overlapping(after, device, first=isinstance(inner.steps[-1], Launch))
        return Fragment(
            f"{inner.kernel}_through_channels_last",
            (*before, *inner.steps, *after),
            (*workspace, *inner.workspace),
            inner.checks,
            inner.expected_s,
            inner.order,
        )


def _result(work: ConvWork) -> tuple[Operand, tuple[int, ...]]:
    """Return the result and its extents: N D H W C, of a weight K T R S C."""
    if work.direction == "bwd_weight":
        return work.w, (work.out_channels, *work.kernel, work.in_channels)
    return work.result, (work.batch, *work.sizes[1], work.channels[1])


def _lasting(work: ConvWork) -> ConvWork:
    """Return the work with result and accumulate channels last."""
    given, extents = _result(work)
    weight = work.direction == "bwd_weight"
    outer, *spatial, _ = contiguous_strides(extents)
    # The stride of the only group is not read.
    first, second = (extents[0] * outer, outer) if weight else (outer, extents[-1])
    order = first, second, 1, spatial[0], spatial[1], spatial[2]
    lead = f"{work.prefix}{work.direction}.last_"
    last = replace(given, buffer=f"{lead}result", strides=order)
    accumulate = work.accumulate
    if accumulate is not None:
        accumulate = replace(accumulate, buffer=f"{lead}accumulate", strides=order)
    if weight:
        return replace(work, accumulate=accumulate, w=last)
    if work.direction == "bwd_data":
        return replace(work, accumulate=accumulate, x=last)
    return replace(work, accumulate=accumulate, y=last)


def _copy(source: Operand, target: Operand, extents: tuple[int, ...], outer: int) -> Copy:
    """Return the copy to the result; ``outer`` is the operands' first axis: N, or a weight's K."""
    axes = (
        CopyAxis(extent, source.strides[axis], target.strides[axis])
        for extent, axis in zip(extents, (outer, 3, 4, 5, 2), strict=True)
    )
    return Copy(source.buffer, target.buffer, source.dtype, tuple(axes))
