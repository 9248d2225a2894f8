"""Pooling in float64: maxima and their indices, means, and where gradients go.

The windows of a dimension are a table of positions, one row an output and one column a tap, with -1
where a tap reads no input. Tables hold sliding, dilated and adaptive windows alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import product
from math import ceil, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad.check.bounds import Float, Reference
from convgrad.check.geometry import pairs, per_dimension

__all__ = ["Windows", "adaptive_windows", "divisors", "maxima", "means", "routed", "windows_of"]

# Roundings of a gradient's terms besides the additions: reciprocals of three extents, and products.
_RECIPROCALS = 6

Windows = tuple[NDArray[np.int64], ...]
"""A table for each dimension, [output, tap]."""


def windows_of(parameters: Mapping[str, Any], input_size: Sequence[int]) -> Windows:
    """The sliding windows of a pooling, with PyTorch's ``ceil_mode``."""
    return tuple(
        _inside(starts[:, None] + np.arange(kernel) * dilation, size)
        for size, (starts, kernel, dilation, _) in zip(
            input_size, _axes(parameters, input_size), strict=True
        )
    )


def adaptive_windows(input_size: Sequence[int], output_size: Sequence[int | None] | int) -> Windows:
    """The windows that divide an input into ``output_size``, as PyTorch divides it."""
    ndim = len(input_size)
    wanted = (output_size,) * ndim if isinstance(output_size, int) else tuple(output_size)
    tables = []
    for size, stated in zip(input_size, wanted, strict=True):
        outputs = np.arange(size if stated is None else stated, dtype=np.int64)
        starts, stops = outputs * size // len(outputs), -(-(outputs + 1) * size // len(outputs))
        positions = starts[:, None] + np.arange((stops - starts).max())
        tables.append(np.where(positions < stops[:, None], positions, -1))
    return tuple(tables)


def divisors(parameters: Mapping[str, Any], input_size: Sequence[int]) -> Float:
    """What the sum of each window of an average pooling is divided by."""
    override = parameters.get("divisor_override")
    counts = []
    axes = _axes(parameters, input_size)
    for size, (starts, kernel, _, (before, after)) in zip(input_size, axes, strict=True):
        low, high = (
            (-before, size + after) if parameters.get("count_include_pad", True) else (0, size)
        )
        counts.append(np.minimum(starts + kernel, high) - np.maximum(starts, low))
    found = reduce(np.multiply.outer, counts).astype(np.float64)
    return found if override is None else np.full_like(found, override)


def maxima(x: NDArray[Any], windows: Windows) -> tuple[Float, NDArray[np.int64]]:
    """The largest element of each window of (N, G, C, *input), and its flat index in its plane.

    The first maximum wins a tie; a NaN wins over any number, of several NaNs the last.
    """
    input_size = x.shape[3:]
    shape = (*x.shape[:3], *(len(table) for table in windows))
    best, index = np.zeros(shape), np.full(shape, -1, np.int64)
    plane = np.arange(prod(input_size)).reshape(input_size)
    for taps in product(*(range(table.shape[1]) for table in windows)):
        columns = [table[:, tap] for table, tap in zip(windows, taps, strict=True)]
        inside = reduce(np.logical_and.outer, [column >= 0 for column in columns])
        if not inside.any():
            continue
        at = np.ix_(*(np.maximum(column, 0) for column in columns))
        seen = x[(slice(None),) * 3 + at].astype(np.float64)
        wins = inside & (np.isnan(seen) | (index < 0) | (seen > best))
        best, index = np.where(wins, seen, best), np.where(wins, plane[at], index)
    return best, index


