"""Pieces of work: the operations that kernel families compute, always in three dimensions.

A problem becomes one or several of them. One or two spatial dimensions become three by leading
dimensions of extent 1, stride 1, dilation 1 and padding 0. Strides count elements.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import prod
from typing import Literal, TypeVar

from convgrad.dtypes import DType
from convgrad_service.problems.geometry import ConvShape, PoolShape
from convgrad_service.problems.layouts import Layout
from convgrad_service.problems.sizes import Size, Size3, size3
from convgrad_service.problems.windows import WindowAxis

__all__ = ["ChannelSums", "ConvWork", "Copy", "CopyAxis", "Direction", "FusedWork", "Operand"]
__all__ += ["PoolWork", "UnpoolWork", "WindowWork", "activation_operand", "contiguous_strides"]
__all__ += ["weight_operand"]

Direction = Literal["fwd", "bwd_data", "bwd_weight"]
T = TypeVar("T")
_LETTERS = {1: "W", 2: "HW", 3: "DHW"}
_KERNEL = {1: "S", 2: "RS", 3: "TRS"}


@dataclass(frozen=True, slots=True)
class Operand:
    """A six-dimensional view of a tensor at the start of a buffer.

    Attributes
    ----------
    strides : tuple of int
        In elements, of (N, G, C/G, D, H, W) for activations (G = 1 in pooling), of
        (G, K/G, C/G, T, R, S) for weights; 0 for a dimension that the tensor lacks.
    padded : bool
        Each pixel's channels are followed by padding up to a multiple of 16 bytes, which kernels
        may read and write.
    """

    buffer: str
    dtype: DType
    strides: tuple[int, int, int, int, int, int]
    padded: bool = False

    @property
    def channels_last(self) -> bool:
        """Whether an activation's channels of one group are contiguous."""
        return self.strides[2] == 1


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a row-major array, in elements."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def activation_operand(
    buffer: str, dtype: DType, layout: Layout, shape: tuple[int, ...], groups: int
) -> Operand:
    """Return the view of a row-major activation of this layout and shape."""
    strides = dict(zip(layout.activation, contiguous_strides(shape), strict=True))
    sizes = dict(zip(layout.activation, shape, strict=True))
    group = strides["G"] if layout.grouped else sizes["C"] // groups * strides["C"]
    spatial = [strides[letter] for letter in _LETTERS[layout.ndim]]
    return _operand(buffer, dtype, (strides["N"], group, strides["C"]), spatial)


def weight_operand(
    buffer: str, dtype: DType, layout: Layout, shape: tuple[int, ...], groups: int
) -> Operand:
    """Return the view of a row-major weight of this layout and shape."""
    strides = dict(zip(layout.weight, contiguous_strides(shape), strict=True))
    sizes = dict(zip(layout.weight, shape, strict=True))
    group = strides["G"] if layout.grouped else sizes["K"] // groups * strides["K"]
    spatial = [strides[letter] for letter in _KERNEL[layout.ndim]]
    return _operand(buffer, dtype, (group, strides["K"], strides["C"]), spatial)


def _operand(buffer: str, dtype: DType, lead: tuple[int, int, int], spatial: list[int]) -> Operand:
    padded = (*[0] * (3 - len(spatial)), *spatial)
    return Operand(buffer, dtype, (*lead, padded[0], padded[1], padded[2]))


