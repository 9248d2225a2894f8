"""Dense fprop and dgrad of true float32 on Hopper as six products of bfloat16 parts.

An element is the sum of three parts (float_parts.cu), and with x = sum of 2^(-8*i) * x[i],

    x * y = sum of 2^(-8*(i + j)) * x[i] * y[j] over i + j <= 2

to 2^-23 of |x * y| at most, and to 2^-26 on average. `HopperGather` computes the six products from
three tensors of each operand, and adds up those of a k-tile by weight, the smallest first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.conv import float_parts
from convgrad_service.backends.cuda.kernels.conv.hopper_gather import HopperGather
from convgrad_service.backends.cuda.kernels.core.limits import Requirements
from convgrad_service.backends.cuda.kernels.layout.channels_last import overlapping
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import Fragment, Instance
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["Bf16x6Gather"]

NEEDS = Requirements((DType.FLOAT32,), hopper=True)


class Bf16x6Gather:
    """fwd and bwd_data of ungrouped float32 layers with ``precision: highest``, on sm_90a."""

    name = "bf16x6_gather"

    def __init__(self, product: HopperGather | None = None) -> None:
        """``product`` computes the products of parts."""
        self._product = product or HopperGather(parts=float_parts.PARTS)

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        if (reason := NEEDS.why_not(work, device)) is not None:
            return reason
        if work.precision == "high":
            return "TF32 is faster, and precise enough for what was requested"
        if (reason := float_parts.why_not_split(work)) is not None:
            return reason
        return self._product.why_not(_of_parts(work)[0], device)

    def launches(self, work: ConvWork, device: CudaDevice) -> Fragment:
        parts, source, weight = _of_parts(work)
        product = self._product.launches(parts, device)
        split = overlapping((*source.steps, *weight.steps), device, first=work.follows)
        time_s = product.expected_s
        return replace(
            product,
            kernel=f"{self.name}_{product.kernel}",
            steps=(*split, *product.steps),
            workspace=(*source.workspace, *weight.workspace, *product.workspace),
            expected_s=None if time_s is None else time_s + float_parts.split_s(work),
        )

    def instances(self) -> Iterable[Instance]:
        return [*float_parts.instances(), *self._product.instances()]


def _of_parts(work: ConvWork) -> tuple[ConvWork, float_parts.Prepared, float_parts.Prepared]:
    """Return the work on the parts of the operands, and how these are made."""
    source, weight = float_parts.split_source(work), float_parts.split_weight(work)
    x, y = work.x, work.y
    if work.direction == "bwd_data":
        y = source.operand
    else:
        x = source.operand
    parts = replace(work, dtype=DType.BFLOAT16, x=x, y=y, w=weight.operand, follows=True)
    return parts, source, weight
