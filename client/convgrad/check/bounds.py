"""The rounding error bound of each element, used by the server and the tests alike.
    |out - ref| <= u_out*|ref| + (c + L*u_acc)*S + slack

S is the sum of the magnitudes of the element's terms and L their number, the longest possible
chain of additions. u_acc is 2^-24 (for float64 twice 2^-53, since the reference rounds as well); c
is the relative error of rounding the factors (0 for FMA units, 2^-10 for TF32). Near zero the
spacing of subnormals is added, and the reference overflows where float16 does. NaNs and infinities
must be in the same places as in the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

__all__ = [
    "FACTORS",
    "SUMS",
    "Float",
    "Reference",
    "U",
    "Worst",
    "allowed_error",
    "limits",
    "rounded",
    "shares",
    "worst",
]

Float = NDArray[np.float64]

# Half the distance from 1 to the next number: the unit roundoff.
U = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}

FACTORS = {"exact": 0.0, "tf32": 2.0**-10, "tf32_truncated": 2.0**-9, "bfloat16": 2.0**-7}
"""Relative error of a product from rounding both factors."""

SUMS = {"float32": 1.0, "tensor_core": 2.0}
"""Error of one addition, relative to rounding to nearest."""


@dataclass(frozen=True)
class Reference:
    """Reference of an output: value, magnitude S = sum |a*b| and number of terms, of one shape.

    `slack` is an absolute error already present in the inputs of the last step, such as the
    rounding of the fused forward's intermediate.
    """

    value: Float
    magnitude: Float
    terms: NDArray[np.int64]
    slack: Float | float = 0.0

    def map(self, move: Callable[[NDArray[Any]], NDArray[Any]]) -> Reference:
        """Apply a rearrangement, such as a transposition or slice, to all arrays."""
        slack = move(self.slack) if isinstance(self.slack, np.ndarray) else self.slack
        return Reference(move(self.value), move(self.magnitude), move(self.terms), slack)


@dataclass(frozen=True)
class Worst:
    """The element with the largest error relative to its bound."""

    index: tuple[int, ...]
    share: float
    found: float
    wanted: float
    allowed: float

    def __str__(self) -> str:
        return (
            f"worst at {self.index}: found {self.found!r}, expected {self.wanted!r}, "
            f"allowed error {self.allowed:.3g}, {self.share:.3g} of it used"
        )


def limits(dtype: np.dtype[Any]) -> Any:
    """Return NumPy's finfo; supports bfloat16."""
    return ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]


def rounded(value: Float, dtype: np.dtype[Any]) -> Float:
    """Round float64 once to ``dtype`` and convert back; bfloat16 does not go through float32."""
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype != ml_dtypes.bfloat16:
            return value.astype(dtype).astype(np.float64)
        # Scale so that the last of the 8 kept bits is 1, round half to even, scale back.
        _, exponent = np.frexp(value)
        unit = np.ldexp(1.0, np.maximum(exponent - 8, -133))
        near = np.where(np.isfinite(value), np.rint(value / unit) * unit, value)
        return np.where(np.abs(near) > float(limits(dtype).max), np.inf * near, near)


def _smallest(dtype: np.dtype[Any]) -> float:
    """Return the spacing of subnormal numbers."""
    return float(limits(dtype).smallest_subnormal)


def allowed_error(
    ref: Reference, dtype: np.dtype[Any], c: float = 0.0, coarser: float = 1.0
) -> Float:
    """Return the right side of the bound, element by element; ``coarser`` is a value of `SUMS`."""
    double = dtype == np.float64
    u_acc = 2 * U["float64"] if double else coarser * U["float32"]
    eta_acc = _smallest(np.dtype(np.float64 if double else np.float32))
    with np.errstate(invalid="ignore", over="ignore"):
        summed = (c + ref.terms * u_acc) * ref.magnitude + ref.terms * eta_acc + ref.slack
        # The final rounding applies to the sum including its error.
        return U[dtype.name] * (np.abs(ref.value) + summed) + summed + _smallest(dtype) / 2


def shares(found: Float, dtype: np.dtype[Any], ref: Reference, allowed: Float) -> Float:
    """Return the error of each element relative to its bound.

    It is infinite where a NaN or an infinity does not match the reference.
    """
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        share = np.abs(found - ref.value) / allowed
        share = np.where(found == ref.value, 0.0, share)
        unusual = ~np.isfinite(share)
        if unusual.any():
            share[unusual] = _unusual_shares(
                found[unusual], dtype, ref.value[unusual], allowed[unusual]
            )
    return share


def _unusual_shares(found: Float, dtype: np.dtype[Any], value: Float, allowed: Float) -> Float:
    # An infinity is correct if the bound reaches beyond the largest number.
    low, high = rounded(value - allowed, dtype), rounded(value + allowed, dtype)
    right = np.isinf(found) & ((found == low) | (found == high))
    right |= np.isnan(found) & np.isnan(value)
    return np.where(right, 0.0, np.inf)


def worst(out: NDArray[Any], ref: Reference, c: float = 0.0) -> Worst | None:
    """Return the element with the largest error relative to its bound; None for an empty array."""
    if out.shape != ref.value.shape:
        raise AssertionError(f"shape {out.shape}, expected {ref.value.shape}")
    if out.size == 0:
        return None
    found = out.astype(np.float64)
    allowed = allowed_error(ref, out.dtype, c)
    share = shares(found, out.dtype, ref, allowed)
    at = np.unravel_index(int(np.argmax(share)), share.shape)
    index = tuple(int(i) for i in at)
    return Worst(
        index, float(share[at]), float(found[at]), float(ref.value[at]), float(allowed[at])
    )
