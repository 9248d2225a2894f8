"""The problem of conv3d_transpose: conv_bwd_data under its other name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from convgrad.contract import Conv3dTransposeRequest
from convgrad.errors import InvalidProblem
from convgrad_service.problems.agreement import agreed_groups, check_bias, divisible
from convgrad_service.problems.base import Piece, TensorSpec
from convgrad_service.problems.convolution import ConvProblem
from convgrad_service.problems.formulas import minimal_input_size
from convgrad_service.problems.geometry import ConvShape
from convgrad_service.problems.layouts import Layout
from convgrad_service.problems.reading import (
    Steps,
    check_precision,
    read_activation,
    read_filter,
    read_output_padding,
    shared_dtype,
)
from convgrad_service.problems.sizes import tuple_text

__all__ = ["Conv3dTranspose"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conv3dTranspose(ConvProblem):
    """output[n, c, i] = bias[c] + sum over k, r, o of input[n, k, o] * weight[k, c, r], over the
    (r, o) that meet i.

    ``conv`` is the convolution whose input gradient this is: its output is the input here, its
    input the output, and its weight (K, C/G, T, R, S) is the weight [C_in, C_out/groups, D, H, W].
    out = (in - 1)*stride - pad_before - pad_after + dilation*(k-1) + output_padding + 1.

    Shapes: input (N, K, *in), weight (K, C/G, *kernel), bias (C,) -> output (N, C, *out).
    Dtypes: ``dtype`` stored, sums in float32 (float64 for float64).
    Layout: ``layout``, one of 3D.

    Raises (from_request):
        InvalidProblem: sizes, types or parameters contradict each other.
    Source: Ascend C's Conv3DTranspose, PyTorch's conv_transpose3d.
    """

    bias: bool = False

    @classmethod
    def from_request(cls, request: Conv3dTransposeRequest) -> Self:
        dtype = shared_dtype(request.tensors())
        layout = Layout.parse(request.layout, 3)
        input = read_activation(layout, "input", request.input.shape)
        weight = read_filter(layout, "weight", request.weight.shape)
        steps = Steps.of(request, layout.ndim)
        groups = agreed_groups(layout, request.groups, input, weight)
        divisible("input", input.channels, groups)
        if weight.out_channels != input.channels:
            raise InvalidProblem(
                f"weight has shape {tuple_text(weight.shape)}, for {weight.out_channels} input "
                f"channels; expected {input.channels}, the channels of input ([C_in, "
                "C_out/groups, *kernel])"
            )
        extra = read_output_padding(request.output_padding, steps, layout.ndim)
        channels = weight.in_channels * groups
        conv = ConvShape(
            batch=input.batch,
            groups=groups,
            in_channels=channels,
            out_channels=input.channels,
            input_size=minimal_input_size(input.size, weight.kernel, *steps, extra),
            kernel_size=weight.kernel,
            output_size=input.size,
            **steps._asdict(),
        )
        problem = cls(
            conv=conv,
            dtype=dtype,
            layout=layout,
            precision=check_precision(request.precision),
            deterministic=request.deterministic,
            bias=check_bias("bias", request.bias, channels),
        )
        problem._check_outputs()
        return problem

    @property
    def operation(self) -> str:
        return "conv3d_transpose"

    @property
    def inputs(self) -> Mapping[str, TensorSpec]:
        specs = {"input": self.output_spec, "weight": self.weight_spec}
        if self.bias:
            specs["bias"] = TensorSpec((self.conv.in_channels,), self.dtype)
        return specs

    @property
    def outputs(self) -> Mapping[str, TensorSpec]:
        return {"output": self.input_spec}

    def _cut(self, parts: int) -> tuple[Piece, ...]:
        """By N, then by depth of the output with the depth of the input that touches it."""
        return self._cut_result(parts, source="input", result="output", backward=True)
