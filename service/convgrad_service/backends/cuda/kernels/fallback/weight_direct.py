"""Weight gradient: one thread per element and part of the pixels."""

from __future__ import annotations

from collections.abc import Iterable

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.core.elements import CUDA_TYPES, MAX_BLOCKS
from convgrad_service.backends.cuda.kernels.core.split_sum import split_sum_instances
from convgrad_service.backends.cuda.kernels.fallback.weight_args import (
    DTYPE_PAIRS,
    finish_split,
    split_pixels,
    weight_args,
)
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["WeightDirect"]

BLOCK, LANES = 256, 32


class WeightDirect:
    """bwd_weight of any problem: the last fallback."""

    name = "weight_direct"

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        if _blocks(work) > MAX_BLOCKS:
            return f"{_blocks(work)} blocks are more than one grid holds"
        return None

    def launches(self, work: ConvWork, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        blocks = _blocks(work)
        split = split_pixels(work, blocks, device)
        launch = Launch(
            _instance(work.dtype, work.result_dtype),
            (blocks * split.count, 1, 1),
            (BLOCK, 1, 1),
            weight_args(work, split),
        )
        after, workspace = finish_split(work, split)
        return Fragment(f"{self.name}/{split.count}", (launch, *after), workspace)

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        return [*(_instance(*pair) for pair in DTYPE_PAIRS), *split_sum_instances()]


def _instance(dtype: DType, result: DType) -> Instance:
    defines = ("ELEMENT", CUDA_TYPES[dtype]), ("RESULT", CUDA_TYPES[result])
    return Instance("fallback/weight_direct.cu", "weight_direct", defines)


def _blocks(work: ConvWork) -> int:
    """Return the blocks of one split."""
    return ceil_div(work.groups * work.out_channels * work.in_channels, LANES) * work.taps
