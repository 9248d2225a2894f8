"""Weight gradient: one thread per element and part of the pixels."""

from __future__ import annotations

from convgrad_service.backends.cuda.kernels.fallback.weight_args import WeightFallback
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import ceil_div
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["WeightDirect"]

LANES = 32


class WeightDirect(WeightFallback):
    """bwd_weight of any problem: the last fallback."""

    name = "weight_direct"

    def solve(self, work: ConvWork, device: CudaDevice) -> int:
        return ceil_div(work.groups * work.out_channels * work.in_channels, LANES) * work.taps
