"""Requests of max pooling, forward and backward, in one to three dimensions."""

from __future__ import annotations

from typing import ClassVar, Literal, Protocol, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from convgrad.contract.base import Request
from convgrad.contract.fields import (
    Flag,
    IndexTensor,
    IntOrInts,
    Ints,
    LayoutName,
    Padding,
    Tensor,
)

__all__ = [
    "MaxPool1dBwdRequest",
    "MaxPool1dFwdRequest",
    "MaxPool2dBwdRequest",
    "MaxPool2dFwdRequest",
    "MaxPool3dBwdRequest",
    "MaxPool3dFwdRequest",
    "MaxPoolBwdRequest",
    "MaxPoolFwdRequest",
    "needs_a_source",
]


class _MaxPoolRequest(Request):
    """The geometry that pooling shares; lists are in the order D, H, W, whatever the layout."""

    kernel_size: IntOrInts = Field(description="Size of the window: one int or one per dimension.")
    stride: IntOrInts | None = Field(
        default=None, description="Step between windows; kernel_size if omitted."
    )
    padding: Padding = Field(
        default=0,
        description="Positions added around the input that never win: one int, one per dimension, "
        "or a [before, after] pair per dimension.",
    )
    dilation: IntOrInts = Field(default=1, description="Step between the elements of a window.")
    ceil_mode: Flag = Field(
        default=False, description="Round the output size up, so that a last partial window counts."
    )
    layout: LayoutName | None = Field(
        default=None,
        description="Order of the dimensions of all tensors: channels first (the default) or last.",
    )


class MaxPoolFwdRequest(_MaxPoolRequest):
    """Max pooling: the largest element of each window, and its index on request.

    output[n, c, p] = max over r of input[n, c, p*stride + r*dilation - pad_before]. The first
    maximum wins a tie; a NaN wins over any number, of several NaNs the last.

    Shapes: input [N, C, *in] -> output and indices [N, C, *out].
    Dtypes: float16, bfloat16, float32, float64; indices int64 or int32, flat in each (n, c)
    plane.
    Layout: channels first unless `layout` names another.
    Source: PyTorch's max_pool1d, max_pool2d and max_pool3d.
    """

    input: Tensor = Field(description="The layer's input, [N, C, *in].")
    return_indices: Flag = Field(
        default=False, description="Also return the index of each maximum."
    )
    index_dtype: Literal["int64", "int32"] = Field(
        default="int64", description="Element type of indices."
    )


class MaxPoolBwdRequest(_MaxPoolRequest):
    """Gradient of max pooling with respect to its input, from the input or from the indices.

    grad_input[n, c, i] = sum of grad_output[n, c, p] over the windows p whose maximum is i.

    Shapes: grad_output [N, C, *out], input [N, C, *in] or indices [N, C, *out] -> grad_input
    [N, C, *in].
    Dtypes: float16, bfloat16, float32, float64, one for all; sums in float32 or wider.
    Layout: channels first unless `layout` names another.
    Source: composable_kernel's maxpool2d_bwd; PyTorch's max_pool2d_with_indices_backward.
    """

    grad_output: Tensor = Field(
        description="Gradient with respect to the layer's output, [N, C, *out]."
    )
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


class _MaxPoolGradient(Protocol):
    operation: ClassVar[str]
    input: Tensor | None
    indices: IndexTensor | None


def needs_a_source(request: _MaxPoolGradient) -> None:
    """Refuse a max pooling gradient that gives neither the input nor the indices of the maxima."""
    if request.input is None and request.indices is None:
        sentence = f'missing field "input" or "indices"; {request.operation} needs one of them'
        raise PydanticCustomError("refused", "{sentence}", {"sentence": sentence})


class MaxPool1dFwdRequest(MaxPoolFwdRequest):
    __doc__ = MaxPoolFwdRequest.__doc__
    operation: ClassVar[str] = "maxpool1d_fwd"


class MaxPool2dFwdRequest(MaxPoolFwdRequest):
    __doc__ = MaxPoolFwdRequest.__doc__
    operation: ClassVar[str] = "maxpool2d_fwd"


class MaxPool3dFwdRequest(MaxPoolFwdRequest):
    __doc__ = MaxPoolFwdRequest.__doc__
    operation: ClassVar[str] = "maxpool3d_fwd"


class MaxPool1dBwdRequest(MaxPoolBwdRequest):
    __doc__ = MaxPoolBwdRequest.__doc__
    operation: ClassVar[str] = "maxpool1d_bwd"


class MaxPool2dBwdRequest(MaxPoolBwdRequest):
    __doc__ = MaxPoolBwdRequest.__doc__
    operation: ClassVar[str] = "maxpool2d_bwd"


class MaxPool3dBwdRequest(MaxPoolBwdRequest):
    __doc__ = MaxPoolBwdRequest.__doc__
    operation: ClassVar[str] = "maxpool3d_bwd"
