"""The sizes of one convolution or one pooling, whatever the layout, and what follows from them.

Everything rests on one identity, per spatial dimension: input coordinate i and output coordinate
o meet at kernel tap r exactly when

    i = o*stride + r*dilation - pad_before,   0 <= i < input_size,  0 <= o < output_size.

The sizes need not be tight: input rows past the last window meet no output and get no gradient.
A window cut out of a larger problem keeps the identity with shifted, possibly negative, padding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from convgrad_service.problems.lattice import count_below
from convgrad_service.problems.sizes import Pads, Size, by, one_or_by, pads_text

__all__ = ["ConvShape", "PoolShape", "Span"]

Span = tuple[int, int]
"""A half-open range of coordinates along one dimension."""


def _held(low: int, high: int, extent: int) -> Span:
    """[low, high) held inside [0, extent), and never empty: a row that meets nothing is harmless,
    a tensor with no rows is not."""
    low = min(max(low, 0), extent - 1)
    return low, max(low + 1, min(high, extent))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """What convolution and pooling share: the identity's numbers, per spatial dimension."""

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
        """Pairs of output position and tap that meet an input position, over all dimensions."""
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
        """``kernel 3x3, stride 1, padding 1``, with the dilation where there is one."""
        text = (
            f"kernel {by(self.kernel_size)}, stride {one_or_by(self.stride)}, "
            f"padding {pads_text(self.padding)}"
        )
        if any(d != 1 for d in self.dilation):
            text += f", dilation {one_or_by(self.dilation)}"
        return text

    def reach(self, axis: int, outputs: Span) -> Span:
        """The input coordinates that windows [start, stop) may touch, padding included."""
        s, d, k = self.stride[axis], self.dilation[axis], self.kernel_size[axis]
        before = self.padding[axis][0]
        return outputs[0] * s - before, (outputs[1] - 1) * s + (k - 1) * d - before + 1

    def inputs_for(self, axis: int, outputs: Span) -> Span:
        """The input rows that output rows [start, stop) read; at least one row."""
        return _held(*self.reach(axis, outputs), self.input_size[axis])

    def outputs_for(self, axis: int, inputs: Span) -> Span:
        """The output rows that may touch input rows [start, stop); at least one row."""
        s, d, k = self.stride[axis], self.dilation[axis], self.kernel_size[axis]
        before = self.padding[axis][0]
        first = -((-(inputs[0] + before - (k - 1) * d)) // s)
        last = (inputs[1] - 1 + before) // s
        return _held(first, last + 1, self.output_size[axis])

    def _cut(self, axis: int, inputs: Span, outputs: Span) -> tuple[Size, Size, Pads]:
        """Input size, output size and padding of the problem between two ranges of rows.

        Local coordinates count from each range's start, so pad_before becomes
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
    """One convolution: N, G, C, K (totals over the groups) and the identity's numbers.

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
        """Nominal: 2 * N * K * C/G * prod(output_size) * prod(kernel_size)."""
        return self._channel_work * prod(self.output_size) * prod(self.kernel_size)

    @property
    def valid_flops(self) -> int:
        """The nominal count without the taps that fall wholly in padding."""
        return self._channel_work * self.valid_taps

    def window(self, axis: int, inputs: Span, outputs: Span) -> ConvShape:
        """The same convolution between a range of input rows and one of output rows alone."""
        input_size, output_size, padding = self._cut(axis, inputs, outputs)
        return replace(self, input_size=input_size, output_size=output_size, padding=padding)

    def with_batch(self, batch: int) -> ConvShape:
        return replace(self, batch=batch)

    def with_output_like_input(self) -> ConvShape:
        """With the input's channels and sizes for the output's: for what is said of outputs alone,
        and meant of the input."""
        return replace(self, out_channels=self.in_channels, output_size=self.input_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolShape(_Window):
    """One max pooling: N, C and the identity's numbers.

    Input (N, C, *input_size), output and indices (N, C, *output_size). ``output_size`` already
    answers to ``ceil_mode``; a last window may reach past the padding.
    """

    batch: int
    channels: int
    ceil_mode: bool

    @property
    def flops(self) -> int:
        """One comparison a tap: N * C * prod(output_size) * prod(kernel_size)."""
        return self.batch * self.channels * prod(self.output_size) * prod(self.kernel_size)

    @property
    def valid_flops(self) -> int:
        """The same, without the taps that fall in padding."""
        return self.batch * self.channels * self.valid_taps

    def window(self, axis: int, inputs: Span, outputs: Span) -> PoolShape:
        """The same pooling between a range of input rows and one of output rows alone."""
        input_size, output_size, padding = self._cut(axis, inputs, outputs)
        return replace(self, input_size=input_size, output_size=output_size, padding=padding)

    def with_batch(self, batch: int) -> PoolShape:
        return replace(self, batch=batch)
