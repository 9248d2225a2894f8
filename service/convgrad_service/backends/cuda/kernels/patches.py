"""Convolutions over patches that do not overlap along W: a patch's row as one position's channels.

Where kernel and stride along W are the same, without padding, and W and channels lie side by side,
the S taps of a kernel row and the C channels are S*C neighbouring numbers that no other position
reads: the same tensors are those of a convolution with S*C channels and one tap along W, which the
dense kernels compute with full tiles where C alone would leave most of one. Nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from convgrad_service.backends.cuda.kernels.channels_last import CHUNK_BYTES
from convgrad_service.plans.cuda_device import CudaDevice
from convgrad_service.plans.cuda_families import Family, choose
from convgrad_service.plans.cuda_program import Fragment, Instance
from convgrad_service.plans.cuda_works import ConvWork, Operand

__all__ = ["Patches"]

MOST_CHANNELS = 4
LEAST_FOLDED = 32


class Patches:
    """Every direction, by the first of ``families`` that takes the folded convolution."""

    name = "patches"

    def __init__(self, families: Sequence[Family[ConvWork]]) -> None:
        self._families = families

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        taps, channels = work.kernel[2], work.in_channels
        if work.groups != 1 or channels > MOST_CHANNELS:
            return f"{work.groups} groups of {channels} channels of the input"
        if work.bias is not None and work.direction == "bwd_data":
            return "a bias for each channel"
        if work.stride[2] != taps or work.pad[2] != 0 or (taps > 1 and work.dilation[2] != 1):
            return "patches overlap along W, or are apart"
        if work.input[2] != taps * work.output[2]:
            return "columns beyond the last patch"
        folded = taps * channels
        if folded < LEAST_FOLDED or folded * work.dtype.itemsize % CHUNK_BYTES:
            return f"a patch's row has {folded} numbers"
        if not all(
            (channels == 1 or operand.strides[2] == 1) and operand.strides[5] == channels
            for operand in (work.x, work.w)
        ):
            return "W and channels do not lie side by side"
        result = {"fwd": work.y, "bwd_data": work.x, "bwd_weight": work.w}[work.direction]
        if work.accumulate is not None and work.accumulate.strides != result.strides:
            return "accumulate does not lie as the result does"
        reasons = [family.why_not(_folded(work), device) for family in self._families]
        return None if None in reasons else "; ".join(map(str, reasons))

    def launches(self, work: ConvWork, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        fragment = choose(self._families, _folded(work), device).fragment
        return replace(fragment, kernel=f"{self.name}_{fragment.kernel}")

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`: those of the other families."""
        return [instance for family in self._families for instance in family.instances()]


def _folded(work: ConvWork) -> ConvWork:
    """The same work, with the taps along W among the channels."""
    conv, taps = work.conv, work.kernel[2]
    x, w = _joined(work.x, taps * work.in_channels), _joined(work.w, 0)
    accumulate = work.accumulate
    if accumulate is not None:
        result = {"fwd": work.y, "bwd_data": x, "bwd_weight": w}[work.direction]
        accumulate = replace(accumulate, strides=result.strides)
    return replace(
        work,
        conv=replace(
            conv,
            in_channels=conv.in_channels * taps,
            input_size=(*conv.input_size[:-1], conv.output_size[-1]),
            kernel_size=(*conv.kernel_size[:-1], 1),
            stride=(*conv.stride[:-1], 1),
            dilation=(*conv.dilation[:-1], 1),
            padding=(*conv.padding[:-1], (0, 0)),
        ),
        x=x,
        w=w,
        accumulate=accumulate,
    )


def _joined(operand: Operand, step: int) -> Operand:
    """The operand with channels and W as one axis, and ``step`` between positions along W."""
    n, g, _, d, h, _ = operand.strides
    return replace(operand, strides=(n, g, 1, d, h, step))
