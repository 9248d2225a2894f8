"""What problems of one convolution share: fields, the shapes of tensors, and splitting."""

from __future__ import annotations

from dataclasses import dataclass, replace

from convgrad.dtypes import DType
from convgrad_service.problems.base import Piece, Problem, TensorSpec
from convgrad_service.problems.geometry import ConvShape
from convgrad_service.problems.layouts import Layout, activation_shape, weight_shape
from convgrad_service.problems.sizes import check_shape
from convgrad_service.problems.slicing import activation_slices, grid, whole

__all__ = ["ConvProblem", "conv_input_spec", "conv_output_spec", "conv_weight_spec"]


def conv_input_spec(conv: ConvShape, layout: Layout, dtype: DType) -> TensorSpec:
    """Return the spec of a convolution's input, or of its gradient."""
    sizes = conv.batch, conv.groups, conv.in_channels, conv.input_size
    return TensorSpec(activation_shape(layout, *sizes), dtype)


def conv_output_spec(conv: ConvShape, layout: Layout, dtype: DType) -> TensorSpec:
    """Return the spec of a convolution's output, or of its gradient."""
    sizes = conv.batch, conv.groups, conv.out_channels, conv.output_size
    return TensorSpec(activation_shape(layout, *sizes), dtype)


def conv_weight_spec(conv: ConvShape, layout: Layout, dtype: DType) -> TensorSpec:
    """Return the spec of a convolution's weight, or of its gradient."""
    sizes = conv.groups, conv.in_channels, conv.out_channels, conv.kernel_size
    return TensorSpec(weight_shape(layout, *sizes), dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvProblem(Problem):
    """A problem of one convolution, ``conv``, on tensors in one layout."""

    conv: ConvShape
    dtype: DType
    layout: Layout
    precision: str = "highest"
    deterministic: bool = True

    @property
    def flops(self) -> int:
        return self.conv.flops

    @property
    def valid_flops(self) -> int:
        return self.conv.valid_flops

    @property
    def input_spec(self) -> TensorSpec:
        """The convolution's input, or its gradient."""
        return conv_input_spec(self.conv, self.layout, self.dtype)

    @property
    def output_spec(self) -> TensorSpec:
        """The convolution's output, or its gradient."""
        return conv_output_spec(self.conv, self.layout, self.dtype)

    @property
    def weight_spec(self) -> TensorSpec:
        """The weight, or its gradient."""
        return conv_weight_spec(self.conv, self.layout, self.dtype)

    @property
    def bias_spec(self) -> TensorSpec:
        """The bias, or its gradient: one value for each output channel."""
        return TensorSpec((self.conv.out_channels,), self.dtype)

    def _check_outputs(self) -> None:
        """Raise InvalidProblem if an output is too large."""
        for name, spec in self.outputs.items():
            check_shape(name, spec.shape)

    def _cut_result(
        self,
        parts: int,
        *,
        source: str,
        result: str,
        backward: bool,
        along: tuple[str, ...] = (),
    ) -> tuple[Piece, ...]:
        """Split by N, then by rows of the result, each with the rows of the source that they meet.

        The result is the convolution's output or, ``backward``, its input's gradient. Inputs in
        ``along`` are split like the result; other inputs are read whole.
        """
        conv, layout = self.conv, self.layout
        rows_of = conv.input_size if backward else conv.output_size
        pieces = []
        for samples, rows in grid(conv.batch, rows_of[0], parts):
            met = conv.outputs_for(0, rows) if backward else conv.inputs_for(0, rows)
            window = conv.window(0, rows, met) if backward else conv.window(0, met, rows)
            own = activation_slices(layout, samples, rows)
            inputs = {name: whole(len(spec.shape)) for name, spec in self.inputs.items()}
            inputs[source] = activation_slices(layout, samples, met)
            inputs.update((name, own) for name in along if name in inputs)
            pieces.append(
                Piece(
                    replace(self, conv=window.with_batch(samples[1] - samples[0])),
                    inputs,
                    {result: own},
                    {result: "concatenate"},
                )
            )
        return tuple(pieces)
