"""Requests of adaptive average and max pooling and their gradients."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from convgrad.contract.base import Request
from convgrad.contract.fields import Flag, IndexTensor, Ints, LayoutName, OutputSize, Tensor
from convgrad.contract.pooling import needs_a_source

__all__ = [
    "AdaptiveAvgPoolBwdRequest",
    "AdaptiveAvgPoolFwdRequest",
    "AdaptiveMaxPoolBwdRequest",
    "AdaptiveMaxPoolFwdRequest",
]


class _AdaptivePoolRequest(Request):
    """What all four share. Windows: p reads input positions floor(p*in/out) up to, and without,
    ceil((p + 1)*in/out), along each dimension."""

    layout: LayoutName | None = Field(
        default=None,
        description="Order of the dimensions of all tensors: channels first (the default) or last.",
    )


class _AdaptivePoolFwdRequest(_AdaptivePoolRequest):
    input: Tensor = Field(description="The layer's input, [N, C, *in].")
    output_size: OutputSize = Field(
        description="Size of the output: one int, or one per dimension (D, H, W), of which null "
        "means the input's own."
    )


class _AdaptivePoolBwdRequest(_AdaptivePoolRequest):
    grad_output: Tensor = Field(
        description="Gradient with respect to the layer's output, [N, C, *out]."
    )


class AdaptiveAvgPoolFwdRequest(_AdaptivePoolFwdRequest):
    """Adaptive average pooling: means of windows that divide the input into ``output_size``.

    output[n, c, p] = the mean of input[n, c, i] over floor(p*in/out) <= i < ceil((p + 1)*in/out).

    Shapes: input [N, C, *in] -> output [N, C, *out], of one to three dimensions.
    Dtypes: float16, bfloat16, float32, float64; sums in float32 or wider.
    Layout: channels first unless `layout` names another.
    Source: PyTorch's adaptive_avg_pool1d, adaptive_avg_pool2d and adaptive_avg_pool3d.
    """

    operation: ClassVar[str] = "adaptive_avg_pool_fwd"


class AdaptiveAvgPoolBwdRequest(_AdaptivePoolBwdRequest):
    """Gradient of adaptive average pooling with respect to its input.

    grad_input[n, c, i] = sum of grad_output[n, c, p] / size[p] over the windows p that hold i.

    Shapes: grad_output [N, C, *out] -> grad_input [N, C, *in], of one to three dimensions.
    Dtypes: float16, bfloat16, float32, float64; sums in float32 or wider.
    Layout: channels first unless `layout` names another.
    Source: PyTorch's _adaptive_avg_pool2d_backward and _adaptive_avg_pool3d_backward.
    """

    operation: ClassVar[str] = "adaptive_avg_pool_bwd"

    input_size: Ints = Field(description="Size of the input, spatial alone or the full shape.")


class AdaptiveMaxPoolFwdRequest(_AdaptivePoolFwdRequest):
    """Adaptive max pooling: maxima of windows that divide the input into ``output_size``.

    output[n, c, p] = the maximum of input[n, c, i] over floor(p*in/out) <= i <
    ceil((p + 1)*in/out). The first maximum wins a tie; a NaN wins over any number, of several NaNs
    the last.

    Shapes: input [N, C, *in] -> output and indices [N, C, *out], of one to three dimensions.
    Dtypes: float16, bfloat16, float32, float64; indices int64 or int32, flat in each (n, c)
    plane.
    Layout: channels first unless `layout` names another.
    Source: PyTorch's adaptive_max_pool1d, adaptive_max_pool2d and adaptive_max_pool3d.
    """

    operation: ClassVar[str] = "adaptive_max_pool_fwd"

    return_indices: Flag = Field(
        default=False, description="Also return the index of each maximum."
    )
    index_dtype: Literal["int64", "int32"] = Field(
        default="int64", description="Element type of indices."
    )


class AdaptiveMaxPoolBwdRequest(_AdaptivePoolBwdRequest):
    """Gradient of adaptive max pooling, from its input or from the indices of the maxima.

    grad_input[n, c, i] = sum of grad_output[n, c, p] over the windows p whose maximum is at i.

    Shapes: grad_output [N, C, *out], input [N, C, *in] or indices [N, C, *out] -> grad_input
    [N, C, *in], of one to three dimensions.
    Dtypes: float16, bfloat16, float32, float64, one for all; sums in float32 or wider.
    Layout: channels first unless `layout` names another.
    Source: PyTorch's adaptive_max_pool2d_backward and adaptive_max_pool3d_backward.
    """

    operation: ClassVar[str] = "adaptive_max_pool_bwd"

    input: Tensor | None = Field(
        default=None, description="The layer's input, [N, C, *in]; either this or indices."
    )
    indices: IndexTensor | None = Field(
        default=None,
        description="Index of each window's maximum, flat in its (n, c) plane, [N, C, *out], as "
        "returned by the forward pass.",
    )
    input_size: Ints | None = Field(
        default=None,
        description="Size of the input, spatial alone or the full shape. Needed with indices, "
        "which count positions in planes of that size.",
    )

    @model_validator(mode="after")
    def _needs_a_source(self) -> Self:
        needs_a_source(self)
        return self
