"""Reproducible random tensors: Philox 4x32-10 and three distributions based on it.

docs/reference/verify.md specifies them to the bit. The key is the seed. The counter of a block
consists of its number, the CRC-32 of the tensor's name, and 0; a block has four 32-bit words.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from convgrad.check.bounds import rounded
from convgrad.dtypes import DType

__all__ = ["draw", "fill", "philox", "spread_indices"]

Words = NDArray[np.uint32]

_ROUNDS = 10
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
# Blocks per step, so that their words stay in a core's cache.
_BLOCKS = 16384
_NORMAL_MEAN = 131070.0 * 2.0**32 + 2.0**31
_NORMAL_SCALE = float.fromhex("0x1.bb67ae8584caap-48")


def philox(counter: NDArray[np.uint64], high: tuple[int, int], key: int) -> Words:
    """Compute blocks of Philox 4x32-10, of shape (number of counters, 4).

    Parameters
    ----------
    counter
        The low 64 bits of each block's counter.
    high
        The other two words of the counter, low word first.
    key
        The 64-bit key.
    """
    c0, c1 = counter & _LOW, counter >> _SHIFT
    c2 = np.full_like(counter, high[0])
    c3 = np.full_like(counter, high[1])
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for turn in range(_ROUNDS):
        if turn:
            k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
        first, second = _M0 * c0, _M1 * c2
        c0 = (second >> _SHIFT) ^ c1 ^ np.uint64(k0)
        c2 = (first >> _SHIFT) ^ c3 ^ np.uint64(k1)
        c1, c3 = second & _LOW, first & _LOW
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def _uniform(words: Words) -> NDArray[np.float64]:
    return words.reshape(-1).astype(np.float64) * 2.0**-31 - 1.0


def _integers(words: Words) -> NDArray[np.float64]:
    fifths = (words.reshape(-1).astype(np.uint64) * np.uint64(5)) >> _SHIFT
    return fifths.astype(np.float64) - 2.0


def _normal(words: Words) -> NDArray[np.float64]:
    pairs = words.reshape(-1, 2).astype(np.uint64)
    halves = (pairs & np.uint64(0xFFFF)) + (pairs >> np.uint64(16))
    total = ((halves[:, 0] + halves[:, 1]) << _SHIFT) + (pairs[:, 0] ^ pairs[:, 1])
    return (total.astype(np.float64) - _NORMAL_MEAN) * _NORMAL_SCALE


_DISTRIBUTIONS: Mapping[str, tuple[Callable[[Words], NDArray[np.float64]], int]] = {
    "uniform": (_uniform, 4),
    "integers": (_integers, 4),
    "normal": (_normal, 2),
}


def fill(name: str, place: NDArray[Any], seed: int, distribution: str) -> None:
    """Fill ``place``, a C-contiguous array, with a generated tensor; see `draw`."""
    flat = place.reshape(-1)
    convert, each = _DISTRIBUTIONS[distribution]
    high = zlib.crc32(name.encode("ascii")), 0
    step = _BLOCKS * each
    for start in range(0, flat.size, step):
        stop = min(start + step, flat.size)
        counter = np.arange(start // each, -(-stop // each), dtype=np.uint64)
        values = convert(philox(counter, high, seed))[: stop - start]
        if flat.dtype == ml_dtypes.bfloat16:
            values = rounded(values, flat.dtype)
        flat[start:stop] = values.astype(flat.dtype)


def draw(
    name: str,
    shape: Sequence[int],
    dtype: str,
    seed: int = 0,
    distribution: str = "normal",
) -> NDArray[Any]:
    """Generate the tensor that a server generates for a request with this seed.

    Parameters
    ----------
    name
        Name of the tensor in the request, such as ``grad_output``.
    shape
        Shape in the request's layout.
    dtype
        float16, bfloat16, float32 or float64.
    seed
        An integer from 0 to 2^64 - 1.
    distribution
        ``normal`` (mean 0, variance 1, within ±3.47), ``uniform`` in [-1, 1), or ``integers`` from
        -2 to 2.

    Raises
    ------
    ValueError
        The dtype or distribution is unknown, or the seed is out of range.

    Examples
    --------
    >>> convgrad.check.draw("weight", (2,), "float32", seed=1, distribution="integers")
    """
    if distribution not in _DISTRIBUTIONS:
        raise ValueError(
            f"distribution: expected one of {', '.join(_DISTRIBUTIONS)}, got {distribution!r}"
        )
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed: expected 0 to 2^64 - 1, got {seed}")
    place = np.empty(prod(shape), DType(dtype).numpy)
    fill(name, place, seed, distribution)
    return place.reshape(tuple(shape))


def spread_indices(
    shape: Sequence[int], plane_elements: int, layout: str | None = None
) -> NDArray[np.int64]:
    """Generate the indices that a server uses for a max unpooling if none are given.

    They do not depend on the seed: element i of the n elements of a plane gets the index
    floor(i * plane_elements / n), so they increase and are spread over the output's plane.

    Parameters
    ----------
    shape
        Shape of the indices, in the request's layout.
    plane_elements
        Number of elements in one (sample, channel) plane of the output.
    layout
        The request's layout; channels first by default.

    Examples
    --------
    >>> convgrad.check.spread_indices((1, 1, 2, 2), 16).tolist()
    [[[[0, 4], [8, 12]]]]
    """
    last = layout is not None and layout.endswith("C")
    size = shape[1:-1] if last else shape[2:]
    count = prod(size)
    plane = (np.arange(count) * plane_elements // max(count, 1)).reshape(size)
    return np.broadcast_to(plane[..., None] if last else plane, tuple(shape)).copy()
