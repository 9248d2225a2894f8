"""Device names of element types and activations, and small helpers of the launchers."""

from __future__ import annotations

from convgrad.dtypes import DType
from convgrad_service.plans.cuda.program import ceil_div

__all__ = ["ACTIVATIONS", "CUDA_TYPES", "MAX_BLOCKS", "linear_grid"]

CUDA_TYPES = {
    DType.FLOAT16: "f16",
    DType.BFLOAT16: "bf16",
    DType.FLOAT32: "float",
    DType.FLOAT64: "double",
    DType.INT32: "int",
    DType.INT64: "long long",
}
"""The names in ``elements.cuh``."""

ACTIVATIONS = {"none": 0, "relu": 1, "relu6": 2, "silu": 3}
"""The codes in ``epilogue.cuh``."""

MAX_BLOCKS = 2**31 - 1
"""The largest grid along the first dimension."""


def linear_grid(threads: int, block: int) -> tuple[int, int, int]:
    """The 1D grid of blocks of ``block`` threads that covers ``threads``."""
    return ceil_div(threads, block), 1, 1
