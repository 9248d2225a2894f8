"""`Layer`: a convolution or pooling layer, independent of notation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from convgrad.dtypes import DType
from convgrad.errors import MalformedRequest

__all__ = ["KINDS", "Kind", "Layer", "Sizes", "padding_after", "pairs", "per_dimension"]

Kind = Literal["conv", "deconv", "pool", "avg_pool", "adaptive_pool", "separable"]
Sizes = tuple[int, ...]
KINDS: tuple[Kind, ...] = ("conv", "deconv", "pool", "avg_pool", "adaptive_pool", "separable")
_TITLES = {
    "conv": "convolution",
    "deconv": "transposed convolution",
    "pool": "max pooling",
    "avg_pool": "average pooling",
    "adaptive_pool": "adaptive pooling",
    "separable": "depthwise-separable convolution",
}
# Servers accept no larger extents.
_MAX_SIZE = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Sizes and geometry of a layer; sequences are in the order D, H, W.

    A ``conv`` maps [N, C, *input_size] to [N, K, *output_size]; a ``deconv`` is a transposed
    convolution. A ``pool`` is max pooling and an ``avg_pool`` average pooling. An
    ``adaptive_pool`` has ``adaptive_size`` and no window: ``kernel_size``, ``stride``,
    ``padding`` and ``dilation`` are empty. A ``separable`` is a depthwise convolution followed by
    a 1x1 convolution. ``padding`` is a (before, after) pair per dimension. ``dtype``, ``layout``
    and ``operation`` are None if the description did not give them.

    Raises
    ------
    MalformedRequest
        A size is missing, not positive, or the window does not fit into the input.
    """

    kind: Kind = "conv"
    batch: int = 1
    in_channels: int
    out_channels: int
    groups: int = 1
    input_size: Sizes
    kernel_size: Sizes
    stride: Sizes
    padding: tuple[tuple[int, int], ...]
    dilation: Sizes
    output_padding: Sizes = ()
    ceil_mode: bool = False
    count_include_pad: bool = True
    adaptive_size: Sizes = ()
    bias: bool = False
    dtype: DType | None = None
    layout: str | None = None
    operation: str | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if self.ndim not in (1, 2, 3):
            raise MalformedRequest(
                f"the layer has {self.ndim} spatial dimensions; expected 1, 2 or 3"
            )
        if self.kind == "adaptive_pool":
            lists = {"adaptive_size": self.adaptive_size}
        else:
            lists = {
                "kernel_size": self.kernel_size,
                "stride": self.stride,
                "dilation": self.dilation,
            }
        padded = {} if self.kind == "adaptive_pool" else {"padding": self.padding}
        for name, values in (lists | padded).items():
            if len(values) != self.ndim:
                raise MalformedRequest(
                    f"the layer's {name} has {len(values)} values; expected {self.ndim}"
                )
        if not self.output_padding:
            object.__setattr__(self, "output_padding", (0,) * self.ndim)
        counts = {
            "batch": [self.batch],
            "input channels": [self.in_channels],
            "output channels": [self.out_channels],
            "groups": [self.groups],
            "input_size": self.input_size,
            **lists,
        }
        for name, numbers in counts.items():
            for number in numbers:
                if not 1 <= number < _MAX_SIZE:
                    raise MalformedRequest(
                        f"the layer's {name} is {number}; expected 1 to {_MAX_SIZE - 1}"
                    )
        for channels in (self.in_channels, self.out_channels):
            if channels % self.groups:
                raise MalformedRequest(
                    f"the layer has {channels} channels and {self.groups} groups; expected a "
                    "multiple of the groups"
                )
        for pad in (*self.output_padding, *(each for pair in self.padding for each in pair)):
            if not 0 <= pad < _MAX_SIZE:
                raise MalformedRequest(
                    f"the layer's padding is {pad}; expected 0 to {_MAX_SIZE - 1}"
                )
        if any(size < 1 for size in self.output_size):
            raise MalformedRequest(
                f"the layer's window of {_by(self.kernel_size)} does not fit into its input of "
                f"{_by(self.input_size)}"
            )

    @property
    def ndim(self) -> int:
        """Number of spatial dimensions."""
        return len(self.input_size)

    @property
    def pools(self) -> bool:
        """Whether this is a pooling layer of any kind, without a weight."""
        return self.kind in ("pool", "avg_pool", "adaptive_pool")

    @property
    def output_size(self) -> Sizes:
        """The spatial size of the output."""
        if self.kind == "adaptive_pool":
            return self.adaptive_size
        return tuple(self._output_along(axis) for axis in range(self.ndim))

    @property
    def title(self) -> str:
        """A one-line description for people: kind and sizes."""
        channels = (
            f"{self.in_channels}" if self.pools else f"{self.in_channels} → {self.out_channels}"
        )
        more = f", {self.groups} groups" if self.groups > 1 else ""
        window = f" {_by(self.kernel_size)}" if self.kernel_size else ""
        return (
            f"{_TITLES[self.kind]}{window}, {channels} channels{more}, "
            f"{_by(self.input_size)} → {_by(self.output_size)}, batch {self.batch}"
        )

    def with_batch(self, batch: int) -> Layer:
        """Return this layer with another batch size."""
        return replace(self, batch=batch)

    def normalised(self) -> Layer:
        """Return an equivalent layer that benchdnn can express.

        The padding after the input follows from the sizes, see `padding_after`; padding replaces
        ``ceil_mode``.
        """
        if self.kind in ("deconv", "adaptive_pool"):
            return self
        padding = tuple(
            (before, padding_after(size, out, before, s, d * (k - 1) + 1))
            for size, out, k, s, d, (before, _) in zip(
                self.input_size,
                self.output_size,
                self.kernel_size,
                self.stride,
                self.dilation,
                self.padding,
                strict=True,
            )
        )
        return replace(self, padding=padding, ceil_mode=False)

    def geometry(self) -> dict[str, Any]:
        """Return stride, padding and dilation as the fields of a request."""
        return {
            "stride": list(self.stride),
            "padding": [list(pair) for pair in self.padding],
            "dilation": list(self.dilation),
        }

    def _output_along(self, axis: int) -> int:
        size, k, s, d = (
            values[axis]
            for values in (self.input_size, self.kernel_size, self.stride, self.dilation)
        )
        before, after = self.padding[axis]
        reach = d * (k - 1) + 1
        if self.kind == "deconv":
            return (size - 1) * s + reach - before - after + self.output_padding[axis]
        room = size + before + after - reach
        if not self.ceil_mode:
            return room // s + 1
        windows = math.ceil(room / s) + 1
        # As in PyTorch, every window begins inside the input or the padding before it.
        return windows - 1 if (windows - 1) * s >= size + before else windows


def per_dimension(value: int | Sequence[int], ndim: int, what: str) -> Sizes:
    """Expand one number for all dimensions, or check that there is one per dimension.

    Raises
    ------
    MalformedRequest
        The number of values is wrong.
    """
    if isinstance(value, int):
        return (value,) * ndim
    if len(value) != ndim:
        raise MalformedRequest(f"{what} has {len(value)} values; expected {ndim}")
    return tuple(value)


def pairs(value: int | Sequence[int], ndim: int) -> tuple[tuple[int, int], ...]:
    """Convert symmetric padding, as in most frameworks, to (before, after) pairs."""
    return tuple((pad, pad) for pad in per_dimension(value, ndim, "padding"))


def padding_after(size: int, out: int, before: int, stride: int, reach: int) -> int:
    """Return the padding after the input that gives ``out`` outputs.

    That is ``before`` if possible, otherwise the smallest. ``reach`` is the extent of a window.
    """
    if (size + 2 * before - reach) // stride + 1 == out:
        return before
    return max(0, (out - 1) * stride + reach - size - before)


def _by(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))
