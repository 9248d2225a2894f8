"""Convolution forward or input gradient as a tiled GEMM on the FMA units."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from convgrad.dtypes import FLOATING, DType
from convgrad_service.backends.cuda.kernels.fallback.gather_args import gather_args
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Solver
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import ConvWork
from convgrad_service.problems.sizes import Size3

__all__ = ["GatherTile"]

BLOCK = 256
# The tile of the kernel, and the source channels of one step.
PIXELS, CHANNELS, STEP = 128, 64, 16


class GatherTile(Solver[ConvWork, Size3]):
    """fwd and bwd_data where a group has the channels to fill a tile, in any dtype and layout.

    Float32 in true float32, also where ``precision: high`` would let it use TF32.

    A configuration is the nonempty stride phases of the result along each dimension.
    """

    name = "gather_tile"

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`.

        Judged by channels alone: a problem in pieces must choose as the whole does, so that sums
        have one order.
        """
        read, written = work.channels
        if written < CHANNELS // 4:
            return f"{written} result channels per group would leave most of a tile of {CHANNELS}"
        if read < STEP // 2:
            return f"{read} source channels per group would leave most of a step of {STEP}"
        return super().why_not(work, device)

    def solve(self, work: ConvWork, device: CudaDevice) -> Size3:
        d, h, w = (min(pair) for pair in zip(_step(work), work.sizes[1], strict=True))
        return d, h, w

    def fragment(self, work: ConvWork, device: CudaDevice, phases: Size3) -> Fragment:
        # Phase 0 is the largest.
        extents = (ceil_div(*pair) for pair in zip(work.sizes[1], _step(work), strict=True))
        pixels = ceil_div(work.batch * prod(extents), PIXELS)
        blocks = prod(phases) * work.groups * pixels * ceil_div(work.channels[1], CHANNELS)
        arguments = gather_args(work, int(work.sides[0].channels_last), phases)
        launch = Launch(_instance(work.dtype), (blocks, 1, 1), (BLOCK, 1, 1), arguments)
        return Fragment(f"{self.name}_{work.direction}", (launch,))

    def instances(self) -> Iterable[Instance]:
        return [_instance(dtype) for dtype in FLOATING]


def _instance(dtype: DType) -> Instance:
    return Instance.of("fallback/gather_tile.cu", ELEMENT=dtype)


def _step(work: ConvWork) -> Size3:
    return work.stride if work.direction == "bwd_data" else (1, 1, 1)
