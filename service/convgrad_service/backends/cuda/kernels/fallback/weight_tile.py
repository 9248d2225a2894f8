"""Weight gradient as a tiled GEMM on the FMA units."""

from __future__ import annotations

from convgrad_service.backends.cuda.kernels.fallback.weight_args import WeightFallback
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import ceil_div
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["WeightTile"]

TILE = 64


class WeightTile(WeightFallback):
    """bwd_weight where a group has the channels to fill a tile, in any dtype and layout.

    Float32 in true float32, also where ``precision: high`` would let it use TF32.
    """

    name = "weight_tile"

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`; depends on channels only, like `GatherTile`."""
        if work.in_channels * work.out_channels < TILE * TILE // 16:
            return (
                f"{work.out_channels}x{work.in_channels} channels per group would leave most of a "
                f"tile of {TILE}x{TILE}"
            )
        return super().why_not(work, device)

    def solve(self, work: ConvWork, device: CudaDevice) -> int:
        tiles = ceil_div(work.in_channels, TILE) * ceil_div(work.out_channels, TILE)
        return work.groups * work.taps * tiles
