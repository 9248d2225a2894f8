"""The request of two fused convolutions, whose intermediate never leaves the chip."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from convgrad.contract.base import Parameters, Request
from convgrad.contract.fields import Int, IntOrInts, LayoutName, Padding, Tensor

__all__ = ["ConvParameters", "GroupedConvConvFwdRequest"]

Activation = Literal["none", "relu", "relu6", "silu"]


class ConvParameters(Parameters):
    """Geometry of one of the two convolutions, in PyTorch's terms."""

    stride: IntOrInts = Field(
        default=1, description="Step between windows: one int or one per dimension."
    )
    padding: Padding = Field(
        default=0,
        description="Zeros around the input: one int, one per dimension, or a [before, after] pair "
        "per dimension.",
    )
    dilation: IntOrInts = Field(default=1, description="Step between the taps of a window.")
    groups: Int = Field(default=1, description="Number of blocks the channels are divided into.")


class GroupedConvConvFwdRequest(Request):
    """Two convolutions in one: output = act1(conv1(act0(conv0(input)))).

    The intermediate is rounded once to the input's dtype, after activation0, and is not stored.

    Shapes: input [N, C, *in], weight0 [M, C/groups0, *kernel0], weight1 [K, M/groups1,
    *kernel1], bias0 [M], bias1 [K] -> output [N, K, *out].
    Dtypes: float16, bfloat16, float32, float64, one for all; sums in float32 or wider.
    Layout: channels first unless `layout` names another.
    Source: composable_kernel's grouped_conv_conv_fwd.
    """

    operation: ClassVar[str] = "grouped_conv_conv_fwd"

    input: Tensor = Field(description="Input of the first convolution, [N, C, *in].")
    weight0: Tensor = Field(description="Filters of the first, [M, C/groups0, *kernel0].")
    weight1: Tensor = Field(description="Filters of the second, [K, M/groups1, *kernel1].")
    bias0: Tensor | None = Field(default=None, description="Bias of the first, [M].")
    bias1: Tensor | None = Field(default=None, description="Bias of the second, [K].")
    conv0: ConvParameters = Field(
        default_factory=ConvParameters, description="Geometry of the first convolution."
    )
    conv1: ConvParameters = Field(
        default_factory=ConvParameters, description="Geometry of the second convolution."
    )
    activation0: Activation = Field(default="none", description="Applied to the intermediate.")
    activation1: Activation = Field(default="none", description="Applied to the output.")
    layout: LayoutName | None = Field(
        default=None,
        description="Order of the dimensions of all tensors: channels first (the default), NHWC, "
        "or grouped ones such as NHWGC, and their 1D and 3D counterparts.",
    )
    precision: Literal["highest", "high"] = Field(
        default="highest",
        description="highest computes float32 in true float32; high lets it use TF32.",
    )
