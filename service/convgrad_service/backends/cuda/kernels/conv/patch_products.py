"""First layers with non-overlapping patches, as GEMMs.

If every stride equals the kernel extent and there is no padding, each output position reads a patch
of the input that no other position reads. With patches copied contiguously, in the memory order of
an output channel's weights, the layer is a pointwise convolution with taps * C channels, which the
dense kernels compute in any dtype and layout. The copy reads and writes the input once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import prod

from convgrad_service.backends.cuda.kernels.conv.lowering import Lowered, LoweringFamily
from convgrad_service.backends.cuda.kernels.layout.channels_last import COPIES
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import choose
from convgrad_service.plans.cuda.program import Step, Workspace
from convgrad_service.plans.cuda.works import ConvWork, Copy, CopyAxis, Operand, contiguous_strides

__all__ = ["MOST_CHANNELS", "PatchProducts"]

MOST_CHANNELS = 4
"""The most input channels of a first layer."""

CHANNEL = 2
"""The axis of an operand's channels within a group, before D, H and W, or T, R and S."""


class PatchProducts(LoweringFamily):
    """All directions."""

    name = "patch_products"
    copy_s = 3.2e-6

    def lowered(self, work: ConvWork, device: CudaDevice) -> Lowered | str:
        if work.groups != 1 or work.in_channels > MOST_CHANNELS:
            return f"{work.groups} groups of {work.in_channels} channels of the input"
        if work.kernel != work.stride or any(work.pad):
            return "patches that overlap, or have gaps between them"
        if any(k > 1 and d > 1 for k, d in zip(work.kernel, work.dilation, strict=True)):
            return "dilated"
        if _patch_order(work) is None:
            return "the weights of an output channel are not contiguous"
        if work.direction == "bwd_data":
            if work.bias is not None or work.accumulate is not None:
                return "an epilogue of the gradient of the input"
            if any(extent % k for extent, k in zip(work.input, work.kernel, strict=True)):
                return "positions of the input beyond the last patch"
        elif work.direction == "bwd_weight":
            accumulate = work.accumulate or work.w
            if accumulate.strides != work.w.strides:
                return "accumulate and the weight have different strides"
        product = _product(work)
        size_bytes = work.batch * prod(work.output) * product.in_channels * work.dtype.itemsize
        forward = work.direction != "bwd_data"
        before = _copied(_copy(work, product.x), device) if forward else ()
        return Lowered(product, before, (Workspace(product.x.buffer, size_bytes),))

    def after(
        self, work: ConvWork, device: CudaDevice, lowered: Lowered, last: Step
    ) -> Iterable[Step]:
        if work.direction != "bwd_data":
            return ()
        copy = _copy(work, lowered.work.x)
        axes = tuple(replace(one, source=one.target, target=one.source) for one in copy.axes)
        return _copied(replace(copy, source=copy.target, target=copy.source, axes=axes), device)


def _copied(copy: Copy, device: CudaDevice) -> tuple[Step, ...]:
    return choose(COPIES, copy, device).fragment.steps


def _extents(work: ConvWork) -> tuple[int, ...]:
    """Return the extents of a patch, by axis from ``CHANNEL``."""
    return (work.in_channels, *work.kernel)


def _patch_order(work: ConvWork) -> list[int] | None:
    """Return the axes of a patch in the memory order of an output channel's weights, outermost
    first, or None if those are not contiguous."""
    extents = dict(enumerate(_extents(work), CHANNEL))
    axes = [axis for axis, extent in extents.items() if extent > 1]
    axes.sort(key=lambda axis: -work.w.strides[axis])
    wanted = contiguous_strides(tuple(extents[axis] for axis in axes))
    return axes if tuple(work.w.strides[axis] for axis in axes) == wanted else None


def _product(work: ConvWork) -> ConvWork:
    """Return the work as a pointwise convolution, with the elements of a patch as channels."""
    numbers, conv, ones = work.taps * work.in_channels, work.conv, (1,) * work.conv.ndim
    image, plane, row, pixel, _ = contiguous_strides((work.batch, *work.output, numbers))
    x = Operand(
        f"{work.prefix}{work.direction}.patches", work.dtype, (image, numbers, 1, plane, row, pixel)
    )
    accumulate = work.accumulate
    if accumulate is not None and work.direction == "bwd_weight":
        accumulate = _flat_weight(accumulate)
    return replace(
        work,
        conv=replace(
            conv,
            in_channels=numbers,
            input_size=conv.output_size,
            kernel_size=ones,
            stride=ones,
            dilation=ones,
            padding=((0, 0),) * conv.ndim,
        ),
        x=x,
        w=_flat_weight(work.w),
        accumulate=accumulate,
        follows=work.follows and work.direction == "bwd_data",
    )


def _flat_weight(weight: Operand) -> Operand:
    """Return the weight with all of an output channel's elements as input channels."""
    group, channel, *_ = weight.strides
    return replace(weight, strides=(group, channel, 1, 0, 0, 0))


def _copy(work: ConvWork, patches: Operand) -> Copy:
    """Return the copy between the input and its contiguous patches."""
    order, extents = _patch_order(work), dict(enumerate(_extents(work), CHANNEL))
    if order is None:
        raise ValueError("the weights of an output channel are not contiguous")
    target = dict(zip(order, contiguous_strides(tuple(extents[a] for a in order)), strict=True))
    axes = [CopyAxis(work.batch, work.x.strides[0], patches.strides[0])]
    axes += [
        CopyAxis(extent, k * work.x.strides[axis], patches.strides[axis])
        for axis, (extent, k) in enumerate(zip(work.output, work.kernel, strict=True), CHANNEL + 1)
    ]
    axes += [CopyAxis(extents[axis], work.x.strides[axis], target[axis]) for axis in order]
    return Copy(work.x.buffer, patches.buffer, work.dtype, tuple(axes))
