"""Dense wgrad of float32 as products of bfloat16 parts.

Both operands are split into two parts (``precision: high``), whose three products are more exact
than TF32, or into three (``highest``), whose six are as exact as float32 (float_parts.py).
`HopperWeight` sums the products.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.conv.dense_tiles import why_not_few_parts
from convgrad_service.backends.cuda.kernels.conv.float_parts import (
    PARTS,
    FloatTensor,
    float_parts,
    of_pixels_read,
    parts_instances,
    why_not_parts,
)
from convgrad_service.backends.cuda.kernels.conv.hopper_weight import HopperWeight
from convgrad_service.backends.cuda.kernels.conv.hopper_weight_cuts import Cut
from convgrad_service.backends.cuda.kernels.core.limits import Requirements
from convgrad_service.backends.cuda.kernels.layout.channels_last import why_not_contiguous_groups
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["SplitWeight"]

# On an H200: measured over modelled time of the product, and how much longer it takes to store an
# element of a result whose channels are not contiguous.
PRODUCT_SCALE, STRIDED_ELEMENT_S = 0.93, 8.5e-12
NEEDS = Requirements((DType.FLOAT32,), hopper=True, grouped=None)


class SplitWeight:
    """bwd_weight of float32 on sm_90a, by `HopperWeight`, of tensors in any layout.

    Splitting moves 2 to 2.5 times the operands' bytes, so it is for layers of many products.
    """

    name = "split_weight"

    def __init__(self, product: HopperWeight | None = None) -> None:
        """Create the family; ``product`` computes the products."""
        self._product = product or HopperWeight()

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        if (reason := NEEDS.why_not(work, device)) is not None:
            return reason
        work = of_pixels_read(work)
        if (reason := why_not_contiguous_groups(work)) is not None:
            return reason
        if (reason := why_not_parts(_tensors(work))) is not None:
            return reason
        parts = PARTS[work.precision]
        if parts > 2 and (reason := why_not_few_parts(work)) is not None:
            return reason
        return self._product.why_not(_of_parts(work), device, parts=parts)

    def launches(self, work: ConvWork, device: CudaDevice, cut: Cut | None = None) -> Fragment:
        """See `Family.launches`. ``cut`` overrides the chosen partition."""
        work = of_pixels_read(work)
        read, parts = _of_parts(work), PARTS[work.precision]
        split = float_parts(*_tensors(work), parts, f"{work.prefix}weight_parts_", device)
        product = self._product.launches(read, device, cut, parts=parts, unscale=split.unscale)
        first, *others = product.steps
        if isinstance(first, Launch):
            first = replace(first, overlaps=True)
        return replace(
            product,
            kernel=f"{self.name}_{product.kernel}",
            steps=(*split.steps, first, *others),
            workspace=(*split.workspace, *product.workspace),
            expected_s=split.expected_s
            + PRODUCT_SCALE * (product.expected_s or 0.0)
            + _stored_s(work),
        )

    def instances(self) -> Iterable[Instance]:
        return [*parts_instances(), *self._product.parts_instances()]


def _stored_s(work: ConvWork) -> float:
    """Return the expected seconds by which strides of the result delay it."""
    if work.w.strides[2] == 1:
        return 0.0
    return STRIDED_ELEMENT_S * work.taps * work.in_channels * work.conv.out_channels


def _tensors(work: ConvWork) -> tuple[FloatTensor, FloatTensor]:
    """Return the operands to split."""
    prefix, conv = f"{work.prefix}weight_parts_", work.conv
    return (
        FloatTensor(work.x, work.batch, conv.in_channels, work.input, f"{prefix}input"),
        FloatTensor(work.y, work.batch, conv.out_channels, work.output, f"{prefix}grad_output"),
    )


def _of_parts(work: ConvWork) -> ConvWork:
    """Return the work on the first parts of the operands."""
    x, y = (
        tensor.part_of(channels)
        for tensor, channels in zip(
            _tensors(work), (work.in_channels, work.out_channels), strict=True
        )
    )
    return replace(work, dtype=DType.BFLOAT16, x=x, y=y, prefix=f"{work.prefix}weight_parts_")
