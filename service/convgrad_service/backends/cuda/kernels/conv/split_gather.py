"""Dense fprop and dgrad of true float32 on Hopper, as products of bfloat16 parts.

Both operands are split into three parts (float_parts.py), whose six largest products `HopperGather`
computes and sums.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.conv.float_parts import (
    PARTS,
    FloatTensor,
    float_parts,
    of_pixels_read,
    parts_instances,
    why_not_parts,
)
from convgrad_service.backends.cuda.kernels.conv.hopper_gather import HopperGather
from convgrad_service.backends.cuda.kernels.core.limits import Requirements
from convgrad_service.backends.cuda.kernels.layout.channels_last import why_not_contiguous_groups
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import Fragment, Instance
from convgrad_service.plans.cuda.works import ConvWork, Operand

__all__ = ["SplitGather"]

NEEDS = Requirements((DType.FLOAT32,), hopper=True, grouped=None)
# Of the source, every element; of the weight, those of at least 2^-98. Together so little that they
# need not change for other images' elements, up to products of 2^114: pieces have equal bits.
LIFT = 16, -12


class SplitGather:
    """fwd and bwd_data of float32 layers with ``precision: highest`` on sm_90a, in any layout.

    Splitting moves 2.5 times the operands' bytes, so it is for layers of many products.
    """

    name = "split_gather"

    def __init__(self, product: HopperGather | None = None) -> None:
        """``product`` computes the products of parts."""
        self._product = product or HopperGather(parts=PARTS["highest"])

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        if (reason := NEEDS.why_not(work, device)) is not None:
            return reason
        if work.precision == "high":
            return "TF32 is faster, and precise enough for what was requested"
        work = _forward_read(work)
        if (reason := why_not_contiguous_groups(work)) is not None:
            return reason
        if work.groups > 1 and work.w.strides[0] != work.out_channels * work.w.strides[1]:
            return "the groups of the weight are not contiguous"
        if (reason := why_not_parts(_tensors(work))) is not None:
            return reason
        return self._product.why_not(_of_parts(work), device)

    def launches(self, work: ConvWork, device: CudaDevice) -> Fragment:
        work = _forward_read(work)
        split = float_parts(*_tensors(work), PARTS["highest"], f"{work.prefix}parts_", device, LIFT)
        product = self._product.launches(_of_parts(work), device, unscale=split.unscale)
        time_s = product.expected_s
        return replace(
            product,
            kernel=f"{self.name}_{product.kernel}",
            steps=(*split.steps, *product.steps),
            workspace=(*split.workspace, *product.workspace),
            expected_s=None if time_s is None else time_s + split.expected_s,
        )

    def instances(self) -> Iterable[Instance]:
        return [*parts_instances(), *self._product.instances()]


def _tensors(work: ConvWork) -> tuple[FloatTensor, FloatTensor]:
    """Return the operands to split: the source, and the weight with out channels as images."""
    prefix, conv = f"{work.prefix}parts_", work.conv
    source, (read, _) = work.sides[0], work.channels
    _, k, c, *kernel = work.w.strides
    weight = Operand(work.w.buffer, work.w.dtype, (k, 0, c, kernel[0], kernel[1], kernel[2]))
    return (
        FloatTensor(source, work.batch, work.groups * read, work.sizes[0], f"{prefix}source"),
        FloatTensor(weight, conv.out_channels, work.in_channels, work.kernel, f"{prefix}weight"),
    )


def _forward_read(work: ConvWork) -> ConvWork:
    return of_pixels_read(work) if work.direction == "fwd" else work


def _of_parts(work: ConvWork) -> ConvWork:
    """Return the work on the first parts of the operands."""
    of_source, of_weight = _tensors(work)
    source, weight = of_source.part_of(work.channels[0]), of_weight.part_of(work.in_channels)
    k, _, c, *kernel = weight.strides
    strides = work.out_channels * k, k, c, kernel[0], kernel[1], kernel[2]
    weight = replace(weight, strides=strides)
    x, y = (work.x, source) if work.direction == "bwd_data" else (source, work.y)
    return replace(work, dtype=DType.BFLOAT16, x=x, y=y, w=weight, follows=True)
