"""The problem of conv_bwd_data: the gradient of a convolution's input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from convgrad.contract import ConvBwdDataRequest
from convgrad_service.problems.base import PLAIN, Epilogue, Piece, TensorSpec
from convgrad_service.problems.consistency import (
    agreed_groups,
    check_output_size,
    divisible,
    same_channels,
)
from convgrad_service.problems.convolution import ConvProblem
from convgrad_service.problems.formulas import minimal_input_size
from convgrad_service.problems.geometry import ConvShape
from convgrad_service.problems.layouts import Layout
from convgrad_service.problems.reading import (
    Steps,
    check_precision,
    input_size_of,
    read_activation,
    read_filter,
    shared_dtype,
)
from convgrad_service.problems.sizes import require_shape

__all__ = ["ConvBwdData"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvBwdData(ConvProblem):
    """grad_input[n, c, i] = alpha * sum over k, r, o of grad_output[n, k, o] * weight[k, c, r]
    + beta * accumulate[n, c, i], over the (r, o) that meet i.

    ``conv`` is the forward convolution: its input is grad_input, its output grad_output.

    Shapes: grad_output (N, K, *out), weight (K, C/G, *kernel) -> grad_input (N, C, *in), and
    accumulate like it.
    Dtypes: ``dtype`` stored, sums in float32 (float64 for float64).
    Layout: ``layout``, any of 1D to 3D.

    Raises (from_request):
        InvalidProblem: sizes, types or parameters contradict each other.
    Source: composable_kernel's convnd_bwd_data, PyTorch's convolution_backward.
    """

    epilogue: Epilogue = PLAIN

    @classmethod
    def from_request(cls, request: ConvBwdDataRequest) -> Self:
        dtype = shared_dtype(request.tensors())
        layout = Layout.of_tensor(request.layout, "grad_output", request.grad_output.shape)
        grad = read_activation(layout, "grad_output", request.grad_output.shape)
        weight = read_filter(layout, "weight", request.weight.shape)
        steps = Steps.of(request, layout.ndim)
        groups = agreed_groups(layout, request.groups, grad, weight)
        same_channels(weight, grad)
        divisible("grad_output", grad.channels, groups)
        channels = weight.in_channels * groups
        if request.input_size is None:
            size = minimal_input_size(grad.size, weight.kernel, *steps)
        else:
            size = input_size_of(layout, request.input_size, grad.batch, groups, channels)
        conv = ConvShape(
            batch=grad.batch,
            groups=groups,
            in_channels=channels,
            out_channels=grad.channels,
            input_size=size,
            kernel_size=weight.kernel,
            output_size=grad.size,
            **steps._asdict(),
        )
        check_output_size(layout, "grad_output", grad.shape, conv)
        problem = cls(
            conv=conv,
            dtype=dtype,
            layout=layout,
            precision=check_precision(request.precision),
            deterministic=request.deterministic,
            epilogue=Epilogue.of(request.alpha, request.beta, request.accumulate),
        )
        problem._check_outputs()
        if request.accumulate is not None:
            shape = problem.input_spec.shape
            require_shape("accumulate", request.accumulate.shape, shape, "(grad_input's shape)")
        return problem

    @property
    def operation(self) -> str:
        return "conv_bwd_data"

    @property
    def inputs(self) -> Mapping[str, TensorSpec]:
        specs = {"grad_output": self.output_spec, "weight": self.weight_spec}
        if self.epilogue.accumulate:
            specs["accumulate"] = self.input_spec
        return specs

    @property
    def outputs(self) -> Mapping[str, TensorSpec]:
        return {"grad_input": self.input_spec}

    def _cut(self, parts: int) -> tuple[Piece, ...]:
        """Split by N, then by rows of grad_input with the rows of grad_output that meet them."""
        return self._cut_result(
            parts, source="grad_output", result="grad_input", backward=True, along=("accumulate",)
        )
