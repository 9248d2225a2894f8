"""Dense wgrad of float32 (``precision: high``) as one TF32 product of copied planes.

wgmma multiplies TF32 with K contiguous only, and K of a weight gradient is pixels, where channels
last have channels. If windows do not overlap, both operands are copied to planes: a row for each
channel, or for each element of a window, with the pixels of all images side by side. The copy reads
and writes each element once, and the gradient is a pointwise one, whose kernel reads planes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.conv.dense_weight import weight_expected_s
from convgrad_service.backends.cuda.kernels.conv.hopper_weight import HopperWeight
from convgrad_service.backends.cuda.kernels.conv.patch_products import flat_weight, patch_order
from convgrad_service.backends.cuda.kernels.layout.transpose import Transpose
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import Fragment, Instance, Step, Workspace
from convgrad_service.plans.cuda.works import (
    ConvWork,
    Copy,
    CopyAxis,
    Operand,
    contiguous_strides,
)

__all__ = ["PlanesWeight"]

# Float32 elements of 16 bytes, which rows that TMA reads are multiples of.
CHUNK = 4
# On an H200: the start of the three launches, bytes read and written per second by a transposition,
# and the measured time of a product over its modelled time (0.65 to 0.8).
START_S, BYTES_PER_S, PRODUCT_SCALE = 8e-6, 3.2e12, 0.72
# dense_weight's measured time in TF32 on an H200, over its modelled time: 1.14 to 1.36.
TF32_SLOWER = 1.2


class PlanesWeight:
    """bwd_weight of float32 (``precision: high``) on sm_90a, by `HopperWeight`.

    Copying moves twice the operands' bytes, so it is for layers of many products: on an H200 it
    takes 0.68 to 0.91 of the time of the families after it where its model prefers it.
    """

    name = "planes_weight"

    def __init__(self, product: HopperWeight | None = None, *, everywhere: bool = False) -> None:
        """Create the family.

        Parameters
        ----------
        product
            Computes the products.
        everywhere
            Take work even if products without copies are expected to be faster.
        """
        self._product, self._everywhere = product or HopperWeight(), everywhere
        self._copy = Transpose()

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        if (work.dtype, work.precision) != (DType.FLOAT32, "high"):
            return f"{work.dtype} of {work.precision} precision"
        if work.groups > 1:
            return f"{work.groups} groups of channels"
        if any(work.pad) or not _within(work) or work.taps * work.pixels > _positions(work):
            return "windows that overlap or reach into padding"
        if work.pixels % CHUNK:
            return f"{work.pixels} pixels; expected a multiple of {CHUNK}"
        if patch_order(work) is None:
            return "the weights of an output channel do not follow one another"
        accumulate = work.accumulate or work.w
        if accumulate.strides != work.w.strides:
            return "accumulate does not lie as the weight does"
        product = _product(work)
        for copy in _copies(work, product):
            if (reason := self._copy.why_not(copy, device)) is not None:
                return reason
        if (reason := self._product.why_not(product, device)) is not None:
            return reason
        tf32_s = TF32_SLOWER * weight_expected_s(work, device)
        if not self._everywhere and (self.launches(work, device).expected_s or 0.0) > tf32_s:
            return "few products for its size: copying would cost more than it saves"
        return None

    def launches(self, work: ConvWork, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        product = _product(work)
        steps: list[Step] = []
        for copy in _copies(work, product):
            steps += self._copy.launches(copy, device).steps
        workspace = [
            Workspace(operand.buffer, channels * work.pixels * work.dtype.itemsize)
            for operand, channels in (
                (product.x, product.in_channels),
                (product.y, product.out_channels),
            )
        ]
        copied_s = 2 * sum(item.size_bytes for item in workspace) / BYTES_PER_S
        fragment = self._product.launches(product, device)
        return replace(
            fragment,
            kernel=f"{self.name}_{fragment.kernel}",
            steps=(*steps, *fragment.steps),
            workspace=(*workspace, *fragment.workspace),
            expected_s=START_S + copied_s + PRODUCT_SCALE * (fragment.expected_s or 0.0),
        )

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        return [*self._copy.instances(), *self._product.instances()]


def _within(work: ConvWork) -> bool:
    """Return whether no window reaches beyond the input."""
    return all(
        (output - 1) * stride + (kernel - 1) * dilation < size
        for output, stride, kernel, dilation, size in zip(
            work.output, work.stride, work.kernel, work.dilation, work.input, strict=True
        )
    )


def _positions(work: ConvWork) -> int:
    return work.batch * prod(work.input)


def _product(work: ConvWork) -> ConvWork:
    """Return the work as a pointwise convolution over planes, of one image."""
    numbers, pixels = work.taps * work.in_channels, work.pixels
    conv = replace(
        work.conv,
        batch=1,
        in_channels=numbers,
        input_size=(pixels,),
        output_size=(pixels,),
        kernel_size=(1,),
        stride=(1,),
        dilation=(1,),
        padding=((0, 0),),
    )
    x, y = (
        Operand(
            f"{work.prefix}{name}_planes",
            work.dtype,
            (channels * pixels, channels * pixels, pixels, pixels, pixels, 1),
        )
        for name, channels in (("input", numbers), ("grad_output", work.out_channels))
    )
    accumulate = None if work.accumulate is None else flat_weight(work.accumulate)
    w = flat_weight(work.w)
    # Copies of planes are not copies of the operands, which another work may share.
    prefix = f"{work.prefix}planes_"
    return replace(work, conv=conv, x=x, y=y, w=w, accumulate=accumulate, prefix=prefix)


def _copies(work: ConvWork, product: ConvWork) -> tuple[Copy, Copy]:
    """Return the copies of the input and of grad_output to planes."""
    order, pixels = patch_order(work) or [], work.pixels
    places = contiguous_strides((work.batch, *work.output))
    extents = (work.in_channels, *work.kernel)
    x, y = work.x.strides, work.y.strides
    windows = [CopyAxis(work.batch, x[0], places[0])]
    windows += [
        CopyAxis(extent, stride * x[3 + dim], places[1 + dim])
        for dim, (extent, stride) in enumerate(zip(work.output, work.stride, strict=True))
    ]
    steps = (1, *work.dilation)
    numbers = contiguous_strides(tuple(extents[axis - 2] for axis in order))
    windows += [
        CopyAxis(extents[axis - 2], steps[axis - 2] * x[axis], number * pixels)
        for axis, number in zip(order, numbers, strict=True)
    ]
    images = [CopyAxis(work.batch, y[0], places[0])]
    images += [
        CopyAxis(extent, y[3 + dim], places[1 + dim]) for dim, extent in enumerate(work.output)
    ]
    images.append(CopyAxis(work.out_channels, y[2], pixels))
    return (
        Copy(work.x.buffer, product.x.buffer, work.dtype, tuple(windows), follows=False),
        Copy(work.y.buffer, product.y.buffer, work.dtype, tuple(images), follows=False),
    )
