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
from convgrad_service.backends.cuda.kernels.layout.channels_first import (
    LastTensor,
    LastWork,
    ThroughChannelsLast,
)
from convgrad_service.backends.cuda.kernels.layout.channels_last import CHUNK_BYTES
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Family
from convgrad_service.plans.cuda.program import Fragment
from convgrad_service.plans.cuda.works import ConvWork, Copy, Operand, contiguous_strides

__all__ = ["ResultThroughChannelsLast"]

# Of a copy's launch, and bytes that it reads and writes per second.
COPY_S, COPY_BYTES_S = 2e-6, 3e12
# Elements of a weight below which a second launch takes as long as strided stores.
LEAST_WEIGHT = 1 << 18


class ResultThroughChannelsLast(ThroughChannelsLast[ConvWork]):
    """A convolution by a family with channels-last results."""

    _overlaps = True

    def __init__(
        self,
        inner: Family[ConvWork],
        copies: Sequence[Family[Copy]],
        *,
        anywhere: bool = False,
        timed: bool = False,
    ) -> None:
        """Create the family.

        Parameters
        ----------
        anywhere
            Also apply where this is not faster.
        timed
            Predicted times include the copies'.
        """
        super().__init__(inner, copies)
        self._anywhere, self._timed = anywhere, timed

    def fragment(self, work: ConvWork, device: CudaDevice, last: LastWork[ConvWork]) -> Fragment:
        found = super().fragment(work, device, last)
        if not self._timed or found.expected_s is None:
            return found
        copied = [one.workspace.size_bytes for one in last.tensors.values() if one.copied]
        copies_s = COPY_S * len(copied) + 2 * sum(copied) / COPY_BYTES_S
        return replace(found, expected_s=found.expected_s + copies_s)

    def _last(self, work: ConvWork) -> LastWork[ConvWork] | str:
        weight, given = work.direction == "bwd_weight", work.result
        channels, in_group = work.channels[1], 2
        extents = (work.batch, *work.sizes[1], work.groups * channels)
        if weight:
            channels, in_group = work.in_channels, 1
            given, extents = work.w, (work.conv.out_channels, *work.kernel, channels)
        each = work.out_channels if weight else channels
        if work.groups > 1 and given.strides[1 - weight] != each * given.strides[in_group]:
            return "groups are not contiguous"
        if given.strides[2] == 1 or channels == 1:
            return "the result's channels are contiguous"
        if channels * given.dtype.itemsize % CHUNK_BYTES:
            return f"the result's {channels} channels are not whole chunks of {CHUNK_BYTES} bytes"
        few = work.taps == 1 or (prod(extents) < LEAST_WEIGHT and not self._anywhere)
        if weight and few:
            return f"a weight of {prod(extents)} elements"
        if work.accumulate is not None and work.accumulate.strides != given.strides:
            return "accumulate and the result have different strides"
        if not weight and stores_planes(work) and not self._anywhere:
            return "the kernel stores planes"
        outer, *spatial, _ = contiguous_strides(extents)
        first, second = (each * outer, outer) if weight else (outer, channels)
        strides = first, second, 1, spatial[0], spatial[1], spatial[2]

        def tensor(given: Operand, name: str) -> LastTensor:
            buffer = f"{work.prefix}{work.direction}.last_{name}"
            last = replace(given, buffer=buffer, strides=strides)
            return LastTensor(given, last, extents, extents[-1], int(weight))

        tensors = {"result": tensor(given, "result")}
        result, accumulate = tensors["result"].last, work.accumulate
        if accumulate is not None:
            tensors["accumulate"] = tensor(accumulate, "accumulate")
            accumulate = tensors["accumulate"].last
        side = "w" if weight else "x" if work.direction == "bwd_data" else "y"
        x, w, y = (result if side == name else getattr(work, name) for name in "xwy")
        last = replace(work, x=x, w=w, y=y, accumulate=accumulate)
        return LastWork(last, tensors, "result")
