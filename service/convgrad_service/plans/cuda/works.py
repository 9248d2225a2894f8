"""The pieces of work that kernel families take on, in canonical views and three dimensions.

Every problem becomes one or a few of them. Fewer than three spatial dimensions get leading ones of
extent 1, stride 1, dilation 1 and padding 0. Strides count elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from convgrad.dtypes import DType
from convgrad_service.problems.geometry import ConvShape, PoolShape
from convgrad_service.problems.layouts import Layout

__all__ = [
    "ChannelSums",
    "ConvWork",
    "Copy",
    "CopyAxis",
    "Direction",
    "FusedWork",
    "Operand",
    "PoolWork",
    "activation_operand",
    "contiguous_strides",
    "size3",
    "weight_operand",
]

Direction = Literal["fwd", "bwd_data", "bwd_weight"]
Size3 = tuple[int, int, int]
_LETTERS = {1: "W", 2: "HW", 3: "DHW"}
_KERNEL = {1: "S", 2: "RS", 3: "TRS"}


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor in a buffer, as its canonical view.

    ``strides`` are of (N, G, C/G, D, H, W) for activations and pooling's tensors (G = 1 there),
    of (G, K/G, C/G, T, R, S) for weights; a dimension of extent 1 that the tensor lacks has 0.
    The first element is at the buffer's start, which is aligned to 256 bytes. The channels of a
    pixel of a ``padded`` activation are followed by room up to a multiple of 16 bytes, which may
    be read and written.
    """

    buffer: str
    dtype: DType
    strides: tuple[int, int, int, int, int, int]
    padded: bool = False

    @property
    def channels_last(self) -> bool:
        """Whether an activation's channels of one group lie side by side."""
        return self.strides[2] == 1


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a row-major array."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def activation_operand(
    buffer: str, dtype: DType, layout: Layout, shape: tuple[int, ...], groups: int
) -> Operand:
    """A row-major activation of this layout and shape."""
    strides = dict(zip(layout.activation, contiguous_strides(shape), strict=True))
    sizes = dict(zip(layout.activation, shape, strict=True))
    group = strides["G"] if layout.grouped else sizes["C"] // groups * strides["C"]
    spatial = [strides[letter] for letter in _LETTERS[layout.ndim]]
    return _operand(buffer, dtype, (strides["N"], group, strides["C"]), spatial)


def weight_operand(
    buffer: str, dtype: DType, layout: Layout, shape: tuple[int, ...], groups: int
) -> Operand:
    """A row-major weight of this layout and shape."""
    strides = dict(zip(layout.weight, contiguous_strides(shape), strict=True))
    sizes = dict(zip(layout.weight, shape, strict=True))
    group = strides["G"] if layout.grouped else sizes["K"] // groups * strides["K"]
    spatial = [strides[letter] for letter in _KERNEL[layout.ndim]]
    return _operand(buffer, dtype, (group, strides["K"], strides["C"]), spatial)


def _operand(buffer: str, dtype: DType, lead: tuple[int, int, int], spatial: list[int]) -> Operand:
    padded = (*[0] * (3 - len(spatial)), *spatial)
    return Operand(buffer, dtype, (*lead, padded[0], padded[1], padded[2]))


class _Geometry:
    """The identity's numbers in three dimensions, whatever the rank of ``_shape``."""

    __slots__ = ()

    @property
    def _shape(self) -> ConvShape | PoolShape:
        raise NotImplementedError

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
        """Before each dimension; what is after follows from the sizes. May be negative."""
        return size3(tuple(before for before, _ in self._shape.padding), 0)

    @property
    def taps(self) -> int:
        return prod(self.kernel)


def size3(values: tuple[int, ...], lead: int = 1) -> Size3:
    """Values of one to three dimensions in three, with ``lead`` for those missing in front."""
    padded = (*[lead] * (3 - len(values)), *values)
    return padded[0], padded[1], padded[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvWork(_Geometry):
    """One direction of one convolution: fwd writes y, bwd_data x, bwd_weight w, from the others.

    result = activation(alpha * sum + beta * accumulate + bias), in float32 (float64 for float64),
    rounded once. ``accumulate`` has the result's view; ``bias`` names a buffer with one value for
    each of the result's channels (in x or y) and is None for bwd_weight. ``x``, ``w`` and ``y``
    that are read share ``dtype``; what is written has ``result_dtype``.
    ``prefix`` starts the names of workspace buffers, so that two works in one plan keep apart.
    ``split_k`` is what the caller asked for, None for auto. ``follows`` is whether the launch
    before it, of the same plan, writes what it reads, and nothing else is before it that it needs.
    ``leads`` is whether the one after it so follows it.
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

    @property
    def pixels(self) -> int:
        """Positions of the output, over the batch: what bwd_weight sums over."""
        return self.batch * prod(self.output)

    @property
    def epilogue_free(self) -> bool:
        """Whether the result is the sum itself."""
        return (
            self.alpha == 1.0
            and self.accumulate is None
            and self.bias is None
            and self.activation == "none"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedWork:
    """Two convolutions whose intermediate is rounded once to ``first.dtype``, after its activation.

    ``first.y`` and ``second.x`` are the intermediate, in a buffer of ``intermediate_bytes`` which
    a family that keeps it on the chip does not allocate.
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
    """Max pooling: ``fwd`` writes y, and indices unless None, ``bwd`` writes x.

    ``bwd`` reads y, the gradient of the output, and either ``source``, the input, or ``indices``.
    """

    direction: Literal["fwd", "bwd"]
    pool: PoolShape
    dtype: DType
    x: Operand
    y: Operand
    indices: Operand | None = None
    source: Operand | None = None
    prefix: str = ""

    @property
    def _shape(self) -> PoolShape:
        return self.pool

    @property
    def channels(self) -> int:
        return self.pool.channels


@dataclass(frozen=True, slots=True)
class CopyAxis:
    """One dimension of a copy: its extent, and the strides on both sides."""

    extent: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Copy:
    """target[i] = source[i] over a box of at most eight dimensions, outermost first.

    ``bounds`` are (outer axis, inner axis, limit): where outer*extent(inner) + inner >= limit, the
    source has no element, and the target, where it has one (``pads``), gets zero. Unless it
    ``follows``, it reads nothing that the step before it writes.
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
