"""Second stage of split-K for few results and many splits (lane_sum.cu)."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.elements import CUDA_TYPES, linear_grid
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import OVERLAPPING, CudaDevice
from convgrad_service.plans.cuda.program import Instance, Launch
from convgrad_service.plans.cuda.works import Operand

__all__ = ["lane_sum", "lane_sum_instances"]

BLOCK = 256
# Results per thread.
RESULTS = 4
# Enough threads to fill a GPU.
THREADS = 2**17
DTYPES = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32)


LaneSumArgs = structure("core/lane_sum.cu", "LaneSumArgs")


def lane_sum(
    partials: str,
    splits: int,
    extents: tuple[int, int, int, int, int, int],
    result: Operand,
    device: CudaDevice,
    *,
    accumulate: Operand | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
) -> Launch:
    """result = alpha * sum of partials[split] + beta * accumulate.

    Parameters
    ----------
    partials
        Buffer of shape [splits][results] in float32. Results are indexed row-major by ``extents``;
        their number is a multiple of four.

    Returns
    -------
    Launch
        May overlap the kernel before it (programmatic dependent launch).
    """
    results = prod(extents)
    lanes = 1
    while lanes < min(splits, 64) and results // RESULTS * lanes < THREADS:
        lanes *= 2
    args = LaneSumArgs(results=results, alpha=alpha, beta=beta, splits=splits, lanes=lanes)
    args.extent[:], args.stride[:] = extents, result.strides
    if accumulate is not None:
        args.accumulate_stride[:] = accumulate.strides
    return Launch(
        _instance(result.dtype),
        linear_grid(results // RESULTS * lanes, BLOCK),
        (BLOCK, 1, 1),
        pack(args, partials=partials, result=result, accumulate=accumulate),
        overlaps=device.capability >= OVERLAPPING,
    )


def lane_sum_instances() -> Iterable[Instance]:
    """One instance per result type."""
    return [_instance(dtype) for dtype in DTYPES]


def _instance(dtype: DType) -> Instance:
    return Instance("core/lane_sum.cu", "lane_sum", (("RESULT", CUDA_TYPES[dtype]),))
