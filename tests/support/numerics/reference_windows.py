"""The reference of average, adaptive and un-pooling: loops over windows, from the definition.

A window along one dimension is a `Window`: the input's positions that it has, and how many of them
count for a divisor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.numerics.reference import (
    Padding,
    Reference,
    Sizes,
    padding_pairs,
    per_dimension,
    pool_output_size,
)

# What is rounded beside the additions, a term: reciprocals of three sizes, and their products.
_FACTORS = 6


@dataclass(frozen=True)
class Window:
    """Positions start ... stop - 1; ``size`` of them count."""

    start: int
    stop: int
    size: int


Windows = Sequence[Sequence[Window]]


def sliding(
    size: Sequence[int],
    kernel_size: Sizes,
    *,
    stride: Sizes | None = None,
    padding: Padding = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> list[list[Window]]:
    """PyTorch's windows of each dimension, and the sizes that it divides by."""
    n = len(size)
    kernel, pads = per_dimension(kernel_size, n), padding_pairs(padding, n)
    steps = kernel if stride is None else per_dimension(stride, n)
    out = pool_output_size(size, kernel, steps, pads, 1, ceil_mode)
    found = []
    for a in range(n):
        windows = []
        for o in range(out[a]):
            start = o * steps[a] - pads[a][0]
            stop = min(start + kernel[a], size[a] + pads[a][1])
            padded = stop - start
            start, stop = max(start, 0), min(stop, size[a])
            windows.append(Window(start, stop, padded if count_include_pad else stop - start))
        found.append(windows)
    return found


def adaptive(size: Sequence[int], output_size: Any) -> list[list[Window]]:
    """PyTorch's windows of an adaptive pooling; None is the input's own size."""
    asked = (output_size,) * len(size) if isinstance(output_size, int) else tuple(output_size)
    found = []
    for extent, wanted in zip(size, asked, strict=True):
        out = extent if wanted is None else wanted
        bounds = [(o * extent // out, -(-(o + 1) * extent // out)) for o in range(out)]
        found.append([Window(start, stop, stop - start) for start, stop in bounds])
    return found


def _each(windows: Windows) -> Any:
    """(where in the output, which part of the input, the divisor) of each window."""
    for o in np.ndindex(*map(len, windows)):
        chosen = [windows[a][o[a]] for a in range(len(windows))]
        part = tuple(slice(window.start, window.stop) for window in chosen)
        yield (..., *o), (..., *part), math.prod(window.size for window in chosen)


@np.errstate(all="ignore")
def avg_fwd(x: NDArray[Any], windows: Windows, divisor: int | None = None) -> Reference:
    """The sum over each window, divided."""
    x = np.asarray(x).astype(np.float64)
    shape = (*x.shape[:2], *map(len, windows))
    value, magnitude, terms = np.zeros(shape), np.zeros(shape), np.zeros(shape, np.int64)
    axes = tuple(range(2, x.ndim))
    for o, part, size in _each(windows):
        by = size if divisor is None else divisor
        value[o] = x[part].sum(axis=axes) / by
        magnitude[o] = np.abs(x[part]).sum(axis=axes) / abs(by)
        terms[o] = x[part][0, 0].size + 1
    return Reference(value, magnitude, terms)


@np.errstate(all="ignore")
def avg_bwd(
    grad_output: NDArray[Any], windows: Windows, size: Sequence[int], divisor: int | None = None
) -> Reference:
    """Each window's gradient, divided, to all of its positions."""
    dy = np.asarray(grad_output).astype(np.float64)
    shape = (*dy.shape[:2], *size)
    value, magnitude, terms = np.zeros(shape), np.zeros(shape), np.zeros(shape, np.int64)
    sizes = {size if divisor is None else divisor for _, _, size in _each(windows)}
    # Over a common divisor, so that small integers are divided once, at the end.
    common = math.lcm(*sizes)
    around = (...,) + (None,) * len(size)
    for o, part, count in _each(windows):
        by = count if divisor is None else divisor
        value[part] += (dy[o] * (common // by))[around]
        magnitude[part] += np.abs(dy[o] / by)[around]
        terms[part] += 1
    return Reference(value / common, magnitude, terms + _FACTORS)


def max_fwd(x: NDArray[Any], windows: Windows) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """The maxima, and where they are: the first wins a tie, a NaN any number, the last NaN all."""
    x = np.asarray(x).astype(np.float64)
    size = x.shape[2:]
    shape = (*x.shape[:2], *map(len, windows))
    best, where = np.zeros(shape), np.zeros(shape, np.int64)
    places = np.arange(math.prod(size)).reshape(size)
    for o, part, _ in _each(windows):
        values = x[part].reshape(*x.shape[:2], -1)
        first = values.argmax(axis=2)
        nans = np.isnan(values)
        last_nan = values.shape[2] - 1 - nans[..., ::-1].argmax(axis=2)
        chosen = np.where(nans.any(axis=2), last_nan, first)
        best[o] = np.take_along_axis(values, chosen[..., None], axis=2)[..., 0]
        where[o] = places[part[1:]].reshape(-1)[chosen]
    return best, where


def unpool_fwd(x: NDArray[Any], indices: NDArray[Any], size: Sequence[int]) -> NDArray[Any]:
    """Each element to its index, in order, so that the last of those with one index stays."""
    out = np.zeros((*x.shape[:2], math.prod(size)))
    flat, to = x.reshape(*x.shape[:2], -1), indices.reshape(*x.shape[:2], -1)
    n, c = np.ix_(range(x.shape[0]), range(x.shape[1]))
    for i in range(flat.shape[2]):
        out[n, c, to[..., i]] = flat[..., i]
    return out.reshape(*x.shape[:2], *size)


def unpool_bwd(grad_output: NDArray[Any], indices: NDArray[Any]) -> NDArray[Any]:
    """Each index's element."""
    flat = grad_output.reshape(*grad_output.shape[:2], -1)
    found = np.take_along_axis(flat, indices.reshape(*indices.shape[:2], -1), axis=2)
    return found.reshape(indices.shape)
