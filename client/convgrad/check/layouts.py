"""Views of tensors in any layout or format, with a separate group axis.

Activations are viewed as (N, G, C, *spatial) and weights as (G, K, C, *kernel). An index in a view
can be converted to the index in the tensor that was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from convgrad.errors import MalformedRequest

__all__ = [
    "Seen",
    "activation",
    "fractal_z",
    "ndc1hwc0",
    "vector",
    "weight",
]

Array = NDArray[Any]
Index = tuple[int, ...]
_SPATIAL = {1: "W", 2: "HW", 3: "DHW"}
_KERNEL = {1: "S", 2: "RS", 3: "TRS"}
_NAMES = {
    "N": "sample",
    "G": "group",
    "C": "channel",
    "K": "output channel",
    "D": "depth",
    "H": "row",
    "W": "column",
    "T": "tap depth",
    "R": "tap row",
    "S": "tap column",
}


@dataclass(frozen=True, slots=True)
class Seen:
    """A view with a separate group axis, its axis names, and the map to the tensor's indices."""

    array: Array
    axes: tuple[str, ...]
    index: Callable[[Sequence[int]], Index]


def activation(array: Array, layout: str | None, groups: int) -> Seen:
    """View an activation as (N, G, C, *spatial)."""
    letters, _ = _letters(layout, array.ndim)
    spatial = "".join(letter for letter in "DHW" if letter in letters)
    return _seen(array, letters, "NGC" + spatial, "C", groups)


def weight(array: Array, layout: str | None, groups: int) -> Seen:
    """View a weight as (G, K, C, *kernel)."""
    _, letters = _letters(layout, array.ndim)
    kernel = "".join(letter for letter in "TRS" if letter in letters)
    return _seen(array, letters, "GKC" + kernel, "K", groups)


def vector(array: Array) -> Seen:
    """View a vector with one value per output channel."""
    return Seen(array, ("output channel",), lambda found: tuple(int(each) for each in found))


def _letters(layout: str | None, rank: int) -> tuple[str, str]:
    """Return the axis letters of activations and weights; the default is channels first."""
    if layout is None:
        if rank - 2 not in _SPATIAL:
            raise MalformedRequest(f"a tensor has {rank} dimensions; expected 3, 4 or 5")
        layout = "NC" + _SPATIAL[rank - 2]
    for ndim, hw in _SPATIAL.items():
        rs = _KERNEL[ndim]
        known = {
            f"NC{hw}": f"KC{rs}",
            f"N{hw}C": f"K{rs}C",
            f"NGC{hw}": f"GKC{rs}",
            f"N{hw}GC": f"GK{rs}C",
            f"GN{hw}C": f"GK{rs}C",
        }
        if layout in known:
            if rank != len(layout):
                raise MalformedRequest(
                    f"a tensor has {rank} dimensions; expected {len(layout)} in layout {layout}"
                )
            return layout, known[layout]
    raise MalformedRequest(f"layout is {layout[:32]!r}; expected one such as NCHW or NHWC")


def _seen(array: Array, letters: str, wanted: str, split: str, groups: int) -> Seen:
    names = tuple(_NAMES[letter] for letter in wanted)
    ordered = array.transpose([letters.index(letter) for letter in wanted if letter in letters])
    if "G" in letters:

        def index(found: Sequence[int]) -> Index:
            sizes = dict(zip(wanted, found, strict=True))
            return tuple(int(sizes[letter]) for letter in letters)

        return Seen(ordered, names, index)
    at, shape = wanted.replace("G", "").index(split), ordered.shape
    each = shape[at] // groups
    # Splitting an axis never copies, whatever the strides.
    apart = ordered.reshape(*shape[:at], groups, each, *shape[at + 1 :])

    def index_in_all(found: Sequence[int]) -> Index:
        sizes = dict(zip(wanted, found, strict=True))
        sizes[split] += sizes["G"] * each
        return tuple(int(sizes[letter]) for letter in letters)

    return Seen(apart, names, index_in_all)


def ndc1hwc0(array: Array, channels: int) -> Array:
    """Convert (N, D, C1, H, W, C0) to (N, C, D, H, W)."""
    n, d, c1, h, w, c0 = array.shape
    return array.transpose(0, 2, 5, 1, 3, 4).reshape(n, c1 * c0, d, h, w)[:, :channels]


def fractal_z(array: Array, size: Sequence[int], groups: int) -> Array:
    """Convert (groups * D*C1*H*W, N1, 16, C0) to (K, C/groups, D, H, W) of shape ``size``."""
    k, c, d, h, w = size
    n1, n0, c0 = array.shape[1:]
    c1 = -(-c // c0)
    apart = array.reshape(groups, d, c1, h, w, n1 * n0, c0)
    unpacked = apart.transpose(0, 5, 2, 6, 1, 3, 4).reshape(groups, n1 * n0, c1 * c0, d, h, w)
    return unpacked[:, : k // groups, :c].reshape(k, c, d, h, w)
