"""Convolution forward or input gradient: one thread per pixel and a few channels."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from convgrad.dtypes import FLOATING, DType
from convgrad_service.backends.cuda.kernels.core.elements import linear_grid
from convgrad_service.backends.cuda.kernels.fallback.gather_args import gather_args
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Solver
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["GatherDirect"]

BLOCK = 256
# Result channels of a thread, which share each element of the source that it reads.
CHANNELS = (1, 4)


class GatherDirect(Solver[ConvWork, int]):
    """fwd and bwd_data of any problem: the last fallback.

    A configuration is the result channels of a thread.
    """

    name = "gather_direct"

    def solve(self, work: ConvWork, device: CudaDevice) -> int:
        return CHANNELS[0] if work.channels[1] == 1 else CHANNELS[1]

    def fragment(self, work: ConvWork, device: CudaDevice, channels: int) -> Fragment:
        each = ceil_div(work.channels[1], channels)
        threads = work.batch * work.groups * prod(work.sizes[1]) * each
        launch = Launch(
            _instance(work.dtype, channels),
            linear_grid(threads, BLOCK),
            (BLOCK, 1, 1),
            gather_args(work, int(work.result.channels_last), (1, 1, 1)),
        )
        return Fragment(f"{self.name}_{work.direction}", (launch,))

    def instances(self) -> Iterable[Instance]:
        return [_instance(dtype, channels) for dtype in FLOATING for channels in CHANNELS]


def _instance(dtype: DType, channels: int) -> Instance:
    return Instance.of("fallback/gather_direct.cu", ELEMENT=dtype, CHANNELS=channels)
