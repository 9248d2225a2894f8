"""The problem of conv_fwd: a convolution."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from convgrad.contract import ConvFwdRequest
from convgrad_service.problems.base import Piece, TensorSpec
from convgrad_service.problems.consistency import agreed_groups, check_bias, check_filter_inputs
from convgrad_service.problems.convolution import ConvProblem
from convgrad_service.problems.formulas import conv_output_size
from convgrad_service.problems.geometry import ConvShape
from convgrad_service.problems.layouts import Layout
from convgrad_service.problems.reading import (
    Steps,
    check_precision,
    read_activation,
    read_filter,
    shared_dtype,
)

__all__ = ["ConvFwd"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvFwd(ConvProblem):
    """output[n, k, o] = bias[k] + sum over c, r of input[n, c, i] * weight[k, c, r], i where
    (o, r) meet.

    Shapes: input (N, C, *in), weight (K, C/G, *kernel), bias (K,) -> output (N, K, *out).
    Dtypes: ``dtype`` stored, sums in float32 (float64 for float64).
    Layout: ``layout``, any of 1D to 3D.

    Raises (from_request):
        InvalidProblem: sizes, types or parameters contradict each other.
    Source: PyTorch's convolution.
    """

    bias: bool = False

    @classmethod
    def from_request(cls, request: ConvFwdRequest) -> Self:
        dtype = shared_dtype(request.tensors())
        layout = Layout.of_tensor(request.layout, "input", request.input.shape)
        input = read_activation(layout, "input", request.input.shape)
        weight = read_filter(layout, "weight", request.weight.shape)
        steps = Steps.of(request, layout.ndim)
        groups = agreed_groups(layout, request.groups, input, weight)
        check_filter_inputs(layout, weight, input, groups)
        conv = ConvShape(
            batch=input.batch,
            groups=groups,
            in_channels=input.channels,
            out_channels=weight.out_channels,
            input_size=input.size,
            kernel_size=weight.kernel,
            output_size=conv_output_size("input", input.size, weight.kernel, *steps),
            **steps._asdict(),
        )
        problem = cls(
            conv=conv,
            dtype=dtype,
            layout=layout,
            precision=check_precision(request.precision),
            deterministic=request.deterministic,
            bias=check_bias("bias", request.bias, weight.out_channels),
        )
        problem._check_outputs()
        return problem

    @property
    def operation(self) -> str:
        return "conv_fwd"

    @property
    def inputs(self) -> Mapping[str, TensorSpec]:
        specs = {"input": self.input_spec, "weight": self.weight_spec}
        return specs | {"bias": self.bias_spec} if self.bias else specs

    @property
    def outputs(self) -> Mapping[str, TensorSpec]:
        return {"output": self.output_spec}

    def _cut(self, parts: int) -> tuple[Piece, ...]:
        """Split by N, then by rows of output with the rows of input that they read."""
        return self._cut_result(parts, source="input", result="output", backward=False)
