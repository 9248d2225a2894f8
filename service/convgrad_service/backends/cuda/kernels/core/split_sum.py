"""Second stage of split-K: adds partial sums in order and applies the epilogue (split_sum.cu)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from convgrad.dtypes import FLOATING, DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.elements import linear_grid
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import sum_dtype
from convgrad_service.plans.cuda.program import Instance, Launch
from convgrad_service.plans.cuda.works import ConvWork, Operand

__all__ = ["channel_last", "split_sum", "split_sum_instances", "split_weight_sum"]

BLOCK = 256


SplitSumArgs = structure("core/split_sum.cu", "SplitSumArgs")


def split_sum(
    work: ConvWork,
    partials: str,
    splits: int,
    extents: Sequence[int],
    result: Operand,
    summed: DType = DType.FLOAT32,
    *,
    accumulate: Operand | None,
    slices: int = 1,
    overlaps: bool = False,
) -> Launch:
    """result = alpha * sum of partials[split] + beta * accumulate.

    ``partials`` has shape [splits][results] in type ``summed``; results are indexed row-major by
    the six ``extents``. Each of ``slices`` groups of a block's threads adds a part of the splits,
    and ``overlaps`` is for `Launch`.
    """
    args = SplitSumArgs()
    args.extent[:], args.stride[:] = extents, result.strides
    if accumulate is not None:
        args.accumulate_stride[:] = accumulate.strides
    args.results, args.splits = prod(extents), splits
    args.alpha, args.beta = work.alpha, work.beta
    return Launch(
        _instance(summed, result.dtype, slices),
        linear_grid(prod(extents), BLOCK // slices),
        (BLOCK, 1, 1),
        pack(args, partials=partials, result=result, accumulate=accumulate),
        overlaps=overlaps,
    )


def split_weight_sum(
    work: ConvWork, partials: str, splits: int, *, slices: int = 1, overlaps: bool = False
) -> Launch:
    """Return `split_sum` to a weight of float32 sums in the order G K T R S C."""
    accumulate = work.accumulate
    return split_sum(
        work,
        partials,
        splits,
        (work.groups, work.out_channels, *work.kernel, work.in_channels),
        channel_last(work.w),
        accumulate=None if accumulate is None else channel_last(accumulate),
        slices=slices,
        overlaps=overlaps,
    )


def channel_last(weight: Operand) -> Operand:
    """Return a weight with its axes in the order of partial sums: (G, K, T, R, S, C)."""
    g, k, c, t, r, s = weight.strides
    return Operand(weight.buffer, weight.dtype, (g, k, t, r, s, c))


def split_sum_instances(dtypes: Iterable[DType] = FLOATING, slices: int = 1) -> Iterable[Instance]:
    """One instance per result type, with its accumulator type."""
    return [_instance(sum_dtype(dtype), dtype, slices) for dtype in dtypes]


def _instance(summed: DType, result: DType, slices: int) -> Instance:
    return Instance.of("core/split_sum.cu", SUM=summed, RESULT=result, SLICES=slices)
