"""Convolution forward or input gradient: one thread per pixel and a few channels."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from convgrad.dtypes import FLOATING, DType
from convgrad_service.backends.cuda.kernels.core.elements import MAX_BLOCKS, linear_grid
from convgrad_service.backends.cuda.kernels.fallback.gather_args import gather_args
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["GatherDirect"]

BLOCK = 256
# Result channels of a thread, which share each element of the source that it reads.
CHANNELS = (1, 4)


class GatherDirect:
    """fwd and bwd_data of any problem: the last fallback."""

    name = "gather_direct"

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        if linear_grid(_threads(work), BLOCK)[0] > MAX_BLOCKS:
            return f"{_threads(work)} threads are more than one grid holds"
        return None

    def launches(self, work: ConvWork, device: CudaDevice) -> Fragment:
        instance = _instance(work.dtype, _channels(work))
        lanes = int(work.result.channels_last)
        launch = Launch(
            instance,
            linear_grid(_threads(work), BLOCK),
            (BLOCK, 1, 1),
            gather_args(work, lanes, (1, 1, 1)),
        )
        return Fragment(f"{self.name}_{work.direction}", (launch,))

    def instances(self) -> Iterable[Instance]:
        return [_instance(dtype, channels) for dtype in FLOATING for channels in CHANNELS]


def _instance(dtype: DType, channels: int) -> Instance:
    return Instance.of("fallback/gather_direct.cu", ELEMENT=dtype, CHANNELS=channels)


def _channels(work: ConvWork) -> int:
    return CHANNELS[0] if work.channels[1] == 1 else CHANNELS[1]


def _threads(work: ConvWork) -> int:
    blocks = ceil_div(work.channels[1], _channels(work))
    return work.batch * work.groups * prod(work.sizes[1]) * blocks
