"""The adjoint check: <result, z> must equal the same product through the adjoint operation."""

from __future__ import annotations

import zlib
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad.check.bounds import FACTORS, SUMS, Float, Reference, allowed_error
from convgrad.check.convolve import Convolver, wide
from convgrad.check.philox import philox
from convgrad.check.references import Linear, Span, Target, spans_of
from convgrad.contract.verification import Adjointness

__all__ = ["AdjointCheck", "adjoint_side"]

_SEED = 1
_WORDS = 4 * 32
"""Number of signs from one block of random numbers."""


class AdjointCheck:
    """Sums <result, z> part by part; `outcome` compares it with the adjoint's side.

    The elements of z are +1 or -1, so that products are not rounded.
    """

    def __init__(self, target: Target, result: NDArray[Any], factors: str, sums: str) -> None:
        self.target = target
        self._c, self._coarser = FACTORS[factors], SUMS[sums]
        self._seen = target.see(result).array
        self._dtype = result.dtype
        self._signs = _signs(target.name, target.shape)
        self._left = self._allowed = self._magnitude = 0.0

    def add(self, span: Span, ref: Reference) -> None:
        """Add a part of the result."""
        cut = slice(*span)
        with np.errstate(all="ignore"):
            self._left += float((self._seen[cut].astype(np.float64) * self._signs[cut]).sum())
            self._allowed += float(allowed_error(ref, self._dtype, self._c, self._coarser).sum())
            self._magnitude += float(ref.magnitude.sum())

    def outcome(self, convolver: Convolver) -> Adjointness:
        """Compute the adjoint's side and compare the two within the bounds."""
        with np.errstate(all="ignore"):
            if self.target.linear is not None:
                right = adjoint_side(self.target.linear, self._signs, convolver)
            else:
                assert self.target.adjoint is not None  # noqa: S101 - others are not checked
                right = self.target.adjoint(self._signs)
        # The rounding error of float64 on both sides.
        allowed = self._allowed + 2.0**-45 * self._magnitude
        if not np.isfinite([self._left, right, allowed]).all():
            return Adjointness(applies=False, reason="some values are not finite")
        return Adjointness(
            applies=True,
            left=self._left,
            right=right,
            allowed=allowed,
            passed=abs(self._left - right) <= allowed,
        )


def _signs(name: str, shape: tuple[int, ...]) -> Float:
    count = prod(shape)
    blocks = np.arange(-(-count // _WORDS), dtype=np.uint64)
    words = philox(blocks, (zlib.crc32(name.encode()), 1), _SEED).view(np.uint8)
    bits = np.unpackbits(words.reshape(-1))[:count]
    return (bits.astype(np.float64) * 2.0 - 1.0).reshape(shape)


@np.errstate(all="ignore")
def adjoint_side(linear: Linear, z: Float, convolver: Convolver) -> float:
    """Return <output, z> of a convolution's output as the adjoint convolution computes it."""
    first, second, geometry = linear.first, linear.second, linear.geometry
    total = 0.0
    for begin, end in spans_of(len(first), max(prod(first.shape[1:]), prod(z.shape[1:]))):
        if linear.kind == "forward":  # <conv(x, w), z> = <x, bwd_data(z, w)>
            back, _ = convolver.backward_data(z[begin:end], second, geometry)
            total += float((wide(first[begin:end]) * back).sum())
        elif linear.kind == "backward_data":  # <bwd_data(y, w), z> = <y, conv(z, w)>
            out, _ = convolver.forward(z[begin:end], second, geometry)
            total += float((wide(first[begin:end]) * out).sum())
        else:  # <bwd_weight(x, y), z> = <conv(x, z), y>
            out, _ = convolver.forward(first[begin:end], z, geometry)
            total += float((wide(second[begin:end]) * out).sum())
    total *= linear.scale
    if linear.added is not None:
        total += float((np.broadcast_to(linear.added, z.shape) * z).sum())
    return total
