"""Requests of convolutions: forward, and the gradients of input, weight and bias."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from convgrad.contract.base import Request
from convgrad.contract.fields import (
    Int,
    IntOrInts,
    Ints,
    LayoutName,
    Number,
    Padding,
    SplitK,
    Tensor,
    distinct_choices,
)

__all__ = [
    "ConvBackwardRequest",
    "ConvBwdDataRequest",
    "ConvFwdRequest",
    "ConvGeometry",
    "ConvRequest",
    "Gradient",
    "GroupedConvBwdWeightRequest",
]

FloatName = Literal["float16", "bfloat16", "float32", "float64"]
WeightGradient = Literal["grad_weight", "grad_bias"]
Gradient = Literal["grad_input", "grad_weight", "grad_bias"]


class ConvGeometry(Request):
    """The geometry that every convolution shares, in PyTorch's terms.

    Convolution means cross-correlation. Lists are in the order D, H, W, whatever the layout.
    """

    stride: IntOrInts = Field(
        default=1, description="Step between windows: one int or one per dimension."
    )
    padding: Padding = Field(
        default=0,
        description="Zeros around the input: one int, one per dimension, or a [before, after] pair "
        "per dimension.",
    )
    dilation: IntOrInts = Field(
        default=1, description="Step between the taps of a window: one int or one per dimension."
    )
    groups: Int = Field(default=1, description="Number of blocks the channels are divided into.")
    precision: Literal["highest", "high"] = Field(
        default="highest",
        description="highest computes float32 in true float32; high lets it use TF32.",
    )


class ConvRequest(ConvGeometry):
    """A convolution whose arrays may lie in any layout of its rank."""

    layout: LayoutName | None = Field(
        default=None,
        description="Order of the dimensions of all tensors: NCHW (channels first, the default "
        "in any rank), NHWC, or grouped ones such as NHWGC, and their 1D and 3D counterparts.",
    )


class ConvFwdRequest(ConvRequest):
    """Convolution: output = conv(input, weight) + bias.

    output[n, k, p] = bias[k] + sum over c, r of weight[k, c, r] * input[n, c, p*stride +
    r*dilation - pad_before]

    Shapes: input [N, C, *in], weight [K, C/groups, *kernel], bias [K] -> output [N, K, *out],
    in 1, 2 or 3 dimensions, with out = (in + pad_before + pad_after - dilation*(kernel-1) - 1)
    // stride + 1.
    Dtypes: float16, bfloat16, float32, float64, one for all; sums in float32 or wider.
    Layout: channels first unless `layout` names another.
    Source: PyTorch's conv1d, conv2d and conv3d.
    """

    operation: ClassVar[str] = "conv_fwd"

    input: Tensor = Field(description="The layer's input, [N, C, *in].")
    weight: Tensor = Field(description="The filters, [K, C/groups, *kernel].")
    bias: Tensor | None = Field(default=None, description="One value for each output channel, [K].")


class ConvBwdDataRequest(ConvRequest):
    """Gradient of a convolution with respect to its input: grad_input.

    grad_input[n, c, i] = sum over k, and over taps r and outputs p with p*stride + r*dilation -
    pad_before = i, of grad_output[n, k, p] * weight[k, c, r];
    with an epilogue, alpha * grad_input + beta * accumulate.

    Shapes: grad_output [N, K, *out], weight [K, C/groups, *kernel] -> grad_input [N, C, *in],
    in 1, 2 or 3 dimensions.
    Dtypes: float16, bfloat16, float32, float64, one for all; sums in float32 or wider.
    Layout: channels first unless `layout` names another.
    Source: composable_kernel's convnd_bwd_data; PyTorch's convolution_backward.
    """

    operation: ClassVar[str] = "conv_bwd_data"

    grad_output: Tensor = Field(
        description="Gradient with respect to the layer's output, [N, K, *out]."
    )
    weight: Tensor = Field(description="The filters, [K, C/groups, *kernel].")
    input_size: Ints | None = Field(
        default=None,
        description="Size of the input, spatial alone or the full shape. By default, the smallest "
        "input that yields grad_output.",
    )
    alpha: Number = Field(default=1.0, description="Factor of the gradient.")
    beta: Number | None = Field(
        default=None,
        description="Factor of accumulate, 1 when accumulate is given; needs accumulate.",
    )
    accumulate: Tensor | None = Field(
        default=None, description="Added to the gradient, times beta; of grad_input's shape."
    )


class GroupedConvBwdWeightRequest(ConvRequest):
    """Gradient of a convolution with respect to its weight, and to its bias on request.

    grad_weight[k, c, r] = sum over n, p of grad_output[n, k, p] * input[n, c, p*stride +
    r*dilation - pad_before]; grad_bias[k] = sum over n, p of grad_output[n, k, p];
    with an epilogue, alpha * grad_weight + beta * accumulate.

    Shapes: input [N, C, *in], grad_output [N, K, *out] -> grad_weight [K, C/groups, *kernel],
    grad_bias [K], in 1, 2 or 3 dimensions, groups from 1 to C.
    Dtypes: float16, bfloat16, float32, float64, one for all; sums in float32 or wider.
    Layout: channels first unless `layout` names another.
    Source: composable_kernel's grouped_conv_bwd_weight; PyTorch's convolution_backward.
    """

    operation: ClassVar[str] = "grouped_conv_bwd_weight"

    input: Tensor = Field(description="The layer's input, [N, C, *in].")
    grad_output: Tensor = Field(
        description="Gradient with respect to the layer's output, [N, K, *out]."
    )
    weight_size: Ints | None = Field(
        default=None,
        description="Size of the kernel, spatial alone or the weight's full shape. Needed where "
        "several kernels yield one grad_output from one input, as some strides above 1 allow.",
    )
    weight_dtype: FloatName | None = Field(
        default=None,
        description="float32 asks for gradients in float32 from 16-bit inputs; otherwise that of "
        "the inputs.",
    )
    split_k: SplitK = Field(
        default="auto",
        description="Number of parts into which the sum over N and space is divided.",
    )
    outputs: Annotated[tuple[WeightGradient, ...], distinct_choices("grad_weight", "grad_bias")] = (
        Field(default=("grad_weight",), description="Which gradients to return.")
    )
    alpha: Number = Field(default=1.0, description="Factor of the gradient.")
    beta: Number | None = Field(
        default=None,
        description="Factor of accumulate, 1 when accumulate is given; needs accumulate.",
    )
    accumulate: Tensor | None = Field(
        default=None, description="Added to the gradient, times beta; of grad_weight's shape."
    )


class ConvBackwardRequest(ConvRequest):
    """Any of the three gradients of a convolution from one upload (aten::convolution_backward).

    grad_input as conv_bwd_data gives it, grad_weight and grad_bias as grouped_conv_bwd_weight.

    Shapes: grad_output [N, K, *out], input [N, C, *in], weight [K, C/groups, *kernel] ->
    grad_input [N, C, *in], grad_weight [K, C/groups, *kernel], grad_bias [K].
    Dtypes: float16, bfloat16, float32, float64, one for all; sums in float32 or wider.
    Layout: channels first unless `layout` names another.
    Source: PyTorch's aten::convolution_backward.
    """

    operation: ClassVar[str] = "conv_backward"

    grad_output: Tensor = Field(
        description="Gradient with respect to the layer's output, [N, K, *out]."
    )
    input: Tensor = Field(description="The layer's input, [N, C, *in].")
    weight: Tensor = Field(description="The filters, [K, C/groups, *kernel].")
    outputs: Annotated[
        tuple[Gradient, ...], distinct_choices("grad_input", "grad_weight", "grad_bias")
    ] = Field(
        default=("grad_input", "grad_weight", "grad_bias"), description="Which gradients to return."
    )
