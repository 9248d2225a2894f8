"""By how much rounding may change each element: the one bound that a server and its tests hold to.

    |out - ref| <= u_out*|ref| + (c + L*u_acc)*S + slack

S is the sum of the magnitudes of that element's terms and L how many there are: no chain of
additions is longer. u_acc is 2^-24 (float64: 2^-53, twice, for the reference rounds as well); c is
what rounding the factors costs (0 for FMA units, 2^-10 for TF32). Near zero the spacing of
subnormals joins in, and where float16 overflows, the reference does so too. NaNs and infinities
must lie where the reference has them.
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

# Half the distance from 1 to the next number: the relative error of one rounding.
U = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}

FACTORS = {"exact": 0.0, "tf32": 2.0**-10, "tf32_truncated": 2.0**-9, "bfloat16": 2.0**-7}
"""What rounding both factors of a product costs, of the product."""

SUMS = {"float32": 1.0, "tensor_core": 2.0}
"""How much worse than rounding to nearest each addition is."""


@dataclass(frozen=True)
class Reference:
    """One output: its value, S = sum |a*b|, the number of terms, all of the value's shape.

    `slack` is an absolute error that the inputs of the last step may already carry: the fused
    forward's intermediate is rounded once, and that error travels on.
    """

    value: Float
    magnitude: Float
    terms: NDArray[np.int64]
    slack: Float | float = 0.0

    def map(self, move: Callable[[NDArray[Any]], NDArray[Any]]) -> Reference:
        """The same with its arrays moved: transposed, sliced, packed."""
        slack = move(self.slack) if isinstance(self.slack, np.ndarray) else self.slack
        return Reference(move(self.value), move(self.magnitude), move(self.terms), slack)


@dataclass(frozen=True)
class Worst:
    """The element that uses most of its allowance."""

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
    """NumPy's finfo, for bfloat16 too."""
    return ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]


def rounded(value: Float, dtype: np.dtype[Any]) -> Float:
    """float64 rounded once to `dtype`, and back; bfloat16 without passing through float32."""
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype != ml_dtypes.bfloat16:
            return value.astype(dtype).astype(np.float64)
        # Scale so that the last of the 8 kept bits is a unit, round half to even, scale back.
        _, exponent = np.frexp(value)
        unit = np.ldexp(1.0, np.maximum(exponent - 8, -133))
        near = np.where(np.isfinite(value), np.rint(value / unit) * unit, value)
        return np.where(np.abs(near) > float(limits(dtype).max), np.inf * near, near)


def _smallest(dtype: np.dtype[Any]) -> float:
    """The spacing of the subnormals."""
    return float(limits(dtype).smallest_subnormal)


def allowed_error(
    ref: Reference, dtype: np.dtype[Any], c: float = 0.0, coarser: float = 1.0
) -> Float:
    """The right side of the bound, element by element; ``coarser`` is of `SUMS`."""
    double = dtype == np.float64
    u_acc = 2 * U["float64"] if double else coarser * U["float32"]
    eta_acc = _smallest(np.dtype(np.float64 if double else np.float32))
    with np.errstate(invalid="ignore", over="ignore"):
        summed = (c + ref.terms * u_acc) * ref.magnitude + ref.terms * eta_acc + ref.slack
        # What is rounded at the end is the sum with its error.
        return U[dtype.name] * (np.abs(ref.value) + summed) + summed + _smallest(dtype) / 2


def shares(found: Float, dtype: np.dtype[Any], ref: Reference, allowed: Float) -> Float:
    """The error of each element as a share of what is allowed; infinite where a NaN or an infinity
    does not lie where the reference has it."""
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
    # An infinity is right where the allowance reaches past the largest number.
    low, high = rounded(value - allowed, dtype), rounded(value + allowed, dtype)
    right = np.isinf(found) & ((found == low) | (found == high))
    right |= np.isnan(found) & np.isnan(value)
    return np.where(right, 0.0, np.inf)


def worst(out: NDArray[Any], ref: Reference, c: float = 0.0) -> Worst | None:
    """The element that uses most of its allowance; None for an empty array."""
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
