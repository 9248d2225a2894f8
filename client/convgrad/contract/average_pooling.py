"""Requests of average pooling and its gradient, in one to three dimensions."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from convgrad.contract.base import Request
from convgrad.contract.fields import Flag, Int, IntOrInts, Ints, LayoutName, Padding, Tensor

__all__ = ["AvgPoolBwdRequest", "AvgPoolFwdRequest", "AvgPoolRequest"]


class AvgPoolRequest(Request):
    """The geometry that both share; lists are in the order D, H, W, whatever the layout."""

    kernel_size: IntOrInts = Field(description="Size of the window: one int or one per dimension.")
    stride: IntOrInts | None = Field(
        default=None, description="Step between windows; kernel_size if omitted."
    )
    padding: Padding = Field(
        default=0,
        description="Zeros added around the input: one int, one per dimension, or a [before, "
        "after] pair per dimension.",
    )
    ceil_mode: Flag = Field(
        default=False, description="Round the output size up, so that a last partial window counts."
    )
    count_include_pad: Flag = Field(
        default=True, description="Count the positions of the padding in a window's divisor."
    )
    divisor_override: Int | None = Field(
        default=None, description="The divisor of every window, in place of its size; not 0."
    )
    layout: LayoutName | None = Field(
        default=None,
        description="Order of the dimensions of all tensors: channels first (the default) or last.",
    )


class AvgPoolFwdRequest(AvgPoolRequest):
    """Average pooling: the mean of each window.

    output[n, c, p] = (sum over r of input[n, c, p*stride + r - pad_before]) / divisor[p], where
    divisor[p] counts the window's positions inside the padded input, or inside the input alone
    without ``count_include_pad``, or is ``divisor_override``.

    Shapes: input [N, C, *in] -> output [N, C, *out], of one to three dimensions.
    Dtypes: float16, bfloat16, float32, float64; sums in float32 or wider.
    Layout: channels first unless `layout` names another.
    Source: PyTorch's avg_pool1d, avg_pool2d and avg_pool3d.
    """

    operation: ClassVar[str] = "avg_pool_fwd"

    input: Tensor = Field(description="The layer's input, [N, C, *in].")


class AvgPoolBwdRequest(AvgPoolRequest):
    """Gradient of average pooling with respect to its input.

    grad_input[n, c, i] = sum of grad_output[n, c, p] / divisor[p] over the windows p that hold i.

    Shapes: grad_output [N, C, *out] -> grad_input [N, C, *in], of one to three dimensions.
    Dtypes: float16, bfloat16, float32, float64; sums in float32 or wider.
    Layout: channels first unless `layout` names another.
    Source: PyTorch's avg_pool2d_backward and avg_pool3d_backward.
    """

    operation: ClassVar[str] = "avg_pool_bwd"

    grad_output: Tensor = Field(
        description="Gradient with respect to the layer's output, [N, C, *out]."
    )
    input_size: Ints = Field(description="Size of the input, spatial alone or the full shape.")
