"""The bounded gate: whether an answer lies within the error that its arithmetic allows.

``|answer - reference| <= u_out*|reference| + L*u_acc*S`` for every element, where S is the sum
of the magnitudes of the element's products and L how many there are. The reference is a formula
that multiplies and adds, so S and L come from the same formula: of magnitudes, and of ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from convgrad.dtypes import DType

__all__ = ["Expected", "bounded", "exactly", "within", "worst_share"]

Formula = Callable[..., NDArray[np.float64]]

_ROUNDING = {
    DType.FLOAT16: 2.0**-11,
    DType.BFLOAT16: 2.0**-8,
    DType.FLOAT32: 2.0**-24,
    DType.FLOAT64: 2.0**-53,
}
# One addition's error. Tensor cores, which truncate, may have added up 16-bit products.
_ADDITION = {
    DType.FLOAT16: 2.0**-23,
    DType.BFLOAT16: 2.0**-23,
    DType.FLOAT32: 2.0**-24,
    DType.FLOAT64: 2.0**-53,
}


@dataclass(frozen=True, slots=True)
class Expected:
    """What an answer should be, and how far from it each element may lie."""

    value: NDArray[Any]
    allowed: NDArray[np.float64]
    dtype: np.dtype[Any]

    def rearranged(self, layout: Callable[[NDArray[Any]], NDArray[Any]]) -> Expected:
        """The same in another layout."""
        return Expected(layout(self.value), layout(self.allowed), self.dtype)


def bounded(formula: Formula, *tensors: NDArray[Any], out: DTypeLike | None = None) -> Expected:
    """The formula of the tensors in float64, and the error that their dtype's arithmetic allows.

    ``out`` is the dtype of the answer where it is not that of the tensors.
    """
    dtype = tensors[0].dtype
    out_dtype = dtype if out is None else np.dtype(out)
    exact = [tensor.astype(np.float64) for tensor in tensors]
    value = formula(*exact)
    magnitude = formula(*map(np.abs, exact))
    terms = formula(*map(np.ones_like, exact))
    return within(value, magnitude, terms, dtype, out_dtype)


def within(
    value: NDArray[np.float64],
    magnitude: NDArray[np.float64],
    terms: NDArray[Any],
    dtype: DTypeLike,
    out: DTypeLike | None = None,
) -> Expected:
    """A value, and the error of so many roundings of terms of that magnitude in all."""
    out_dtype = np.dtype(dtype if out is None else out)
    allowed = _of(_ROUNDING, out_dtype) * np.abs(value)
    return Expected(value, allowed + terms * _of(_ADDITION, np.dtype(dtype)) * magnitude, out_dtype)


def exactly(value: NDArray[Any], dtype: DTypeLike) -> Expected:
    """An answer in which nothing is rounded: the maxima of a pooling, or their places."""
    return Expected(value, np.zeros(value.shape), np.dtype(dtype))


def worst_share(answer: ArrayLike, expected: Expected) -> float:
    """The largest error as a share of the allowed one; infinite where the answer is of another
    shape or dtype, not finite, or wrong where nothing is rounded."""
    got = np.asarray(answer)
    if got.shape != expected.value.shape or got.dtype != expected.dtype:
        return float("inf")
    error = np.abs(got.astype(np.float64) - expected.value)
    share = np.divide(
        error, expected.allowed, out=np.full(error.shape, np.inf), where=expected.allowed > 0
    )
    share[error == 0] = 0
    share[np.isnan(share)] = np.inf
    return float(share.max())


def _of(table: dict[DType, float], dtype: np.dtype[Any]) -> float:
    return table[DType(dtype.name)]
