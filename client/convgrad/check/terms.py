"""The individual terms of an element of a convolution, to find missing or repeated ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad.check.bounds import Float
from convgrad.check.geometry import Geometry, Sizes
from convgrad.check.references import Linear

__all__ = ["Terms", "addend_at", "channel_values", "terms_at"]

Array = NDArray[Any]


@dataclass(frozen=True)
class Terms:
    """Products arranged by ``rows`` (taps or samples) and ``columns`` (channels or positions)."""

    products: Float
    rows: str
    columns: str
    row_labels: tuple[Any, ...]


def terms_at(linear: Linear, index: Sequence[int], *, flipped: bool = False) -> Terms:
    """Return the terms of the element at ``index``, optionally with the kernel ``flipped``."""
    if linear.kind == "backward_weight":
        return _of_weight(linear, index)
    taps = tuple(linear.geometry.taps())
    products = _by_tap(linear, index, taps)
    g, own = int(index[1]), int(index[2])
    if linear.kind == "forward":
        weights = linear.second[g, own].reshape(linear.second.shape[2], -1).T
    else:
        weights = linear.second[g, :, own].reshape(linear.second.shape[1], -1).T
    if flipped:
        weights = weights[::-1]
    with np.errstate(all="ignore"):
        found = linear.scale * products[:, g] * weights.astype(np.float64)
    # Taps in the padding have no term, even if the weight is not finite.
    met = _met(linear, index, taps)
    return Terms(np.where(met[:, None], found, 0.0), "tap", "channel", taps)


def addend_at(linear: Linear, index: Sequence[int]) -> float:
    """Return the addend (bias, accumulated tensor) of the element at ``index``; 0 if none."""
    if linear.added is None:
        return 0.0
    at = (min(i, extent - 1) for i, extent in zip(index, linear.added.shape, strict=True))
    return float(linear.added[tuple(at)])


def channel_values(linear: Linear, index: Sequence[int]) -> Float:
    """Return the values of all channels at the position of ``index``: [G, channels]."""
    if linear.kind == "backward_weight":
        return _of_all_weights(linear, index)
    taps = tuple(linear.geometry.taps())
    products = _by_tap(linear, index, taps)
    products = np.where(_met(linear, index, taps)[:, None, None], products, 0.0)
    w = linear.second
    apart = w.reshape(*w.shape[:3], -1).astype(np.float64)
    with np.errstate(all="ignore"):
        spec = "tgc,gkct->gk" if linear.kind == "forward" else "tgk,gkct->gc"
        found: Float = linear.scale * np.einsum(spec, products, apart)
        if linear.added is not None:
            at = (min(int(index[0]), len(linear.added) - 1), slice(None), slice(None))
            rest = tuple(
                min(int(i), extent - 1)
                for i, extent in zip(index[3:], linear.added.shape[3:], strict=True)
            )
            found = found + linear.added[(*at, *rest)]
    return found


def _source(geometry: Geometry, kind: str, place: Sequence[int], tap: Sizes) -> Sizes | None:
    """Return the coordinate that meets ``place`` at a tap, or None."""
    found = []
    for axis, (at, r) in enumerate(zip(place, tap, strict=True)):
        s, d, before = geometry.stride[axis], geometry.dilation[axis], geometry.before[axis]
        if kind == "forward":
            other, rest, extent = at * s + r * d - before, 0, geometry.input_size[axis]
        else:
            other, rest = divmod(at + before - r * d, s)
            extent = geometry.output_size[axis]
        if rest or not 0 <= other < extent:
            return None
        found.append(other)
    return tuple(found)


def _met(linear: Linear, index: Sequence[int], taps: Sequence[Sizes]) -> NDArray[np.bool_]:
    place = [int(each) for each in index[3:]]
    sources = (_source(linear.geometry, linear.kind, place, tap) for tap in taps)
    return np.array([source is not None for source in sources])


def _by_tap(linear: Linear, index: Sequence[int], taps: Sequence[Sizes]) -> Float:
    """Return the values that meet the element at each tap: [taps, G, channels]."""
    place = [int(each) for each in index[3:]]
    sample = linear.first[int(index[0])]
    found = np.zeros((len(taps), *sample.shape[:2]))
    for number, tap in enumerate(taps):
        source = _source(linear.geometry, linear.kind, place, tap)
        if source is not None:
            found[number] = sample[(slice(None), slice(None), *source)].astype(np.float64)
    return found


def _of_weight(linear: Linear, index: Sequence[int]) -> Terms:
    g, k, c = (int(each) for each in index[:3])
    met = linear.geometry.meeting([int(each) for each in index[3:]])
    samples = tuple(range(len(linear.first)))
    if met is None:
        return Terms(np.zeros((len(samples), 1)), "sample", "position", samples)
    taken, put = met
    everything: Any = slice(None)
    x = linear.first[(everything, g, c, *taken)].astype(np.float64)
    y = linear.second[(everything, g, k, *put)].astype(np.float64)
    with np.errstate(all="ignore"):
        products = linear.scale * (x * y).reshape(len(samples), -1)
    return Terms(products, "sample", "position", samples)


def _of_all_weights(linear: Linear, index: Sequence[int]) -> Float:
    """Return the gradients of all groups and output channels at the element's C and tap."""
    c = int(index[2])
    met = linear.geometry.meeting([int(each) for each in index[3:]])
    groups, channels = linear.second.shape[1:3]
    if met is None:
        return np.zeros((groups, channels))
    taken, put = met
    everything: Any = slice(None)
    x = linear.first[(everything, everything, c, *taken)].astype(np.float64)
    y = linear.second[(everything, everything, everything, *put)].astype(np.float64)
    n = len(linear.first)
    with np.errstate(all="ignore"):
        found: Float = linear.scale * np.einsum(
            "ngp,ngkp->gk", x.reshape(n, groups, -1), y.reshape(n, groups, channels, -1)
        )
        return found
