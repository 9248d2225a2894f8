"""The two gates of numerical trust: equal to the bit where arithmetic is exact, bounded elsewhere.

The bound itself is `convgrad.check.bounds`, the one that servers hold callers' results to. Every
element is checked; a failure names the worst.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad.check.bounds import Reference, U, Worst, allowed_error, limits, rounded, worst

__all__ = [
    "U",
    "Worst",
    "allowed_error",
    "assert_bounded",
    "assert_exact",
    "assert_same_bits",
    "limits",
    "rounded",
    "worst",
]


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
