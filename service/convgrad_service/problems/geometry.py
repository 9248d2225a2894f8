"""The sizes of a convolution or of a max pooling, independent of the layout.

Everything follows from one identity for each spatial dimension. Output o reads input i at kernel
tap r exactly when

    i = o*stride + r*dilation - pad_before,   0 <= i < input_size,  0 <= o < output_size.

Other modules say that i, o and r *meet*. Input rows past the last window meet no output and have no
gradient. A part of a larger problem has the same identity with another, possibly negative, padding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from convgrad_service.problems.lattice import count_below
from convgrad_service.problems.sizes import Pads, Size, by, one_or_by, pads_text

__all__ = ["ConvShape", "PoolShape", "Span"]

Span = tuple[int, int]
"""A half-open range of coordinates along one dimension."""


def _clamped(low: int, high: int, extent: int) -> Span:
    """Clamp [low, high) to [0, extent) and to at least one row: tensors may not be empty."""
    low = min(max(low, 0), extent - 1)
    return low, max(low + 1, min(high, extent))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """What convolution and pooling share: the sizes in the identity, per spatial dimension."""

    input_size: Size
    kernel_size: Size
    output_size: Size
    stride: Size
    padding: Pads
    dilation: Size

    @property
    def ndim(self) -> int:
        """Spatial dimensions: 1, 2 or 3."""
        return len(self.kernel_size)

    @property
    def valid_taps(self) -> int:
        """The number of pairs of output position and tap that meet an input position."""
        return prod(
            count_below(size + before, out, s, k, d) - count_below(before, out, s, k, d)
            for size, out, s, k, d, (before, _) in zip(
                self.input_size,
                self.output_size,
                self.stride,
                self.kernel_size,
                self.dilation,
                self.padding,
                strict=True,
            )
        )

    @property
    def geometry_text(self) -> str:
        """``kernel 3x3, stride 1, padding 1``, and the dilation if it is not 1."""
        text = (
            f"kernel {by(self.kernel_size)}, stride {one_or_by(self.stride)}, "
            f"padding {pads_text(self.padding)}"
        )
        if any(d != 1 for d in self.dilation):
            text += f", dilation {one_or_by(self.dilation)}"
        return text

    def reach(self, axis: int, outputs: Span) -> Span:
        """Return the range of inputs, padding included, that outputs [start, stop) read."""
        s, d, k = self.stride[axis], self.dilation[axis], self.kernel_size[axis]
        before = self.padding[axis][0]
        return outputs[0] * s - before, (outputs[1] - 1) * s + (k - 1) * d - before + 1

    def inputs_for(self, axis: int, outputs: Span) -> Span:
        """Return the input rows, at least one, that output rows [start, stop) read."""
        return _clamped(*self.reach(axis, outputs), self.input_size[axis])

    def outputs_for(self, axis: int, inputs: Span) -> Span:
        """Return the output rows, at least one, that may read input rows [start, stop)."""
        s, d, k = self.stride[axis], self.dilation[axis], self.kernel_size[axis]
        before = self.padding[axis][0]
        first = -((-(inputs[0] + before - (k - 1) * d)) // s)
        last = (inputs[1] - 1 + before) // s
        return _clamped(first, last + 1, self.output_size[axis])

    def _cut(self, axis: int, inputs: Span, outputs: Span) -> tuple[Size, Size, Pads]:
        """Return input size, output size and padding of the problem between two ranges of rows.

        Coordinates are relative to the start of each range, so pad_before becomes
        pad_before + inputs.start - outputs.start*stride.
        """
        s, d, k = self.stride[axis], self.dilation[axis], self.kernel_size[axis]
        rows_in, rows_out = inputs[1] - inputs[0], outputs[1] - outputs[0]
        before = self.padding[axis][0] + inputs[0] - outputs[0] * s
        after = (rows_out - 1) * s + (k - 1) * d + 1 - rows_in - before
        return (
            _put(self.input_size, axis, rows_in),
            _put(self.output_size, axis, rows_out),
            (*self.padding[:axis], (before, after), *self.padding[axis + 1 :]),
        )


def _put(size: Size, axis: int, extent: int) -> Size:
    return (*size[:axis], extent, *size[axis + 1 :])


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvShape(_Window):
    """A convolution: N, G, C, K (C and K over all groups) and the sizes in the identity.

    Input (N, C, *input_size), weight (K, C/G, *kernel_size), output (N, K, *output_size). The
    gradient operations use the shape of the convolution that they differentiate.
    """

    batch: int
    groups: int
    in_channels: int
    out_channels: int

    @property
    def in_channels_per_group(self) -> int:
        return self.in_channels // self.groups

    @property
    def out_channels_per_group(self) -> int:
        return self.out_channels // self.groups

    @property
    def _channel_work(self) -> int:
        return 2 * self.batch * self.out_channels * self.in_channels_per_group

    @property
    def flops(self) -> int:
        """Nominal operations: 2 * N * K * C/G * prod(output_size) * prod(kernel_size)."""
        return self._channel_work * prod(self.output_size) * prod(self.kernel_size)

    @property
    def valid_flops(self) -> int:
        """The nominal count without the taps that read padding."""
        return self._channel_work * self.valid_taps

    def window(self, axis: int, inputs: Span, outputs: Span) -> ConvShape:
        """Return the convolution between a range of input rows and a range of output rows."""
        input_size, output_size, padding = self._cut(axis, inputs, outputs)
        return replace(self, input_size=input_size, output_size=output_size, padding=padding)

    def with_batch(self, batch: int) -> ConvShape:
        return replace(self, batch=batch)

    def with_output_like_input(self) -> ConvShape:
        """Return a copy whose output is like the input, for kernels that reduce outputs."""
        return replace(self, out_channels=self.in_channels, output_size=self.input_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolShape(_Window):
    """A max pooling: N, C and the sizes in the identity.

    Input (N, C, *input_size), output and indices (N, C, *output_size). With ``ceil_mode``, which
    ``output_size`` respects, a last window may extend past the padding.
    """

    batch: int
    channels: int
    ceil_mode: bool

    @property
    def flops(self) -> int:
        """One comparison for each tap: N * C * prod(output_size) * prod(kernel_size)."""
        return self.batch * self.channels * prod(self.output_size) * prod(self.kernel_size)

    @property
    def valid_flops(self) -> int:
        """The nominal count without the taps that read padding."""
        return self.batch * self.channels * self.valid_taps

    def window(self, axis: int, inputs: Span, outputs: Span) -> PoolShape:
        """Return the pooling between a range of input rows and a range of output rows."""
        input_size, output_size, padding = self._cut(axis, inputs, outputs)
        return replace(self, input_size=input_size, output_size=output_size, padding=padding)

    def with_batch(self, batch: int) -> PoolShape:
        return replace(self, batch=batch)
