"""Weight gradient: one thread per element and part of the pixels."""

from __future__ import annotations

from convgrad_service.backends.cuda.kernels.core.elements import MAX_BLOCKS
from convgrad_service.backends.cuda.kernels.fallback.weight_args import WeightFallback
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import ceil_div
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["WeightDirect"]

LANES = 32


class WeightDirect(WeightFallback):
    """bwd_weight of any problem: the last fallback."""

    name = "weight_direct"

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        if self.blocks(work) > MAX_BLOCKS:
            return f"{self.blocks(work)} blocks are more than one grid holds"
        return None

    def blocks(self, work: ConvWork) -> int:
        return ceil_div(work.groups * work.out_channels * work.in_channels, LANES) * work.taps
