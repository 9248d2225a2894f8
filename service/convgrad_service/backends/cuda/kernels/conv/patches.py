"""Strided first layers with W folded into the channels, for the dense kernels.

If the stride along W divides the taps, the padding and W, and (W, C) is contiguous, then position w
of the input is channel (w mod stride, c) of position w div stride. The same memory, without a copy,
holds the tensors of a convolution with stride*C channels, S / stride taps along W and stride 1.
With C channels alone, most of a dense kernel's tile would be padding. This is faster if patches do
not overlap and a row of a patch is a multiple of a chunk, and in one dimension.
"""

from __future__ import annotations

from dataclasses import replace

from convgrad_service.backends.cuda.kernels.conv.lowering import Lowered, LoweringFamily
from convgrad_service.backends.cuda.kernels.layout.channels_last import CHUNK_BYTES
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.works import ConvWork, Operand

__all__ = ["MOST_CHANNELS", "Patches"]

MOST_CHANNELS = 4
"""The most input channels of a first layer."""
LEAST_FOLDED = 32


class Patches(LoweringFamily):
    """All directions."""

    name = "patches"

    def lowered(self, work: ConvWork, device: CudaDevice) -> Lowered | str:
        stride, channels = work.stride[2], work.in_channels
        if work.groups != 1 or channels > MOST_CHANNELS:
            return f"{work.groups} groups of {channels} channels of the input"
        if work.bias is not None and work.direction == "bwd_data":
            return "a bias for each channel"
        if stride == 1 or (work.kernel[2] > 1 and work.dilation[2] != 1):
            return "no stride, or dilated"
        whole = work.kernel[2], work.pad[2], work.input[2]
        if any(extent % stride for extent in whole):
            return f"taps, padding or W are not a multiple of the stride {stride}"
        folded = stride * channels
        # Splitting along W would change the folding, and so the order of summation.
        cut = work.conv.ndim == 1 and work.direction != "bwd_weight"
        flat = work.kernel[0] == work.kernel[1] == 1
        apart = work.kernel[2] == stride
        fills = folded >= LEAST_FOLDED and folded * work.dtype.itemsize % CHUNK_BYTES == 0
        if cut:
            return "large problems are cut along W"
        if not (flat or (apart and fills)):
            return f"a position's {folded} elements do not fill a tile"
        if not all(
            (channels == 1 or operand.strides[2] == 1) and operand.strides[5] == channels
            for operand in (work.x, work.w)
        ):
            return "W and channels are not contiguous"
        if work.accumulate is not None and work.accumulate.strides != work.result.strides:
            return "accumulate and the result have different strides"
        return Lowered(_folded(work))


def _folded(work: ConvWork) -> ConvWork:
    """Return the work with the stride along W folded into the channels."""
    conv, stride = work.conv, work.stride[2]
    step = stride * work.in_channels
    x, w, accumulate = _joined(work.x, step), _joined(work.w, step), work.accumulate
    if accumulate is not None:
        result = {"fwd": work.y, "bwd_data": x, "bwd_weight": w}[work.direction]
        accumulate = replace(accumulate, strides=result.strides)
    before, after = conv.padding[-1]
    return replace(
        work,
        conv=replace(
            conv,
            in_channels=conv.in_channels * stride,
            input_size=(*conv.input_size[:-1], conv.input_size[-1] // stride),
            kernel_size=(*conv.kernel_size[:-1], conv.kernel_size[-1] // stride),
            stride=(*conv.stride[:-1], 1),
            dilation=(*conv.dilation[:-1], 1),
            padding=(*conv.padding[:-1], (before // stride, after // stride)),
        ),
        x=x,
        w=w,
        accumulate=accumulate,
    )


def _joined(operand: Operand, step: int) -> Operand:
    """Return the operand with W and C as one axis of channels, and ``step`` as its W stride."""
    n, g, _, d, h, _ = operand.strides
    return replace(operand, strides=(n, g, 1, d, h, step))
