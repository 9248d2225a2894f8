"""The reference of max pooling and of Ascend's tensor formats: loops, from the definition."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.numerics.reference import (
    Float,
    Padding,
    Reference,
    Sizes,
    padding_pairs,
    per_dimension,
    pool_output_size,
)


def maxpool_fwd(
    input: NDArray[Any],
    kernel_size: Sizes,
    *,
    stride: Sizes | None = None,
    padding: Padding = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
) -> tuple[Float, NDArray[np.int64]]:
    """The maximum of each window and its flat index in the plane (n, c).

    The first maximum wins a tie, a NaN wins over any number, of several NaNs the last.
    Raises ValueError where a window has no valid element.
    """
    size = input.shape[2:]
    n = len(size)
    kernel, d = per_dimension(kernel_size, n), per_dimension(dilation, n)
    s = kernel if stride is None else per_dimension(stride, n)
    pad = padding_pairs(padding, n)
    output_size = pool_output_size(size, kernel, s, pad, d, ceil_mode)
    x = np.asarray(input).astype(np.float64)
    best = np.full((*x.shape[:2], *output_size), -np.inf)
    index = np.full(best.shape, -1, np.int64)
    # All windows at once, tap by tap: where each one's tap lies, along each dimension.
    for tap in np.ndindex(*kernel):
        at = np.ix_(
            *(np.arange(output_size[a]) * s[a] + tap[a] * d[a] - pad[a][0] for a in range(n))
        )
        valid, flat, inside = np.bool_(True), np.int64(0), []
        for a in range(n):
            valid = valid & (at[a] >= 0) & (at[a] < size[a])
            flat = flat * size[a] + at[a]
            inside.append(np.clip(at[a], 0, size[a] - 1))  # what is read there does not count
        value = x[(..., *inside)]
        wins = valid & ((index < 0) | (value > best) | np.isnan(value))
        best, index = np.where(wins, value, best), np.where(wins, flat, index)
    if (index < 0).any():
        window = tuple(int(place) for place in np.argwhere(index < 0)[0][2:])
        raise ValueError(f"window {window} has no valid element")
    return best, index


@np.errstate(all="ignore")
def maxpool_bwd(
    grad_output: NDArray[Any], indices: NDArray[Any], input_size: Sequence[int]
) -> Reference:
    """grad_input[n, c, i] = the sum of grad_output over the windows whose maximum lies at i."""
    dy = np.asarray(grad_output).astype(np.float64)
    plane = math.prod(input_size)
    shape = (*dy.shape[:2], plane)
    value, magnitude, terms = np.zeros(shape), np.zeros(shape), np.zeros(shape, np.int64)
    n, c = np.ix_(range(dy.shape[0]), range(dy.shape[1]))
    for window in np.ndindex(*dy.shape[2:]):
        at = (n, c, indices[(..., *window)])
        value[at] += dy[(..., *window)]
        magnitude[at] += np.abs(dy[(..., *window)])
        terms[at] += 1
    out = Reference(value, magnitude, terms)
    return out.map(lambda a: a.reshape(*dy.shape[:2], *input_size))


# --- Ascend's formats ----------------------------------------------------------------------------

N0 = 16


def c0_of(itemsize: int) -> int:
    """Channels in a cube: 16 for 16-bit types, 8 for float32 (32 bytes)."""
    return 32 // itemsize


def pack_ndc1hwc0(x: NDArray[Any], c0: int) -> NDArray[Any]:
    """(N, C, D, H, W) → (N, D, ceil(C/C0), H, W, C0), padded channels zero."""
    n, c, d, h, w = x.shape
    packed = np.zeros((n, d, math.ceil(c / c0), h, w, c0), x.dtype)
    for channel in range(c):
        packed[:, :, channel // c0, :, :, channel % c0] = x[:, channel]
    return packed


def unpack_ndc1hwc0(packed: NDArray[Any], channels: int) -> NDArray[Any]:
    """(N, D, C1, H, W, C0) → (N, C, D, H, W)."""
    n, d, _, h, w, c0 = packed.shape
    x = np.empty((n, channels, d, h, w), packed.dtype)
    for channel in range(channels):
        x[:, channel] = packed[:, :, channel // c0, :, :, channel % c0]
    return x


def pack_fractal_z_3d(weight: NDArray[Any], groups: int, c0: int) -> NDArray[Any]:
    """(K, C/groups, D, H, W) → (groups*D*C1*H*W, N1, 16, C0), the groups one after another."""
    k_all, c_group, depth, height, width = weight.shape
    k_group = k_all // groups
    c1, n1 = math.ceil(c_group / c0), math.ceil(k_group / N0)
    packed = np.zeros((groups * depth * c1 * height * width, n1, N0, c0), weight.dtype)
    for k, c, d, h, w in np.ndindex(*weight.shape):
        group, k_in = divmod(k, k_group)
        row = (((group * depth + d) * c1 + c // c0) * height + h) * width + w
        packed[row, k_in // N0, k_in % N0, c % c0] = weight[k, c, d, h, w]
    return packed


def unpack_fractal_z_3d(
    packed: NDArray[Any], weight_size: Sequence[int], groups: int
) -> NDArray[Any]:
    """The inverse; `weight_size` is [K, C/groups, D, H, W]."""
    k_all, c_group, depth, height, width = weight_size
    c0 = packed.shape[3]
    k_group, c1 = k_all // groups, math.ceil(c_group / c0)
    weight = np.empty(tuple(weight_size), packed.dtype)
    for k, c, d, h, w in np.ndindex(*weight.shape):
        group, k_in = divmod(k, k_group)
        row = (((group * depth + d) * c1 + c // c0) * height + h) * width + w
        weight[k, c, d, h, w] = packed[row, k_in // N0, k_in % N0, c % c0]
    return weight
