"""The layouts of tensors, and views in one canonical order for computing.

=================  ===========================  ========================
layout             activations                  weights
=================  ===========================  ========================
NCHW (default)     (N, C, H, W)                 KCRS (K, C/G, R, S)
NHWC               (N, H, W, C)                 KRSC (K, R, S, C/G)
NGCHW              (N, G, C/G, H, W)            GKCRS (G, K/G, C/G, R, S)
NHWGC              (N, H, W, G, C/G)            GKRSC (G, K/G, R, S, C/G)
GNHWC              (G, N, H, W, C/G)            GKRSC
=================  ===========================  ========================

and the same in 1D (NCW, NWC, NGCW, NWGC, GNWC) and 3D (NCDHW, NDHWC, NGCDHW, NDHWGC, GNDHWC).
In a layout without G, channel c belongs to group c // (C/G).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from numpy.typing import NDArray

from convgrad.errors import InvalidProblem
from convgrad_service.problems.sizes import Size, show, tuple_text

__all__ = [
    "LAYOUTS",
    "Layout",
    "activation_shape",
    "activation_view",
    "weight_shape",
    "weight_view",
]

_SPATIAL = {1: "W", 2: "HW", 3: "DHW"}
_KERNEL = {1: "S", 2: "RS", 3: "TRS"}


@dataclass(frozen=True, slots=True)
class Layout:
    """The order of the dimensions of a request's tensors.

    ``activation`` and ``weight`` have one letter for each dimension; a weight's C is the input
    channels of one group.
    """

    name: str
    ndim: int
    activation: str
    weight: str

    @property
    def grouped(self) -> bool:
        """Whether groups are a separate dimension."""
        return "G" in self.activation

    @property
    def channels_last(self) -> bool:
        return self.activation.endswith("C")

    @property
    def rank(self) -> int:
        """The number of dimensions of an activation, and of a weight."""
        return len(self.activation)

    def axis(self, letter: str) -> int:
        """Return the index of an activation's dimension, e.g. ``axis("N")``."""
        return self.activation.index(letter)

    def spatial_axis(self, index: int) -> int:
        """Return the index in an activation of spatial dimension ``index`` (0 is the outermost)."""
        return self.activation.index(_SPATIAL[self.ndim][index])

    @classmethod
    def parse(cls, name: str | None, ndim: int) -> Layout:
        """Return the layout ``name``, or channels first in ``ndim`` dimensions.

        Raises
        ------
        InvalidProblem
            There is no such layout, or it does not have ``ndim`` spatial dimensions.
        """
        if name is None:
            if ndim not in _SPATIAL:
                raise InvalidProblem(
                    f"there are {show(ndim)} spatial dimensions; expected 1, 2 or 3"
                )
            return LAYOUTS[f"NC{_SPATIAL[ndim]}"]
        layout = cls.named(name)
        if layout.ndim != ndim:
            raise InvalidProblem(
                f"layout {name} has {layout.ndim} spatial dimensions; expected {ndim}"
            )
        return layout

    @classmethod
    def named(cls, name: str) -> Layout:
        """Return the layout ``name``.

        Raises
        ------
        InvalidProblem
            There is no such layout.
        """
        layout = LAYOUTS.get(name)
        if layout is None:
            raise InvalidProblem(f"layout is {name[:32]!r}; expected one of {', '.join(LAYOUTS)}")
        return layout

    @classmethod
    def of_tensor(cls, name: str | None, tensor: str, shape: Sequence[int]) -> Layout:
        """Return the layout ``name``, or channels first in as many dimensions as an activation has.

        Raises
        ------
        InvalidProblem
            The tensor's rank is not the layout's.
        """
        if name is None:
            if len(shape) - 2 not in _SPATIAL:
                raise InvalidProblem(
                    f"{tensor} has shape {tuple_text(shape)}; expected 3, 4 or 5 dimensions "
                    "(NCW, NCHW or NCDHW)"
                )
            return cls.parse(None, len(shape) - 2)
        layout = cls.named(name)
        layout.check_rank(tensor, shape, layout.activation)
        return layout

    def check_rank(self, tensor: str, shape: Sequence[int], letters: str) -> None:
        """Check that a tensor has the dimensions in ``letters``.

        Raises
        ------
        InvalidProblem
            It has more or fewer.
        """
        if len(shape) != len(letters):
            raise InvalidProblem(
                f"{tensor} has shape {tuple_text(shape)}; expected {len(letters)} dimensions "
                f"({letters}) in layout {self.name}{self._batch_hint(len(shape), letters)}"
            )

    def _batch_hint(self, rank: int, letters: str) -> str:
        """Return a hint for a tensor without batch dimension, which PyTorch allows."""
        if self.grouped:
            return ""
        if letters == self.activation and rank == len(letters) - 1:
            return "; a single sample needs a batch dimension too, N = 1"
        if letters == self.weight and rank == len(letters) + 1:
            return "; if the weight is right, the other tensor lacks its batch dimension, N = 1"
        return ""

    def activation_sizes(self, shape: Sequence[int]) -> tuple[int, int | None, int, Size]:
        """Return (N, G or None, C over all groups, spatial size) of an activation's shape."""
        sizes = dict(zip(self.activation, shape, strict=True))
        groups = sizes.get("G")
        spatial = tuple(sizes[letter] for letter in _SPATIAL[self.ndim])
        return sizes["N"], groups, sizes["C"] * (groups or 1), spatial

    def weight_sizes(self, shape: Sequence[int]) -> tuple[int | None, int, int, Size]:
        """Return (G or None, K over all groups, C of one group, kernel) of a weight's shape."""
        sizes = dict(zip(self.weight, shape, strict=True))
        groups = sizes.get("G")
        kernel = tuple(sizes[letter] for letter in _KERNEL[self.ndim])
        return groups, sizes["K"] * (groups or 1), sizes["C"], kernel