class _Geometry(ABC):
    """The sizes of ``_shape``, which has one to three spatial dimensions, in three."""

    __slots__ = ()

    @property
    @abstractmethod
    def _shape(self) -> ConvShape | PoolShape: ...

    @property
    def batch(self) -> int:
        return self._shape.batch

    @property
    def input(self) -> Size3:
        return size3(self._shape.input_size, 1)

    @property
    def kernel(self) -> Size3:
        return size3(self._shape.kernel_size, 1)

    @property
    def output(self) -> Size3:
        return size3(self._shape.output_size, 1)

    @property
    def stride(self) -> Size3:
        return size3(self._shape.stride, 1)

    @property
    def dilation(self) -> Size3:
        return size3(self._shape.dilation, 1)

    @property
    def pad(self) -> Size3:
        """Padding before each dimension, possibly negative; the sizes imply the padding after."""
        return size3(tuple(before for before, _ in self._shape.padding), 0)

    @property
    def dilated(self) -> bool:
        """Whether some dimension has taps that are not adjacent."""
        return any(d != 1 and k != 1 for d, k in zip(self.dilation, self.kernel, strict=True))

    @property
    def taps(self) -> int:
        return prod(self.kernel)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvWork(_Geometry):
    """One direction of a convolution: fwd writes y, bwd_data x, bwd_weight w, from the other two.

    result = activation(alpha * sum + beta * accumulate + bias), in float32 (float64 for float64),
    rounded once.

    Attributes
    ----------
    dtype, result_dtype : DType
        Of the operands read, and of the result.
    accumulate : Operand or None
        Has the strides of the result.
    bias : str or None
        A buffer with one value for each channel of the result; None for bwd_weight.
    split_k : int or None
        As the caller requested; None for auto.
    prefix : str
        Start of its workspace buffers' names, which makes them unique in a plan.
    follows : bool
        It depends on the previous launch of the plan and on no earlier one.
    leads : bool
        The next work ``follows`` it.
    """

    direction: Direction
    conv: ConvShape
    dtype: DType
    result_dtype: DType
    x: Operand
    w: Operand
    y: Operand
    accumulate: Operand | None = None
    bias: str | None = None
    alpha: float = 1.0
    beta: float = 0.0
    activation: str = "none"
    precision: str = "highest"
    deterministic: bool = True
    split_k: int | None = None
    prefix: str = ""
    follows: bool = False
    leads: bool = False

    @property
    def _shape(self) -> ConvShape:
        return self.conv

    @property
    def groups(self) -> int:
        return self.conv.groups

    @property
    def in_channels(self) -> int:
        """C/G."""
        return self.conv.in_channels_per_group

    @property
    def out_channels(self) -> int:
        """K/G."""
        return self.conv.out_channels_per_group

    def _in_order(self, x: T, y: T) -> tuple[T, T]:
        return (y, x) if self.direction == "bwd_data" else (x, y)

    @property
    def sides(self) -> tuple[Operand, Operand]:
        """The source and the destination of a gather: x and y, or in bwd_data y and x."""
        return self._in_order(self.x, self.y)

    @property
    def channels(self) -> tuple[int, int]:
        """Channels per group of ``sides``."""
        return self._in_order(self.in_channels, self.out_channels)

    @property
    def sizes(self) -> tuple[Size3, Size3]:
        """Spatial sizes of ``sides``."""
        return self._in_order(self.input, self.output)

    @property
    def result(self) -> Operand:
        """The operand written."""
        return self.w if self.direction == "bwd_weight" else self.sides[1]

    @property
    def pixels(self) -> int:
        """Positions of the output over the batch, which bwd_weight sums over."""
        return self.batch * prod(self.output)

    @property
    def elements(self) -> int:
        """Elements of both activations and of the weight."""
        x = self.batch * self.in_channels * prod(self.input)
        weight = self.taps * self.in_channels * self.out_channels
        return self.groups * (x + self.pixels * self.out_channels + weight)

    @property
    def epilogue_free(self) -> bool:
        """Whether the result is the rounded sum."""
        return (
            self.alpha == 1.0
            and self.accumulate is None
            and self.bias is None
            and self.activation == "none"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedWork:
    """Two convolutions whose intermediate is rounded once to ``first.dtype``, after its activation.

    ``first.y`` and ``second.x`` are the intermediate, a buffer of ``intermediate_bytes``. A family
    that keeps it on chip does not allocate it.
    """

    first: ConvWork
    second: ConvWork
    intermediate_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSums(_Geometry):
    """result[g, k] = sum over n, o of y[n, g, k, o]: the gradient of a bias, contiguous."""

    conv: ConvShape
    y: Operand
    result: str
    result_dtype: DType
    prefix: str = ""

    @property
    def _shape(self) -> ConvShape:
        return self.conv

    @property
    def channels(self) -> int:
        return self.conv.out_channels

    @property
    def pixels(self) -> int:
        return self.batch * prod(self.output)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolWork(_Geometry):
    """Max pooling's gradient from its input: ``source`` and y, the output's gradient, to x."""

    pool: PoolShape
    dtype: DType
    source: Operand
    x: Operand
    y: Operand
    prefix: str = ""

    @property
    def _shape(self) -> PoolShape:
        return self.pool

    @property
    def channels(self) -> int:
        return self.pool.channels


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowWork:
    """A pooling in which each position of y has a window of positions of x, in every plane.

    ``sums``: y is the sum of x over its window, divided by ``divisor``. If that is None, the sum is
    divided by the size of y's window in ``counted`` (``by`` outputs), or each term is divided by
    the size of x's window there (``by`` inputs).
    ``maxima``: y is the maximum of x over its window, and ``indices`` its position; either may be
    None.
    ``routes``: y is the sum of x over those positions of its window whose index is y's position.
    With ``checked`` the kernel reports invalid indices.
    ``carried`` (of ``maxima``) are 32-bit numbers of x's elements, which ``indices`` has instead of
    positions. ``x_dtype`` (of ``routes``) is x's dtype if that is not ``dtype``.
    With a ``dilation`` (of ``maxima`` and ``routes``), windows are those of all positions between
    their taps.

    Tensors are contiguous buffers of ``batch`` by ``channels`` planes, channels first or last.
    """

    kind: Literal["sums", "maxima", "routes"]
    batch: int
    channels: int
    channels_last: bool
    windows: tuple[WindowAxis, ...]
    dtype: DType
    x: str
    y: str | None
    indices: str | None = None
    index_dtype: DType = DType.INT64
    counted: tuple[WindowAxis, ...] = ()
    by: Literal["outputs", "inputs"] = "outputs"
    divisor: int | None = None
    checked: bool = False
    dilation: Size = ()
    carried: str | None = None
    x_dtype: DType | None = None
    prefix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpoolWork:
    """Max unpooling.

    ``scatter`` is y[indices[i]] = x[i] with zeros elsewhere, the last i winning; ``gather`` is
    y[i] = x[indices[i]]. ``size`` is the spatial size of the indices, ``plane`` that of the planes
    they index. ``windows`` are those of `MaxUnpoolFwd`.

    Tensors are contiguous buffers of ``batch`` by ``channels`` planes, channels first or last.
    """

    kind: Literal["scatter", "gather"]
    batch: int
    channels: int
    channels_last: bool
    size: Size
    plane: Size
    dtype: DType
    index_dtype: DType
    x: str
    y: str
    indices: str = "indices"
    windows: tuple[WindowAxis, ...] | None = None
    prefix: str = ""


@dataclass(frozen=True, slots=True)
class CopyAxis:
    """One dimension of a copy: its extent, and the strides of source and target."""

    extent: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Copy:
    """target[i] = source[i] over at most eight dimensions, outermost first.

    Attributes
    ----------
    bounds : tuple of (int, int, int)
        (outer axis, inner axis, limit): where outer*extent(inner) + inner >= limit, the source has
        no element.
    pads : bool
        The target has elements beyond ``bounds``, which get zero.
    follows : bool
        It may read what the previous step writes.
    source_start, target_start : int
        Offsets of the first elements.
    """

    source: str
    target: str
    dtype: DType
    axes: tuple[CopyAxis, ...]
    bounds: tuple[tuple[int, int, int], ...] = ()
    pads: bool = False
    follows: bool = True
    source_start: int = 0
    target_start: int = 0
