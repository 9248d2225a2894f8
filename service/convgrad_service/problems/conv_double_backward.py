"""The problems of second derivatives of a convolution or transposed convolution."""

from __future__ import annotations

from convgrad.contract import ConvDoubleBackwardRequest, ConvTransposeDoubleBackwardRequest
from convgrad.errors import InvalidProblem
from convgrad_service.problems.consistency import check_bias
from convgrad_service.problems.conv_backward import gradients_shape
from convgrad_service.problems.conv_transpose import transposed_gradients_shape
from convgrad_service.problems.geometry import ConvShape
from convgrad_service.problems.layouts import Layout
from convgrad_service.problems.passes import ConvPasses, Direction, Pass
from convgrad_service.problems.reading import wanted_outputs
from convgrad_service.problems.sizes import require_shape

__all__ = ["ConvDoubleBackward", "ConvTransposeDoubleBackward"]

OUTPUTS = ("grad_grad_output", "grad_input", "grad_weight")
GIVEN = ("grad_grad_input", "grad_grad_weight", "grad_grad_bias")


class ConvDoubleBackward:
    """The gradients of conv_backward's inputs, from the gradients of its outputs:

    grad_grad_output = conv(grad_grad_input, weight) + conv(input, grad_grad_weight)
                       + grad_grad_bias,
    grad_input = conv_bwd_data(grad_output, grad_grad_weight),
    grad_weight = grouped_conv_bwd_weight(grad_grad_input, grad_output).
    Tensors that are not given count as zero.

    Shapes: grad_output (N, K, *out), input and grad_grad_input (N, C, *in), weight and
    grad_grad_weight (K, C/G, *kernel), grad_grad_bias (K,) -> grad_grad_output, grad_input and
    grad_weight of the shapes of grad_output, input and weight.
    Dtypes: ``dtype`` stored, sums in float32 (float64 for float64); grad_grad_output is one sum.
    Layout: ``layout``, any of 1D to 3D.

    Raises (from_request):
        InvalidProblem: sizes, types or parameters contradict each other, or there is no
            grad_grad tensor.
    Source: PyTorch's aten::_convolution_double_backward.
    """

    @staticmethod
    def from_request(request: ConvDoubleBackwardRequest) -> ConvPasses:
        layout = Layout.of_tensor(request.layout, "grad_output", request.grad_output.shape)
        return _problem(request, layout, gradients_shape(layout, request), transposed=False)


class ConvTransposeDoubleBackward:
    """Like `ConvDoubleBackward` for conv_transpose_backward, with forward and bwd_data swapped.

    Shapes: grad_output (N, C, *out), input and grad_grad_input (N, K, *in), weight and
    grad_grad_weight (K, C/G, *kernel), grad_grad_bias (C,) -> grad_grad_output, grad_input and
    grad_weight of the shapes of grad_output, input and weight.
    Dtypes: ``dtype`` stored, sums in float32 (float64 for float64); grad_grad_output is one sum.
    Layout: ``layout``, any of 1D to 3D.

    Raises (from_request):
        InvalidProblem: as `ConvDoubleBackward`.
    Source: PyTorch's aten::_convolution_double_backward with transposed=True.
    """

    @staticmethod
    def from_request(request: ConvTransposeDoubleBackwardRequest) -> ConvPasses:
        layout = Layout.of_tensor(request.layout, "grad_output", request.grad_output.shape)
        conv = transposed_gradients_shape(layout, request)
        return _problem(request, layout, conv, transposed=True)


def _problem(
    request: ConvDoubleBackwardRequest | ConvTransposeDoubleBackwardRequest,
    layout: Layout,
    conv: ConvShape,
    *,
    transposed: bool,
) -> ConvPasses:
    tensors = request.tensors()
    given = {name for name in GIVEN if name in tensors}
    if not given:
        raise InvalidProblem(f"there is none of {', '.join(GIVEN)}; expected at least one")
    for name, like in (("grad_grad_input", "input"), ("grad_grad_weight", "weight")):
        if name in given:
            require_shape(name, tensors[name].shape, tensors[like].shape, f"(the shape of {like})")
    channels = conv.in_channels if transposed else conv.out_channels
    check_bias("grad_grad_bias", request.grad_grad_bias, channels)

    def terms(*products: tuple[str, str]) -> tuple[tuple[str, str], ...]:
        return tuple(one for one in products if not {*GIVEN} & {*one} - given)

    outer: Direction = "bwd_data" if transposed else "fwd"
    inner: Direction = "fwd" if transposed else "bwd_data"
    of_weight = ("grad_output", "grad_grad_input")
    passes = (
        Pass(
            outer,
            "grad_grad_output",
            terms(("grad_grad_input", "weight"), ("input", "grad_grad_weight")),
            "grad_grad_bias" if "grad_grad_bias" in given else None,
        ),
        Pass(inner, "grad_input", terms(("grad_output", "grad_grad_weight"))),
        Pass("bwd_weight", "grad_weight", terms(of_weight if transposed else of_weight[::-1])),
    )
    problem = ConvPasses.of(request, layout, conv, passes)
    return problem.only(wanted_outputs(request.outputs, OUTPUTS))