def _family(ndim: int) -> list[Layout]:
    hw, rs = _SPATIAL[ndim], _KERNEL[ndim]
    return [
        Layout(activation, ndim, activation, weight)
        for activation, weight in (
            (f"NC{hw}", f"KC{rs}"),
            (f"N{hw}C", f"K{rs}C"),
            (f"NGC{hw}", f"GKC{rs}"),
            (f"N{hw}GC", f"GK{rs}C"),
            (f"GN{hw}C", f"GK{rs}C"),
        )
    ]


LAYOUTS: dict[str, Layout] = {layout.name: layout for ndim in _SPATIAL for layout in _family(ndim)}


def activation_shape(
    layout: Layout, batch: int, groups: int, channels: int, spatial: Sequence[int]
) -> Size:
    """Return the shape of an activation; ``channels`` are over all groups."""
    per_group = channels // groups if layout.grouped else channels
    letters = "NGC" + _SPATIAL[layout.ndim]
    return _shaped(layout.activation, letters, (batch, groups, per_group, *spatial))


def weight_shape(
    layout: Layout, groups: int, in_channels: int, out_channels: int, kernel: Sequence[int]
) -> Size:
    """Return the shape of a weight; ``in_channels`` and ``out_channels`` are over all groups."""
    outer = out_channels // groups if layout.grouped else out_channels
    letters = "GKC" + _KERNEL[layout.ndim]
    return _shaped(layout.weight, letters, (groups, outer, in_channels // groups, *kernel))


@lru_cache(maxsize=1024)
def _shaped(wanted: str, letters: str, sizes: Size) -> Size:
    """Return the sizes of the letters in ``wanted``, given those of all letters."""
    of = dict(zip(letters, sizes, strict=True))
    return tuple(of[letter] for letter in wanted)


def activation_view(array: NDArray[Any], layout: Layout, groups: int) -> NDArray[Any]:
    """Return an activation as a writable view (N, G, C/G, *spatial)."""
    if layout.grouped:
        return _ordered(array, layout.activation, "NGC" + _SPATIAL[layout.ndim])
    view = _ordered(array, layout.activation, "NC" + _SPATIAL[layout.ndim])
    return _split_axis(view, 1, groups)


def weight_view(array: NDArray[Any], layout: Layout, groups: int) -> NDArray[Any]:
    """Return a weight as a writable view (G, K/G, C/G, *kernel)."""
    if layout.grouped:
        return _ordered(array, layout.weight, "GKC" + _KERNEL[layout.ndim])
    return _split_axis(_ordered(array, layout.weight, "KC" + _KERNEL[layout.ndim]), 0, groups)


def _ordered(array: NDArray[Any], letters: str, wanted: str) -> NDArray[Any]:
    return array.transpose(_order(letters, wanted))


@lru_cache(maxsize=256)
def _order(letters: str, wanted: str) -> tuple[int, ...]:
    return tuple(letters.index(letter) for letter in wanted)


def _split_axis(array: NDArray[Any], axis: int, groups: int) -> NDArray[Any]:
    """Split an axis into (groups, rest), which is always a view."""
    per_group = array.shape[axis] // groups
    return array.reshape(*array.shape[:axis], groups, per_group, *array.shape[axis + 1 :])
