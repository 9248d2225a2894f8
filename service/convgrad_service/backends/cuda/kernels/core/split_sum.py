"""Second stage of split-K: adds partial sums in order and applies the epilogue (split_sum.cu)."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from convgrad.dtypes import FLOATING, DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.elements import linear_grid
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import sum_dtype
from convgrad_service.plans.cuda.program import Instance, Launch
from convgrad_service.plans.cuda.works import Operand

__all__ = ["channel_last", "split_sum", "split_sum_instances"]

BLOCK = 256


SplitSumArgs = structure("core/split_sum.cu", "SplitSumArgs")


def split_sum(
    partials: str,
    splits: int,
    extents: tuple[int, int, int, int, int, int],
    result: Operand,
    summed: DType,
    *,
    accumulate: Operand | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
) -> Launch:
    """result = alpha * sum of partials[split] + beta * accumulate.

    ``partials`` has shape [splits][results] in type ``summed``; results are indexed row-major by
    ``extents``.
    """
    args = SplitSumArgs()
    args.extent[:], args.stride[:] = extents, result.strides
    if accumulate is not None:
        args.accumulate_stride[:] = accumulate.strides
    args.results, args.splits = prod(extents), splits
    args.alpha, args.beta = alpha, beta
    arguments = pack(args, partials=partials, result=result, accumulate=accumulate)
    instance = _instance(summed, result.dtype)
    return Launch(instance, linear_grid(prod(extents), BLOCK), (BLOCK, 1, 1), arguments)


def channel_last(weight: Operand) -> Operand:
    """Return a weight with its axes in the order of partial sums: (G, K, T, R, S, C)."""
    g, k, c, t, r, s = weight.strides
    return Operand(weight.buffer, weight.dtype, (g, k, t, r, s, c))


def split_sum_instances() -> Iterable[Instance]:
    """One instance per result type, with its accumulator type."""
    return [_instance(sum_dtype(dtype), dtype) for dtype in FLOATING]


def _instance(summed: DType, result: DType) -> Instance:
    return Instance.of("core/split_sum.cu", SUM=summed, RESULT=result)
