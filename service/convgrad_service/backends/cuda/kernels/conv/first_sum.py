"""Second stage of split-K of a first layer's wgrad: few results, many splits (first_sum.cu)."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.limits import (
    DTYPES,
    Requirements,
    why_not_32bit_positions,
)
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import OVERLAPPING, CudaDevice
from convgrad_service.plans.cuda.program import Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["first_sum", "first_sum_instances", "results_of", "why_not_first"]

WARPS = 16
RESULTS = 32
MOST_CHANNELS = 8
"""The most channels of the input."""
MAX_INDEX = 2**31 - 1
# The last block may index past the last result.
MOST_RESULTS = 2**31 - RESULTS


FirstSumArgs = structure("conv/first_sum.cu", "FirstSumArgs")


def results_of(work: ConvWork) -> int:
    """Return the number of elements of the weight."""
    return work.out_channels * work.in_channels * work.taps


def why_not_first(work: ConvWork, device: CudaDevice, needs: Requirements) -> str | None:
    """Return why no kernel for a first layer's wgrad takes this, or None."""
    if (reason := needs.why_not(work, device)) is not None:
        return reason
    if work.in_channels > MOST_CHANNELS:
        return f"{work.in_channels} channels of the input are more than {MOST_CHANNELS}"
    if max(work.pixels, prod(work.input) * work.in_channels) > MAX_INDEX:
        return "positions are more than 32 bits count"
    if results_of(work) > MOST_RESULTS:
        return f"{results_of(work)} results are more than {MOST_RESULTS}"
    return why_not_32bit_positions(work)


def first_sum(work: ConvWork, partials: str, splits: int, device: CudaDevice) -> Launch:
    """Return the launch that reduces the partial sums and applies the epilogue."""
    _, k, c, *kernel = work.w.strides
    args = FirstSumArgs()
    args.extent[:] = (work.out_channels, *work.kernel, work.in_channels)
    args.stride[:] = (k, *kernel, c)
    args.results, args.splits = results_of(work), splits
    args.alpha, args.beta = work.alpha, work.beta
    return Launch(
        _instance(work.result_dtype),
        (ceil_div(args.results, RESULTS), 1, 1),
        (32 * WARPS, 1, 1),
        pack(args, partials=partials, result=work.w, accumulate=work.accumulate),
        overlaps=device.capability >= OVERLAPPING,
    )


def first_sum_instances() -> Iterable[Instance]:
    """Return one instance per result type."""
    return map(_instance, DTYPES)


def _instance(dtype: DType) -> Instance:
    return Instance.of("conv/first_sum.cu", RESULT=dtype, WARPS=WARPS)
