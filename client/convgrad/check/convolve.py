"""Convolutions in float64, tap by tap, together with their sums of magnitudes.

Arrays have a separate group axis: activations are (N, G, C, *spatial), weights (G, K, C, *kernel),
in any element type. Padding is never multiplied, so infinities do not become 0*inf there. This
module shares no code with the kernels that it verifies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from convgrad.check.bounds import Float
from convgrad.check.geometry import Geometry

__all__ = ["Convolver", "NumpyConvolver", "wide"]

Array = NDArray[Any]
Both = tuple[Float, Float]
"""Values, and sums of magnitudes."""

# With fewer channels, matrix products are slower than elementwise ones.
_FEW = 16


class Convolver(Protocol):
    """Computes float64 convolutions, with NumPy or on a GPU."""

    name: str

    def forward(self, x: Array, w: Array, geometry: Geometry) -> Both:
        """Return the output (N, G, K, *output) of an input and a weight."""
        ...

    def backward_data(self, y: Array, w: Array, geometry: Geometry) -> Both:
        """Return the input gradient (N, G, C, *input) of an output gradient and a weight."""
        ...

    def backward_weight(self, x: Array, y: Array, geometry: Geometry) -> Both:
        """Return the weight gradient (G, K, C, *kernel) of an input and an output gradient."""
        ...


def wide(array: Array) -> Float:
    """Convert to C-contiguous float64."""
    return np.ascontiguousarray(array).astype(np.float64)


class NumpyConvolver:
    """A `Convolver` with NumPy matrix products; ``check`` is called between steps and may raise."""

    name = "cpu"

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        self._check = check

    @np.errstate(all="ignore")
    def forward(self, x: Array, w: Array, geometry: Geometry) -> Both:
        """See `Convolver`."""
        x, w = wide(x), wide(w)
        shape = (*x.shape[:2], w.shape[1], *geometry.output_size)
        return self._products(x, w, shape, geometry, gather=True)

    @np.errstate(all="ignore")
    def backward_data(self, y: Array, w: Array, geometry: Geometry) -> Both:
        """See `Convolver`."""
        y, w = wide(y), wide(np.swapaxes(w, 1, 2))
        shape = (*y.shape[:2], w.shape[1], *geometry.input_size)
        return self._products(y, w, shape, geometry, gather=False)

    def _products(
        self, source: Float, w: Float, shape: Sequence[int], geometry: Geometry, *, gather: bool
    ) -> Both:
        """Accumulate the product of each tap; the forward pass gathers, the backward scatters."""
        value, magnitude = np.zeros(shape), np.zeros(shape)
        sources = source, np.abs(source)
        # Taps first: a matrix whose elements are apart would be multiplied without BLAS.
        by_tap = np.ascontiguousarray(np.moveaxis(w, (0, 1, 2), (-3, -2, -1)))
        weights = by_tap, np.abs(by_tap)
        everything: Any = (slice(None),) * 3
        for tap in geometry.taps():
            self._check()
            met = geometry.meeting(tap)
            if met is None:
                continue
            taken, put = met if gather else met[::-1]
            for found, from_, weight in zip((value, magnitude), sources, weights, strict=True):
                product = _product(weight[tuple(tap)], from_[(*everything, *taken)])
                found[(*everything, *put)] += product
        return value, magnitude

    @np.errstate(all="ignore")
    def backward_weight(self, x: Array, y: Array, geometry: Geometry) -> Both:
        """See `Convolver`."""
        x, y = wide(x), wide(y)
        shape = (x.shape[1], y.shape[2], x.shape[2], *geometry.kernel_size)
        value, magnitude = np.zeros(shape), np.zeros(shape)
        xs, ys = (x, np.abs(x)), (y, np.abs(y))
        everything: Any = (slice(None),) * 3
        for tap in geometry.taps():
            self._check()
            met = geometry.meeting(tap)
            if met is None:
                continue
            taken, put = met
            for found, from_, grad in zip((value, magnitude), xs, ys, strict=True):
                a = _by_group(grad[(*everything, *put)])
                b = _by_group(from_[(*everything, *taken)])
                one: Any = (..., *tap)
                found[one] = a @ b.swapaxes(1, 2)
        return value, magnitude


def _product(w: Float, x: Float) -> Float:
    """Multiply (G, K, C) by (N, G, C, *spatial)."""
    groups, out_channels, channels = w.shape
    ones = (1,) * (x.ndim - 3)
    if channels * out_channels <= _FEW:
        total = w[None, :, :, 0].reshape(1, groups, out_channels, *ones) * x[:, :, :1]
        for c in range(1, channels):
            total += w[None, :, :, c].reshape(1, groups, out_channels, *ones) * x[:, :, c : c + 1]
        return total
    flat = x.reshape(*x.shape[:3], prod(x.shape[3:]))
    return (w @ flat).reshape(x.shape[0], groups, out_channels, *x.shape[3:])


def _by_group(x: Float) -> Float:
    """Rearrange (N, G, C, *spatial) to (G, C, N*spatial)."""
    return np.ascontiguousarray(np.moveaxis(x, 0, 2)).reshape(*x.shape[1:3], -1)
