"""The bounded gate: checks that an answer is within the rounding error of its arithmetic.

``|answer - reference| <= u_out*|reference| + L*u_acc*S`` for every element, where S is the sum of
the magnitudes of the element's products and L their number. The reference is a formula of products
and sums, so the same formula applied to magnitudes gives S, and applied to ones gives L.
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
# Error of one addition. Products of 16-bit types may be summed by tensor cores, which truncate.
_ADDITION = {
    DType.FLOAT16: 2.0**-23,
    DType.BFLOAT16: 2.0**-23,
    DType.FLOAT32: 2.0**-24,
    DType.FLOAT64: 2.0**-53,
}


@dataclass(frozen=True, slots=True)
class Expected:
    """The expected answer and the allowed error of each element."""

    value: NDArray[Any]
    allowed: NDArray[np.float64]
    dtype: np.dtype[Any]

    def rearranged(self, layout: Callable[[NDArray[Any]], NDArray[Any]]) -> Expected:
        """Convert the values and the bounds to another layout."""
        return Expected(layout(self.value), layout(self.allowed), self.dtype)


def bounded(formula: Formula, *tensors: NDArray[Any], out: DTypeLike | None = None) -> Expected:
    """Evaluate the formula in float64, with the error bound of the tensors' dtype.

    ``out`` is the dtype of the answer if it differs from that of the tensors.
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
    """Expect a value to within ``terms`` rounding errors of ``magnitude``."""
    out_dtype = np.dtype(dtype if out is None else out)
    allowed = _of(_ROUNDING, out_dtype) * np.abs(value)
    return Expected(value, allowed + terms * _of(_ADDITION, np.dtype(dtype)) * magnitude, out_dtype)


def exactly(value: NDArray[Any], dtype: DTypeLike) -> Expected:
    """Expect an exact answer, such as the maxima of a pooling or their indices."""
    return Expected(value, np.zeros(value.shape), np.dtype(dtype))


def worst_share(answer: ArrayLike, expected: Expected) -> float:
    """Return the largest error relative to its bound.

    It is infinite if the answer has the wrong shape or dtype, is not finite, or is wrong where it
    must be exact.
    """
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
