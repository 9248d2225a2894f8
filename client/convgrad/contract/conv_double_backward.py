"""Requests of the double backward passes of convolutions and transposed convolutions."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from convgrad.contract.conv_transpose import ConvTransposeRequest
from convgrad.contract.convolution import ConvRequest
from convgrad.contract.fields import Tensor, distinct_choices

__all__ = ["ConvDoubleBackwardRequest", "ConvTransposeDoubleBackwardRequest"]

SecondGradient = Literal["grad_grad_output", "grad_input", "grad_weight"]


class DoubleBackwardRequest(ConvRequest):
    """The tensors of a double backward pass."""

    grad_output: Tensor = Field(
        description="Gradient with respect to the layer's output, as given to the backward pass."
    )
    input: Tensor = Field(description="The layer's input.")
    weight: Tensor = Field(description="The filters.")
    grad_grad_input: Tensor | None = Field(
        default=None,
        description="Gradient with respect to the backward pass's grad_input, of input's shape; "
        "zero if omitted.",
    )
    grad_grad_weight: Tensor | None = Field(
        default=None,
        description="Gradient with respect to the backward pass's grad_weight, of weight's shape; "
        "zero if omitted.",
    )
    grad_grad_bias: Tensor | None = Field(
        default=None,
        description="Gradient with respect to the backward pass's grad_bias, one value for each "
        "output channel; zero if omitted.",
    )
    outputs: Annotated[
        tuple[SecondGradient, ...],
        distinct_choices("grad_grad_output", "grad_input", "grad_weight"),
    ] = Field(
        default=("grad_grad_output", "grad_input", "grad_weight"),
        description="Which gradients to return.",
    )


class ConvDoubleBackwardRequest(DoubleBackwardRequest):
    """Double backward pass of a convolution: the gradients of conv_backward, from one upload.

    grad_grad_output = conv(grad_grad_input, weight) + conv(input, grad_grad_weight) +
    grad_grad_bias; grad_input is what conv_bwd_data makes of grad_output and grad_grad_weight,
    grad_weight what grouped_conv_bwd_weight makes of grad_grad_input and grad_output.

    Shapes: grad_output [N, K, *out], input and grad_grad_input [N, C, *in], weight and
    grad_grad_weight [K, C/groups, *kernel], grad_grad_bias [K] -> grad_grad_output [N, K, *out],
    grad_input [N, C, *in], grad_weight [K, C/groups, *kernel].
    Dtypes: float16, bfloat16, float32, float64, one for all; sums in float32 or wider.
    Layout: channels first unless `layout` names another.
    Source: PyTorch's aten::_convolution_double_backward.
    """

    operation: ClassVar[str] = "conv_double_backward"


class ConvTransposeDoubleBackwardRequest(DoubleBackwardRequest, ConvTransposeRequest):
    """Double backward pass of a transposed convolution: the gradients of conv_transpose_backward.

    As conv_double_backward, with conv_transpose_fwd for the convolution: grad_grad_output =
    conv_transpose(grad_grad_input, weight) + conv_transpose(input, grad_grad_weight) +
    grad_grad_bias.

    Shapes: grad_output [N, C_out, *out], input and grad_grad_input [N, C_in, *in], weight and
    grad_grad_weight [C_in, C_out/groups, *kernel], grad_grad_bias [C_out] -> grad_grad_output
    [N, C_out, *out], grad_input [N, C_in, *in], grad_weight [C_in, C_out/groups, *kernel].
    Dtypes: float16, bfloat16, float32, float64, one for all; sums in float32 or wider.
    Layout: channels first unless `layout` names another.
    Source: PyTorch's aten::_convolution_double_backward with transposed=True.
    """

    operation: ClassVar[str] = "conv_transpose_double_backward"
