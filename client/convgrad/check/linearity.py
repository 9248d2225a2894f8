"""The linearity check: f(x + y) must equal f(x) + f(y) within the bounds of the three results.

y is x with each element multiplied by -2, -1, -1/2, 0 or 1, and thus x + y is x with each element
multiplied by -1, 0, 1/2, 1 or 2: neither is rounded. In magnitude neither exceeds 2|x|, so the
reference of f(x) bounds the errors of all three results and no further reference is computed.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from convgrad.check.bounds import FACTORS, SUMS, Float, Reference, U, allowed_error
from convgrad.check.philox import draw
from convgrad.check.references import Span, Target
from convgrad.contract.verification import Element, Linearity

__all__ = ["LinearityCheck", "linear_pair"]

Array = NDArray[Any]

_LARGEST_FACTOR = 2.0
_U_DOUBLE = U["float64"]


def linear_pair(name: str, x: Array, seed: int = 0) -> tuple[Array, Array]:
    """Return y and x + y, for which a kernel is run to check that it is linear in x.

    Parameters
    ----------
    name
        Name of the tensor in the request, such as ``weight``.
    x
        The tensor.
    seed
        The elements are multiplied by ``draw("linear_" + name, …, seed, "integers")``, in which
        2 is replaced by -1/2.

    Returns
    -------
    tuple
        y and x + y, of the shape and dtype of x.

    Examples
    --------
    >>> y, total = convgrad.check.linear_pair("weight", weight)
    """
    factors = draw(f"linear_{name}", x.shape, "float64", seed, "integers")
    factors[factors == _LARGEST_FACTOR] = -0.5
    wide = x.astype(np.float64)
    return (wide * factors).astype(x.dtype), (wide * (1.0 + factors)).astype(x.dtype)


class LinearityCheck:
    """Compares f(x + y) with f(x) + f(y): call `add` with every part, and then read `outcome`."""

    def __init__(
        self, target: Target, results: tuple[Array, Array, Array], factors: str, sums: str
    ) -> None:
        """``results`` are f(x), f(y) and f(x + y)."""
        first, addend, total = (target.see(each) for each in results)
        self._dtype, self._index = results[0].dtype, first.index
        self._first, self._addend, self._total = first.array, addend.array, total.array
        self._c, self._coarser = FACTORS[factors], SUMS[sums]
        self._exceeding = 0
        self._worst: Element | None = None

    def add(self, span: Span, ref: Reference) -> None:
        """Add a part, with the reference of f(x)."""
        cut = slice(*span)
        first, addend, total = (
            each[cut].astype(np.float64) for each in (self._first, self._addend, self._total)
        )
        if first.size == 0:
            return
        with np.errstate(all="ignore"):
            wanted = first + addend
            allowed = allowed_error(ref, self._dtype, self._c, self._coarser)
            allowed = allowed + self._allowed(addend, ref) + self._allowed(total, ref)
            allowed += 2 * _U_DOUBLE * (np.abs(first) + np.abs(addend) + np.abs(total))
            share = np.abs(total - wanted) / allowed
            # 0 / 0: integers and selected elements are exact.
            share = np.where(total == wanted, 0.0, share)
            # Nothing follows where a result may overflow, or the reference is not finite.
            limit = float(ml_dtypes.finfo(self._dtype).max)  # type: ignore[no-untyped-call]
            size = _LARGEST_FACTOR * (ref.magnitude + np.abs(first)) + allowed
            limited = size <= limit
            defined = np.isfinite(first) & np.isfinite(addend) & np.isfinite(total)
        share = np.where(limited, np.where(defined, share, np.inf), 0.0)
        self._exceeding += int((share > 1.0).sum())
        at = int(np.argmax(share))
        if self._worst is None or share.flat[at] > self._worst.share:
            place = [int(each) for each in np.unravel_index(at, share.shape)]
            place[0] += span[0]
            self._worst = Element(
                index=self._index(place),
                value=float(total.flat[at]),
                reference=float(wanted.flat[at]),
                bound=float(allowed.flat[at]),
                share=float(share.flat[at]),
            )

    def _allowed(self, found: Float, ref: Reference) -> Float:
        """Return the bound of f(y) or f(x + y), whose references are not computed.

        The terms' magnitudes are at most twice those of f(x). The reference, which the bound's
        first term needs, differs from the result by at most the bound itself.
        """
        twice = Reference(
            found, _LARGEST_FACTOR * ref.magnitude, ref.terms, _LARGEST_FACTOR * ref.slack
        )
        own = allowed_error(twice, self._dtype, self._c, self._coarser)
        bound: Float = own / (1.0 - U[self._dtype.name])
        return bound

    @property
    def outcome(self) -> Linearity:
        """The result of the check."""
        return Linearity(passed=self._exceeding == 0, exceeding=self._exceeding, worst=self._worst)
