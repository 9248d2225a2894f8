"""Max pooling in float64: maxima, their indices, and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad.check.bounds import Float, Reference
from convgrad.check.geometry import Geometry, pairs, per_dimension

__all__ = ["maxima", "pool_geometry", "routed"]


def pool_geometry(parameters: Any, input_size: Sequence[int]) -> Geometry:
    """Return the geometry of a pooling, with PyTorch's ``ceil_mode``."""
    ndim = len(input_size)
    kernel = per_dimension(parameters["kernel_size"], ndim)
    stated = parameters.get("stride")
    stride = per_dimension(kernel if stated is None else stated, ndim)
    padding = pairs(parameters.get("padding", 0), ndim)
    dilation = per_dimension(parameters.get("dilation", 1), ndim)
    output = []
    for size, k, s, pad, d in zip(input_size, kernel, stride, padding, dilation, strict=True):
        room = size + sum(pad) - d * (k - 1) - 1
        windows = (ceil(room / s) if parameters.get("ceil_mode") else room // s) + 1
        if parameters.get("ceil_mode") and (windows - 1) * s >= size + pad[0]:
            windows -= 1  # a window must begin inside the input or the padding before it
        output.append(windows)
    before = tuple(pad[0] for pad in padding)
    return Geometry(tuple(input_size), tuple(output), kernel, stride, before, dilation)


def maxima(x: NDArray[Any], geometry: Geometry) -> tuple[Float, NDArray[np.int64]]:
    """Return the maximum of each window of (N, G, C, *input), and its flat index in its plane.

    The first maximum wins a tie. A NaN wins over any number, and the last of several NaNs wins.
    """
    shape = (*x.shape[:3], *geometry.output_size)
    best = np.zeros(shape)
    index = np.full(shape, -1, np.int64)
    plane = np.arange(prod(geometry.input_size)).reshape(geometry.input_size)
    everything = (slice(None),) * 3
    for tap in geometry.taps():
        met = geometry.meeting(tap)
        if met is None:
            continue
        taken, put = met
        seen = x[(*everything, *taken)].astype(np.float64)
        held, at = best[(*everything, *put)], index[(*everything, *put)]
        wins = np.isnan(seen) | (at < 0) | (seen > held)
        best[(*everything, *put)] = np.where(wins, seen, held)
        index[(*everything, *put)] = np.where(wins, plane[taken], at)
    return best, index


def routed(grad: NDArray[Any], index: NDArray[np.int64], input_size: Sequence[int]) -> Reference:
    """Add each gradient to the input position that its window's index gives."""
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
