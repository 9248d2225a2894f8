"""The two gates of numerical trust: equal to the bit where arithmetic is exact, bounded elsewhere.

The bounded gate allows each element what rounding can do to it and no more:

    |out - ref| <= u_out*|ref| + (c + L*u_acc)*S + slack

S is the sum of the magnitudes of that element's terms and L how many there are: no chain of
additions is longer. u_acc is 2^-24 (float64: 2^-53, twice, for the reference rounds as well); c is
what rounding the factors costs (0 for FMA units, 2^-10 for TF32). Near zero the spacing of
subnormals joins in, and where float16 overflows, the reference does so too. NaNs and infinities
must lie where the reference has them. Every element is checked; a failure names the worst.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tests.reference import Float, Reference

# Half the distance from 1 to the next number: the relative error of one rounding.
U = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}


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


def allowed_error(ref: Reference, dtype: np.dtype[Any], c: float = 0.0) -> Float:
    """The right side of the bound, element by element."""
    double = dtype == np.float64
    u_acc = 2 * U["float64"] if double else U["float32"]
    eta_acc = _smallest(np.dtype(np.float64 if double else np.float32))
    with np.errstate(invalid="ignore", over="ignore"):
        summed = (c + ref.terms * u_acc) * ref.magnitude + ref.terms * eta_acc + ref.slack
        # What is rounded at the end is the sum with its error.
        return U[dtype.name] * (np.abs(ref.value) + summed) + summed + _smallest(dtype) / 2


def worst(out: NDArray[Any], ref: Reference, c: float = 0.0) -> Worst | None:
    """The element that uses most of its allowance; None for an empty array."""
    if out.shape != ref.value.shape:
        raise AssertionError(f"shape {out.shape}, expected {ref.value.shape}")
    if out.size == 0:
        return None
    found = out.astype(np.float64)
    allowed = allowed_error(ref, out.dtype, c)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        share = np.abs(found - ref.value) / allowed
        # An infinity is right where the allowance reaches past the largest number.
        low, high = rounded(ref.value - allowed, out.dtype), rounded(ref.value + allowed, out.dtype)
        overflow = np.isinf(found) & ((found == low) | (found == high))
        share = np.where(overflow | (found == ref.value), 0.0, share)
        share = np.where(np.isnan(found) & np.isnan(ref.value), 0.0, share)
        share = np.where(np.isnan(share), np.inf, share)
    at = np.unravel_index(int(np.argmax(share)), share.shape)
    index = tuple(int(i) for i in at)
    return Worst(
        index, float(share[at]), float(found[at]), float(ref.value[at]), float(allowed[at])
    )


def assert_bounded(out: NDArray[Any], ref: Reference, what: str = "out", c: float = 0.0) -> float:
    """Gate two; returns the worst error as a share of the allowed one."""
    found = worst(out, ref, c)
    if found is None:
        return 0.0
    assert found.share <= 1.0, f"{what} ({out.dtype}{list(out.shape)}): {found}"
    return found.share


def assert_exact(out: NDArray[Any], ref: Reference, what: str = "out") -> None:
    """Gate one: the reference rounded once, to the bit (of two zeros the sign may differ)."""
    assert out.shape == ref.value.shape, f"{what}: shape {out.shape}, expected {ref.value.shape}"
    assert float(ref.magnitude.max(initial=0.0)) < 2.0**24, f"{what}: the sums are not exact"
    wanted = rounded(ref.value, out.dtype)
    found = out.astype(np.float64)
    wrong = ~((found == wanted) | (np.isnan(found) & np.isnan(wanted)))
    if wrong.any():
        index = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise AssertionError(
            f"{what} ({out.dtype}{list(out.shape)}): {int(wrong.sum())} of {wrong.size} elements "
            f"differ, first at {index}: found {found[index]!r}, expected {wanted[index]!r}"
        )


def assert_same_bits(a: NDArray[Any], b: NDArray[Any], what: str = "out") -> None:
    """Both arrays hold the same bytes, NaNs and signs of zeros included."""
    assert a.dtype == b.dtype, f"{what}: {a.dtype} and {b.dtype}"
    assert a.shape == b.shape, f"{what}: {a.shape} and {b.shape}"
    left = np.ascontiguousarray(a).reshape(-1).view(np.uint8).reshape(-1, a.dtype.itemsize)
    right = np.ascontiguousarray(b).reshape(-1).view(np.uint8).reshape(-1, b.dtype.itemsize)
    differ = (left != right).any(axis=1)
    assert not differ.any(), (
        f"{what}: {int(differ.sum())} of {differ.size} elements differ in their bits, first at "
        f"flat index {int(np.argmax(differ))}"
    )