def means(
    x: NDArray[Any], windows: Windows, by: Float, input_size: Sequence[int] | None = None
) -> Reference:
    """The sum of each window divided by ``by``; with ``input_size`` the gradient of that.

    ``x`` is (N, G, C, *input), or (N, G, C, *output) for the gradient.
    """
    wide = x.astype(np.float64)
    if input_size is None:
        matrices = [
            _matrix(table, size).T for table, size in zip(windows, x.shape[3:], strict=True)
        ]
        found = _sums(wide, matrices)
        scale: Float | float = by
    else:
        matrices = [_matrix(table, size) for table, size in zip(windows, input_size, strict=True)]
        found, scale = _sums(wide / by, matrices), 1.0
    counts = _applied(np.ones((1, 1, 1, *x.shape[3:])), matrices)
    extra = 1 if input_size is None else _RECIPROCALS
    terms = np.broadcast_to(np.rint(counts).astype(np.int64) + extra, found[0].shape)
    return Reference(found[0] / scale, found[1] / np.abs(scale), terms)


def routed(grad: NDArray[Any], index: NDArray[np.int64], input_size: Sequence[int]) -> Reference:
    """Each gradient added to the input that its window's index names."""
    planes, each = prod(grad.shape[:3]), prod(input_size)
    rows = index.reshape(planes, -1).astype(np.int64)
    flat = (rows + np.arange(planes)[:, None] * each).reshape(-1)
    dy = np.ascontiguousarray(grad).astype(np.float64).reshape(-1)
    shape = (*grad.shape[:3], *input_size)
    with np.errstate(all="ignore"):
        value, magnitude, terms = (
            np.bincount(flat, weights, minlength=planes * each).reshape(shape)
            for weights in (dy, np.abs(dy), None)
        )
    return Reference(value, magnitude, terms.astype(np.int64))


def _axes(
    parameters: Mapping[str, Any], input_size: Sequence[int]
) -> list[tuple[NDArray[np.int64], int, int, tuple[int, int]]]:
    """The first position of each window, kernel, dilation and padding, for each dimension."""
    ndim = len(input_size)
    kernel = per_dimension(parameters["kernel_size"], ndim)
    stated = parameters.get("stride")
    stride = per_dimension(kernel if stated is None else stated, ndim)
    padding = pairs(parameters.get("padding", 0), ndim)
    dilation = per_dimension(parameters.get("dilation", 1), ndim)
    axes = []
    for size, k, s, pad, d in zip(input_size, kernel, stride, padding, dilation, strict=True):
        room = size + sum(pad) - d * (k - 1) - 1
        count = (ceil(room / s) if parameters.get("ceil_mode") else room // s) + 1
        if parameters.get("ceil_mode") and (count - 1) * s >= size + pad[0]:
            count -= 1  # a window may not begin behind the input and its padding before
        axes.append((np.arange(count, dtype=np.int64) * s - pad[0], k, d, pad))
    return axes


def _inside(positions: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    return np.where((positions >= 0) & (positions < size), positions, -1)


def _matrix(table: NDArray[np.int64], size: int) -> Float:
    """[output, input], with a 1 for each position of a window."""
    found = np.zeros((len(table), size + 1))
    np.put_along_axis(found, table, 1.0, axis=1)  # -1 is the last column
    return found[:, :size]


def _applied(x: Float, matrices: Sequence[Float]) -> Float:
    """Multiply the spatial dimensions by a matrix each."""
    for axis, matrix in enumerate(matrices, start=3):
        x = np.moveaxis(np.moveaxis(x, axis, -1) @ matrix, -1, axis)
    return x


def _sums(x: Float, matrices: Sequence[Float]) -> tuple[Float, Float]:
    """Sums and sums of magnitudes; a zero of a matrix must not meet an infinity."""
    finite = np.isfinite(x)
    numbers = np.where(finite, x, 0.0)
    value, magnitude = _applied(numbers, matrices), _applied(np.abs(numbers), matrices)
    if finite.all():
        return value, magnitude
    kinds = (np.isnan(x), x == np.inf, x == -np.inf)
    nan, above, below = (_applied(kind.astype(np.float64), matrices) > 0 for kind in kinds)
    value = np.where(above, np.inf, np.where(below, -np.inf, value))
    value = np.where(nan | (above & below), np.nan, value)
    return value, np.where(nan | above | below, np.inf, magnitude)
