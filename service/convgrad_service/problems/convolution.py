"""What the problems of one convolution share: their fields and the shapes of their tensors."""

from __future__ import annotations

from dataclasses import dataclass

from convgrad.dtypes import DType
from convgrad_service.problems.base import Problem, TensorSpec
from convgrad_service.problems.geometry import ConvShape
from convgrad_service.problems.layouts import Layout, activation_shape, weight_shape
from convgrad_service.problems.sizes import check_shape

__all__ = ["ConvProblem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvProblem(Problem):
    """A problem about one convolution, ``conv``, on tensors in one layout."""

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
        conv = self.conv
        return TensorSpec(
            activation_shape(
                self.layout, conv.batch, conv.groups, conv.in_channels, conv.input_size
            ),
            self.dtype,
        )

    @property
    def output_spec(self) -> TensorSpec:
        """The convolution's output, or its gradient."""
        conv = self.conv
        return TensorSpec(
            activation_shape(
                self.layout, conv.batch, conv.groups, conv.out_channels, conv.output_size
            ),
            self.dtype,
        )

    @property
    def weight_spec(self) -> TensorSpec:
        """The weight, or its gradient."""
        conv = self.conv
        return TensorSpec(
            weight_shape(
                self.layout, conv.groups, conv.in_channels, conv.out_channels, conv.kernel_size
            ),
            self.dtype,
        )

    @property
    def bias_spec(self) -> TensorSpec:
        """The bias, or its gradient: one value for each output channel."""
        return TensorSpec((self.conv.out_channels,), self.dtype)

    def _check_outputs(self) -> None:
        """Raises InvalidProblem where an output that the request implies is too large."""
        for name, spec in self.outputs.items():
            check_shape(name, spec.shape)
