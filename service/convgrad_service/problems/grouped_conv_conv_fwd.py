"""The problem of grouped_conv_conv_fwd: two convolutions whose intermediate is not an output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from convgrad.contract import GroupedConvConvFwdRequest
from convgrad.contract.fused import ConvParameters
from convgrad.dtypes import DType
from convgrad_service.problems.base import Piece, Problem, Slices, TensorSpec
from convgrad_service.problems.consistency import agreed_groups, check_bias, check_filter_inputs
from convgrad_service.problems.convolution import (
    conv_input_spec,
    conv_output_spec,
    conv_weight_spec,
)
from convgrad_service.problems.formulas import conv_output_size
from convgrad_service.problems.geometry import ConvShape, Span
from convgrad_service.problems.layouts import Layout, activation_shape
from convgrad_service.problems.reading import (
    Activation,
    Filter,
    Steps,
    check_precision,
    read_activation,
    read_filter,
    shared_dtype,
)
from convgrad_service.problems.sizes import check_shape
from convgrad_service.problems.slicing import activation_slices, grid, whole

__all__ = ["GroupedConvConvFwd"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedConvConvFwd(Problem):
    """output = activation1(conv1(activation0(conv0(input) + bias0)) + bias1).

    The intermediate is rounded once to ``dtype``, after activation0. Its rows outside
    ``conv0.output_size`` are conv1's zero padding. Each convolution has its own groups; in a
    grouped layout, the input has those of conv0 and the output those of conv1.

    Shapes: input (N, C, *in), weight0 (M, C/G0, *kernel0), bias0 (M,), weight1 (K, M/G1, *kernel1),
    bias1 (K,) -> output (N, K, *out).
    Dtypes: ``dtype`` stored, sums in float32 (float64 for float64).
    Layout: ``layout``, any of 1D to 3D.

    Raises (from_request):
        InvalidProblem: sizes, types or parameters contradict each other.
    Source: composable_kernel's grouped_conv_conv_fwd.
    """

    conv0: ConvShape
    conv1: ConvShape
    dtype: DType
    layout: Layout
    precision: str = "highest"
    deterministic: bool = True
    bias0: bool = False
    bias1: bool = False
    activation0: str = "none"
    activation1: str = "none"

    @classmethod
    def from_request(cls, request: GroupedConvConvFwdRequest) -> Self:
        dtype = shared_dtype(request.tensors())
        layout = Layout.of_tensor(request.layout, "input", request.input.shape)
        input = read_activation(layout, "input", request.input.shape)
        weight0 = read_filter(layout, "weight0", request.weight0.shape)
        weight1 = read_filter(layout, "weight1", request.weight1.shape)
        groups0 = agreed_groups(layout, request.conv0.groups, input, weight0, prefix="conv0.")
        conv0 = _conv(layout, request.conv0, "conv0.", groups0, input, weight0)
        groups1 = agreed_groups(layout, request.conv1.groups, weight1, prefix="conv1.")
        shape = activation_shape(
            layout, conv0.batch, groups0, conv0.out_channels, conv0.output_size
        )
        intermediate = Activation(
            "the intermediate",
            check_shape("the intermediate", shape),
            conv0.batch,
            groups1,
            conv0.out_channels,
            conv0.output_size,
        )
        conv1 = _conv(layout, request.conv1, "conv1.", groups1, intermediate, weight1)
        problem = cls(
            conv0=conv0,
            conv1=conv1,
            dtype=dtype,
            layout=layout,
            precision=check_precision(request.precision),
            deterministic=request.deterministic,
            bias0=check_bias("bias0", request.bias0, conv0.out_channels),
            bias1=check_bias("bias1", request.bias1, conv1.out_channels),
            activation0=request.activation0,
            activation1=request.activation1,
        )
        check_shape("output", problem.outputs["output"].shape)
        return problem

    @property
    def operation(self) -> str:
        return "grouped_conv_conv_fwd"

    @property
    def flops(self) -> int:
        return self.conv0.flops + self.conv1.flops

    @property
    def valid_flops(self) -> int:
        return self.conv0.valid_flops + self.conv1.valid_flops

    @property
    def intermediate(self) -> TensorSpec:
        """The output of conv0, which is the input of conv1."""
        return conv_output_spec(self.conv0, self.layout, self.dtype)

    @property
    def inputs(self) -> Mapping[str, TensorSpec]:
        layout, dtype = self.layout, self.dtype
        specs = {
            "input": conv_input_spec(self.conv0, layout, dtype),
            "weight0": conv_weight_spec(self.conv0, layout, dtype),
            "weight1": conv_weight_spec(self.conv1, layout, dtype),
        }
        if self.bias0:
            specs["bias0"] = TensorSpec((self.conv0.out_channels,), dtype)
        if self.bias1:
            specs["bias1"] = TensorSpec((self.conv1.out_channels,), dtype)
        return specs

    @property
    def outputs(self) -> Mapping[str, TensorSpec]:
        return {"output": conv_output_spec(self.conv1, self.layout, self.dtype)}

    def _cut(self, parts: int) -> tuple[Piece, ...]:
        """Split by N, then by rows of output; halo rows of the intermediate are computed twice."""
        cuts = grid(self.conv1.batch, self.conv1.output_size[0], parts)
        return tuple(self._piece(samples, rows) for samples, rows in cuts)

    def _piece(self, samples: Span, rows: Span) -> Piece:
        between = self.conv1.inputs_for(0, rows)
        read = self.conv0.inputs_for(0, between)
        batch = samples[1] - samples[0]
        inputs: dict[str, Slices] = {
            name: whole(len(spec.shape)) for name, spec in self.inputs.items()
        }
        inputs["input"] = activation_slices(self.layout, samples, read)
        return Piece(
            replace(
                self,
                conv0=self.conv0.window(0, read, between).with_batch(batch),
                conv1=self.conv1.window(0, between, rows).with_batch(batch),
            ),
            inputs,
            {"output": activation_slices(self.layout, samples, rows)},
            {"output": "concatenate"},
        )


def _conv(
    layout: Layout,
    parameters: ConvParameters,
    prefix: str,
    groups: int,
    input: Activation,
    weight: Filter,
) -> ConvShape:
    steps = Steps.of(parameters, layout.ndim, prefix)
    check_filter_inputs(layout, weight, input, groups)
    return ConvShape(
        batch=input.batch,
        groups=groups,
        in_channels=input.channels,
        out_channels=weight.out_channels,
        input_size=input.size,
        kernel_size=weight.kernel,
        output_size=conv_output_size(input.name, input.size, weight.kernel, *steps),
        **steps._asdict(),
    )
