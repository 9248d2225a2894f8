"""Requests of transposed convolutions: forward, and the gradients of input, weight and bias."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from convgrad.contract.convolution import ConvRequest, Gradient
from convgrad.contract.fields import IntOrInts, Tensor, distinct_choices

__all__ = ["ConvTransposeBackwardRequest", "ConvTransposeFwdRequest", "ConvTransposeRequest"]


class ConvTransposeRequest(ConvRequest):
    """A transposed convolution."""

    output_padding: IntOrInts = Field(
        default=0,
        description="Rows added at the end of the output: one int or one per dimension, below the "
        "larger of stride and dilation.",
    )


class ConvTransposeFwdRequest(ConvTransposeRequest):
    """Transposed convolution (torch.nn.functional.conv_transpose1d to conv_transpose3d).

    output[n, k, i] = bias[k] + sum over c, and over taps r and inputs p with p*stride +
    r*dilation - pad_before = i, of input[n, c, p] * weight[c, k, r]

    Shapes: input [N, C_in, *in], weight [C_in, C_out/groups, *kernel], bias [C_out] -> output
    [N, C_out, *out], in 1, 2 or 3 dimensions, with out = (in-1)*stride - pad_before - pad_after +
    dilation*(kernel-1) + output_padding + 1.
    Dtypes: float16, bfloat16, float32, float64, one for all; sums in float32 or wider.
    Layout: channels first unless `layout` names another; channels last, weight is [C_in, *kernel,
    C_out/groups].
    Source: PyTorch's conv_transpose1d, conv_transpose2d and conv_transpose3d.
    """

    operation: ClassVar[str] = "conv_transpose_fwd"

    input: Tensor = Field(description="The layer's input, [N, C_in, *in].")
    weight: Tensor = Field(description="The filters, [C_in, C_out/groups, *kernel].")
    bias: Tensor | None = Field(
        default=None, description="One value for each output channel, [C_out]."
    )


class ConvTransposeBackwardRequest(ConvTransposeRequest):
    """Any of the three gradients of a transposed convolution from one upload.

    grad_input[n, c, p] = sum over k, r of grad_output[n, k, i] * weight[c, k, r]; grad_weight[c, k,
    r] = sum over n, p of input[n, c, p] * grad_output[n, k, i]; grad_bias[k] = sum over n, i of
    grad_output[n, k, i]; with i = p*stride + r*dilation - pad_before.

    Shapes: grad_output [N, C_out, *out], input [N, C_in, *in], weight [C_in, C_out/groups, *kernel]
    -> grad_input [N, C_in, *in], grad_weight [C_in, C_out/groups, *kernel], grad_bias [C_out].
    Dtypes: float16, bfloat16, float32, float64, one for all; sums in float32 or wider.
    Layout: channels first unless `layout` names another.
    Source: PyTorch's aten::convolution_backward with transposed=True.
    """

    operation: ClassVar[str] = "conv_transpose_backward"

    grad_output: Tensor = Field(
        description="Gradient with respect to the layer's output, [N, C_out, *out]."
    )
    input: Tensor = Field(description="The layer's input, [N, C_in, *in].")
    weight: Tensor = Field(description="The filters, [C_in, C_out/groups, *kernel].")
    outputs: Annotated[
        tuple[Gradient, ...], distinct_choices("grad_input", "grad_weight", "grad_bias")
    ] = Field(
        default=("grad_input", "grad_weight", "grad_bias"), description="Which gradients to return."
    )
