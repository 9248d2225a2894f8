"""Convolution forward or input gradient as a tiled GEMM on the FMA units."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from convgrad.dtypes import FLOATING, DType
from convgrad_service.backends.cuda.kernels.core.elements import MAX_BLOCKS
from convgrad_service.backends.cuda.kernels.fallback.gather_args import gather_args
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["GatherTile"]

BLOCK = 256
# The tile of the kernel, and the source channels of one step.
PIXELS, CHANNELS, STEP = 128, 64, 16


class GatherTile:
    """fwd and bwd_data where a group has the channels to fill a tile, in any dtype and layout.

    Float32 in true float32, also where ``precision: high`` would let it use TF32.
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
        blocks = _grid(work)
        if blocks > MAX_BLOCKS:
            return f"{blocks} tiles are more than one grid holds"
        return None

    def launches(self, work: ConvWork, device: CudaDevice) -> Fragment:
        lanes = int(work.sides[0].channels_last)
        arguments = gather_args(work, lanes, _phases(work))
        launch = Launch(_instance(work.dtype), (_grid(work), 1, 1), (BLOCK, 1, 1), arguments)
        return Fragment(f"{self.name}_{work.direction}", (launch,))

    def instances(self) -> Iterable[Instance]:
        return [_instance(dtype) for dtype in FLOATING]


def _instance(dtype: DType) -> Instance:
    return Instance.of("fallback/gather_tile.cu", ELEMENT=dtype)


def _phases(work: ConvWork) -> tuple[int, int, int]:
    """Return the nonempty stride phases of the result along each dimension."""
    if work.direction == "fwd":
        return 1, 1, 1
    d, h, w = (min(pair) for pair in zip(work.stride, work.input, strict=True))
    return d, h, w


def _grid(work: ConvWork) -> int:
    phases = _phases(work)
    size = work.sizes[1]
    step = work.stride if work.direction == "bwd_data" else (1, 1, 1)
    # Phase 0 is the largest.
    pixels = work.batch * prod(ceil_div(*pair) for pair in zip(size, step, strict=True))
    tiles = ceil_div(pixels, PIXELS) * ceil_div(work.channels[1], CHANNELS)
    return prod(phases) * work.groups * tiles
