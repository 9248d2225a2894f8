"""The problems of transposed convolutions: forward, and any of the three gradients."""

from __future__ import annotations

from typing import Any, Protocol

from numpy.typing import NDArray

from convgrad.contract import (
    ConvTransposeBackwardRequest,
    ConvTransposeFwdRequest,
)
from convgrad_service.problems.consistency import agreed_groups, check_bias, divisible
from convgrad_service.problems.formulas import minimal_input_size
from convgrad_service.problems.geometry import ConvShape
from convgrad_service.problems.layouts import Layout, activation_shape
from convgrad_service.problems.passes import ConvPasses, Pass
from convgrad_service.problems.reading import (
    Activation,
    Steps,
    read_activation,
    read_filter,
    read_output_padding,
    wanted_outputs,
)
from convgrad_service.problems.sizes import InconsistentSizes, one_or_by, tuple_text

__all__ = [
    "Conv3dTranspose",
    "ConvTransposeBackward",
    "ConvTransposeFwd",
    "transposed_gradients_shape",
]


class ConvTransposeFwd:
    """output[n, c, i] = bias[c] + sum over k, r, o of input[n, k, o] * weight[k, c, r], over the
    (r, o) that meet i.

    This is the input gradient of the convolution ``conv``, whose output y is the input here, whose
    input x is the output, and whose weight is the weight [C_in, C_out/groups, *kernel].
    out = (in - 1)*stride - pad_before - pad_after + dilation*(k-1) + output_padding + 1.

    Shapes: input (N, K, *in), weight (K, C/G, *kernel), bias (C,) -> output (N, C, *out).
    Dtypes: ``dtype`` stored, sums in float32 (float64 for float64).
    Layout: ``layout``, any of 1D to 3D.

    Raises (from_request):
        InvalidProblem: sizes, types or parameters contradict each other.
    Source: PyTorch's conv_transpose1d to conv_transpose3d.
    """

    @staticmethod
    def from_request(request: ConvTransposeFwdRequest) -> ConvPasses:
        layout = Layout.of_tensor(request.layout, "input", request.input.shape)
        conv = transposed_shape(layout, request)
        bias = "bias" if check_bias("bias", request.bias, conv.in_channels) else None
        made = Pass("bwd_data", "output", (("input", "weight"),), bias)
        return ConvPasses.of(request, layout, conv, (made,))


class Conv3dTranspose(ConvTransposeFwd):
    """`ConvTransposeFwd` in 3D, under the name of Ascend C's operation.

    Shapes: input (N, K, D, H, W), weight (K, C/G, T, R, S), bias (C,) -> output (N, C, *out).
    Dtypes: ``dtype`` stored, sums in float32 (float64 for float64).
    Layout: ``layout``, any of 3D.

    Raises (from_request):
        InvalidProblem: as `ConvTransposeFwd`.
    Source: Ascend C's Conv3DTranspose.
    """

    @staticmethod
    def from_request(request: ConvTransposeFwdRequest) -> ConvPasses:
        layout = Layout.parse(request.layout, 3)
        layout.check_rank("input", request.input.shape, layout.activation)
        return ConvTransposeFwd.from_request(request)


class ConvTransposeBackward:
    """The gradients of a transposed convolution:

    grad_input = conv_fwd(grad_output, weight),
    grad_weight[k, c, r] = sum over n, o of input[n, k, o] * grad_output[n, c, i],
    grad_bias[c] = sum over n, i of grad_output[n, c, i].
    ``conv`` is that of `ConvTransposeFwd`.

    Shapes: grad_output (N, C, *out), input (N, K, *in), weight (K, C/G, *kernel) -> gradients of
    the shapes of input, weight and bias (C,).
    Dtypes: ``dtype`` stored, sums in float32 (float64 for float64).
    Layout: ``layout``, any of 1D to 3D.

    Raises (from_request):
        InvalidProblem: sizes, types or parameters contradict each other.
    Source: PyTorch's aten::convolution_backward with transposed=True.
    """

    @staticmethod
    def from_request(request: ConvTransposeBackwardRequest) -> ConvPasses:
        layout = Layout.of_tensor(request.layout, "grad_output", request.grad_output.shape)
        conv = transposed_gradients_shape(layout, request)
        every = (
            Pass("fwd", "grad_input", (("grad_output", "weight"),)),
            Pass("bwd_weight", "grad_weight", (("grad_output", "input"),)),
            Pass("input_sums", "grad_bias", (("grad_output",),)),
        )
        problem = ConvPasses.of(request, layout, conv, every)
        return problem.only(wanted_outputs(request.outputs, tuple(problem.outputs)))


class _Request(Protocol):
    """A request for a transposed convolution."""

    stride: Any
    padding: Any
    dilation: Any
    groups: int
    output_padding: Any

    @property
    def input(self) -> NDArray[Any]: ...
    @property
    def weight(self) -> NDArray[Any]: ...


class _BackwardRequest(_Request, Protocol):
    @property
    def grad_output(self) -> NDArray[Any]: ...


def transposed_shape(layout: Layout, request: _Request, *others: Activation) -> ConvShape:
    """Return the convolution whose transpose is requested; ``others`` have the same groups.

    Raises
    ------
    InvalidProblem
        Sizes or parameters contradict each other.
    """
    input = read_activation(layout, "input", request.input.shape)
    weight = read_filter(layout, "weight", request.weight.shape)
    steps = Steps.of(request, layout.ndim)
    groups = agreed_groups(layout, request.groups, input, weight, *others)
    divisible("input", input.channels, groups)
    if weight.out_channels != input.channels:
        raise InconsistentSizes(
            f"weight has shape {tuple_text(weight.shape)}, for {weight.out_channels} input "
            f"channels; expected {input.channels}, the channels of input ([C_in, "
            "C_out/groups, *kernel])"
        )
    extra = read_output_padding(request.output_padding, steps, layout.ndim)
    size = minimal_input_size(input.size, weight.kernel, *steps, extra, transposed=True)
    return ConvShape(
        batch=input.batch,
        groups=groups,
        in_channels=weight.in_channels * groups,
        out_channels=input.channels,
        input_size=size,
        kernel_size=weight.kernel,
        output_size=input.size,
        **steps._asdict(),
    )


def transposed_gradients_shape(layout: Layout, request: _BackwardRequest) -> ConvShape:
    """Like `transposed_shape`, and check the shape of grad_output.

    Raises
    ------
    InvalidProblem
        As `transposed_shape`, or grad_output has another shape; the message says which
        output_padding would give it.
    """
    grad = read_activation(layout, "grad_output", request.grad_output.shape)
    conv = transposed_shape(layout, request, grad)
    shape = activation_shape(layout, conv.batch, conv.groups, conv.in_channels, conv.input_size)
    if grad.shape == shape:
        return conv
    extra = read_output_padding(request.output_padding, Steps.of(request, layout.ndim), layout.ndim)
    more = [
        found - size + rows
        for found, size, rows in zip(grad.size, conv.input_size, extra, strict=True)
    ]
    limits = map(max, conv.stride, conv.dilation)
    other = tuple(more) != extra
    fits = other and all(0 <= rows < limit for rows, limit in zip(more, limits, strict=True))
    hint = f"; output_padding {one_or_by(more)} would yield its size" if fits else ""
    raise InconsistentSizes(
        f"grad_output has shape {tuple_text(grad.shape)}; expected {tuple_text(shape)} from "
        f"input's shape {tuple_text(request.input.shape)}, {conv.geometry_text} and output_padding "
        f"{one_or_by(extra)}{hint}"
    )
