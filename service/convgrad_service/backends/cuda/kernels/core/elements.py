"""Device names of activations, and small helpers of the launchers."""

from __future__ import annotations

from convgrad.dtypes import DType
from convgrad_service.plans.cuda.program import CUDA_TYPES, ceil_div

__all__ = ["ACTIVATIONS", "CUDA_TYPES", "MAX_BLOCKS", "element_of", "linear_grid"]

ACTIVATIONS = {"none": 0, "relu": 1, "relu6": 2, "silu": 3}
"""The codes in ``epilogue.cuh``."""

MAX_BLOCKS = 2**31 - 1
"""The largest grid along the first dimension."""


def element_of(dtype: DType) -> str:
    """Return the device type of elements in kernels to which a 16-bit type is an argument
    (``bits16.cuh``)."""
    return "Bits16" if dtype in (DType.FLOAT16, DType.BFLOAT16) else CUDA_TYPES[dtype]


def linear_grid(threads: int, block: int) -> tuple[int, int, int]:
    """The 1D grid of blocks of ``block`` threads that covers ``threads``."""
    return ceil_div(threads, block), 1, 1
