"""Requests of max unpooling and its gradient, in one to three dimensions."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from convgrad.contract.base import Request
from convgrad.contract.fields import IndexTensor, IntOrInts, Ints, LayoutName, Tensor

__all__ = ["MaxUnpoolBwdRequest", "MaxUnpoolFwdRequest"]


_INDICES = Field(
    description="Where each element of the input goes, flat in its (n, c) plane of the output, "
    "[N, C, *in], as returned by max pooling."
)


class _MaxUnpoolRequest(Request):
    layout: LayoutName | None = Field(
        default=None,
        description="Order of the dimensions of all tensors: channels first (the default) or last.",
    )


class MaxUnpoolFwdRequest(_MaxUnpoolRequest):
    """Max unpooling: every element goes where its index says, zeros are elsewhere.

    output[n, c, indices[n, c, p]] = input[n, c, p]. Of several elements with one index the last
    wins, in the order D, H, W.

    Shapes: input and indices [N, C, *in] -> output [N, C, *out], of one to three dimensions; where
    no ``output_size`` is given, out = (in - 1)*stride - 2*padding + kernel_size.
    Dtypes: float16, bfloat16, float32, float64; indices int64 or int32.
    Layout: channels first unless `layout` names another.
    Source: PyTorch's max_unpool1d, max_unpool2d and max_unpool3d.
    """

    operation: ClassVar[str] = "max_unpool_fwd"

    input: Tensor = Field(description="The layer's input, [N, C, *in].")
    indices: IndexTensor = _INDICES
    kernel_size: IntOrInts = Field(
        description="Size of the max pooling's window: one int or one per dimension."
    )
    stride: IntOrInts | None = Field(
        default=None, description="Its step between windows; kernel_size if omitted."
    )
    padding: IntOrInts = Field(
        default=0, description="Its padding on both sides: one int or one per dimension."
    )
    output_size: Ints | None = Field(
        default=None,
        description="Size of the output, spatial alone or the full shape; it may differ from the "
        "default by less than a stride.",
    )


class MaxUnpoolBwdRequest(_MaxUnpoolRequest):
    """Gradient of max unpooling with respect to its input.

    grad_input[n, c, p] = grad_output[n, c, indices[n, c, p]].

    Shapes: grad_output [N, C, *out], indices [N, C, *in] -> grad_input [N, C, *in], of one to three
    dimensions.
    Dtypes: float16, bfloat16, float32, float64; indices int64 or int32.
    Layout: channels first unless `layout` names another.
    Source: PyTorch's max_unpool2d and max_unpool3d.
    """

    operation: ClassVar[str] = "max_unpool_bwd"

    grad_output: Tensor = Field(
        description="Gradient with respect to the layer's output, [N, C, *out]."
    )
    indices: IndexTensor = _INDICES
