"""The problem of conv_backward: any of a convolution's three gradients in one request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

from numpy.typing import NDArray

from convgrad.contract import ConvBackwardRequest
from convgrad.dtypes import DType
from convgrad_service.problems.base import Piece, TensorSpec
from convgrad_service.problems.consistency import (
    agreed_groups,
    check_filter_inputs,
    check_output_size,
    same_batch,
    same_channels,
)
from convgrad_service.problems.conv_bwd_data import ConvBwdData
from convgrad_service.problems.convolution import ConvProblem
from convgrad_service.problems.geometry import ConvShape, Span
from convgrad_service.problems.grouped_conv_bwd_weight import GroupedConvBwdWeight, sum_dtype
from convgrad_service.problems.layouts import Layout
from convgrad_service.problems.reading import (
    Steps,
    check_precision,
    read_activation,
    read_filter,
    shared_dtype,
    wanted_outputs,
)
from convgrad_service.problems.slicing import activation_slices, even_spans, whole

__all__ = ["ConvBackward", "gradients_shape"]

OUTPUTS = ("grad_input", "grad_weight", "grad_bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvBackward(ConvProblem):
    """grad_input as in conv_bwd_data, grad_weight and grad_bias as in grouped_conv_bwd_weight.

    ``wanted`` are the requested gradients, in that order; ``parts`` are the problems that compute
    them. ``weight_dtype`` is set only in pieces, whose grad_weight and grad_bias are partial sums.

    Shapes: grad_output (N, K, *out), input (N, C, *in), weight (K, C/G, *kernel) -> gradients of
    the shapes of input, weight and bias (K,).
    Dtypes: ``dtype`` stored, sums in float32 (float64 for float64).
    Layout: ``layout``, any of 1D to 3D.

    Raises (from_request):
        InvalidProblem: sizes, types or parameters contradict each other.
    Source: PyTorch's aten::convolution_backward.
    """

    wanted: tuple[str, ...] = OUTPUTS
    weight_dtype: DType | None = None

    @classmethod
    def from_request(cls, request: ConvBackwardRequest) -> Self:
        dtype = shared_dtype(request.tensors())
        layout = Layout.of_tensor(request.layout, "grad_output", request.grad_output.shape)
        return cls(
            conv=gradients_shape(layout, request),
            dtype=dtype,
            layout=layout,
            precision=check_precision(request.precision),
            deterministic=request.deterministic,
            wanted=wanted_outputs(request.outputs, OUTPUTS),
        )

    @property
    def operation(self) -> str:
        return "conv_backward"

    @property
    def parts(self) -> tuple[ConvBwdData | GroupedConvBwdWeight, ...]:
        """The problems that compute the gradients."""
        data = ConvBwdData(
            conv=self.conv,
            dtype=self.dtype,
            layout=self.layout,
            precision=self.precision,
            deterministic=self.deterministic,
        )
        of_weight = tuple(name for name in self.wanted if name != "grad_input")
        weight = GroupedConvBwdWeight(
            conv=self.conv,
            dtype=self.dtype,
            layout=self.layout,
            precision=self.precision,
            deterministic=self.deterministic,
            weight_dtype=self.weight_dtype or self.dtype,
            wanted=of_weight,
        )
        chosen: list[ConvBwdData | GroupedConvBwdWeight] = []
        if "grad_input" in self.wanted:
            chosen.append(data)
        if of_weight:
            chosen.append(weight)
        return tuple(chosen)

    @property
    def flops(self) -> int:
        return sum(part.flops for part in self.parts)

    @property
    def valid_flops(self) -> int:
        return sum(part.valid_flops for part in self.parts)

    @property
    def inputs(self) -> Mapping[str, TensorSpec]:
        """The tensors that the wanted gradients need; others in the request are not read."""
        return {name: spec for part in self.parts for name, spec in part.inputs.items()}

    @property
    def outputs(self) -> Mapping[str, TensorSpec]:
        return {name: spec for part in self.parts for name, spec in part.outputs.items()}

    def _cut(self, parts: int) -> tuple[Piece, ...]:
        """Split by N, where all gradients share a piece; further, split each part separately.

        Their rows differ: pieces of grad_input read overlapping rows, those of grad_weight do not.
        """
        if parts > self.conv.batch or len(self.parts) == 1:
            return tuple(piece for part in self.parts for piece in part.split(parts))
        partial = replace(self, weight_dtype=sum_dtype(self.dtype))
        return tuple(partial._samples(samples) for samples in even_spans(self.conv.batch, parts))

    def _samples(self, samples: Span) -> Piece:
        of_input = activation_slices(self.layout, samples, (0, self.conv.input_size[0]))
        of_output = activation_slices(self.layout, samples, (0, self.conv.output_size[0]))
        own = {"input": of_input, "grad_output": of_output, "grad_input": of_input}
        inputs, outputs = (
            {name: own.get(name, whole(len(spec.shape))) for name, spec in specs.items()}
            for specs in (self.inputs, self.outputs)
        )
        return Piece(
            replace(self, conv=self.conv.with_batch(samples[1] - samples[0])),
            inputs,
            outputs,
            {name: "concatenate" if name == "grad_input" else "sum" for name in outputs},
        )

    def finish(
        self, name: str, total: NDArray[Any], tensors: Mapping[str, NDArray[Any]]
    ) -> NDArray[Any]:
        return self.parts[-1].finish(name, total, tensors)


class _Request(Protocol):
    """A request for first or second gradients of a convolution."""

    stride: Any
    padding: Any
    dilation: Any
    groups: int

    @property
    def grad_output(self) -> NDArray[Any]: ...
    @property
    def input(self) -> NDArray[Any]: ...
    @property
    def weight(self) -> NDArray[Any]: ...


def gradients_shape(layout: Layout, request: _Request) -> ConvShape:
    """Return the convolution of grad_output, input and weight.

    Raises
    ------
    InvalidProblem
        Their sizes or the parameters contradict each other.
    """
    grad = read_activation(layout, "grad_output", request.grad_output.shape)
    input = read_activation(layout, "input", request.input.shape)
    weight = read_filter(layout, "weight", request.weight.shape)
    steps = Steps.of(request, layout.ndim)
    groups = agreed_groups(layout, request.groups, input, grad, weight)
    same_batch(grad, input)
    same_channels(weight, grad)
    check_filter_inputs(layout, weight, input, groups)
    conv = ConvShape(
        batch=input.batch,
        groups=groups,
        in_channels=input.channels,
        out_channels=grad.channels,
        input_size=input.size,
        kernel_size=weight.kernel,
        output_size=grad.size,
        **steps._asdict(),
    )
    check_output_size(layout, "grad_output", grad.shape, conv)
    return conv
