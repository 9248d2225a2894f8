"""Requests of Ascend C's two 3D operations."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from convgrad.contract.base import Parameters
from convgrad.contract.conv_transpose import ConvTransposeFwdRequest
from convgrad.contract.convolution import ConvGeometry
from convgrad.contract.fields import IntOrInts, IntPair, Ints, Tensor

__all__ = ["Conv3dBackpropInputRequest", "Conv3dTransposeRequest", "Region"]

ActivationFormat = Literal["NCDHW", "NDHWC", "NDC1HWC0"]
WeightFormat = Literal["NCDHW", "NDHWC", "FRACTAL_Z_3D"]


class Region(Parameters):
    """The part of grad_input wanted, [start, stop) in depth and in height."""

    d: IntPair | None = Field(
        default=None, description="[start, stop) in depth; all of it if omitted."
    )
    h: IntPair | None = Field(
        default=None, description="[start, stop) in height; all of it if omitted."
    )


class Conv3dBackpropInputRequest(ConvGeometry):
    """Gradient of a 3D convolution with respect to its input, in plain or Ascend's formats.

    The formula is conv_bwd_data's, whole or for one region of grad_input.

    Shapes: grad_output [N, K, D, H, W], weight [K, C/groups, D, H, W] -> grad_input
    [N, C, D, H, W], each in its format; NDC1HWC0 is [N, D, ceil(C/C0), H, W, C0], padded
    channels zero, FRACTAL_Z_3D is [groups * D*C1*H*W, N1, 16, C0].
    Dtypes: float16, bfloat16, float32, float64 (the packed formats: 16-bit types with C0 = 16,
    float32 with C0 = 8); sums in float32 or wider.
    Layout: grad_output_format, weight_format and output_format name one for each tensor.
    Source: Ascend C's Conv3DBackpropInput.
    """

    operation: ClassVar[str] = "conv3d_backprop_input"

    grad_output: Tensor = Field(
        description="Gradient with respect to the layer's output, in grad_output_format."
    )
    weight: Tensor = Field(description="The filters, in weight_format.")
    input_size: Ints | None = Field(
        default=None,
        description="Size of the input, [D, H, W] or [N, C, D, H, W]. By default, the smallest "
        "input that yields grad_output, plus output_padding.",
    )
    weight_size: Ints | None = Field(
        default=None,
        description="[K, C/groups, D, H, W]: required with FRACTAL_Z_3D, which does not carry it.",
    )
    grad_output_format: ActivationFormat = Field(
        default="NCDHW", description="Order of grad_output's dimensions."
    )
    weight_format: WeightFormat = Field(
        default="NCDHW", description="Order of weight's dimensions."
    )
    output_format: ActivationFormat = Field(
        default="NCDHW", description="Order of grad_input's dimensions."
    )
    output_padding: IntOrInts = Field(
        default=0, description="Rows that grad_input has beyond the smallest input that fits."
    )
    region: Region | None = Field(
        default=None, description="Compute only this part of grad_input; all of it if omitted."
    )


class Conv3dTransposeRequest(ConvTransposeFwdRequest):
    """Transposed 3D convolution (torch.nn.functional.conv_transpose3d).

    conv_transpose_fwd in 3D alone, under the name that it has here for Ascend C's.

    Shapes: input [N, C_in, D, H, W], weight [C_in, C_out/groups, D, H, W], bias [C_out] -> output
    [N, C_out, D, H, W].
    Dtypes: float16, bfloat16, float32, float64, one for all; sums in float32 or wider.
    Layout: channels first (NCDHW) unless `layout` names another.
    Source: Ascend C's Conv3DTranspose; PyTorch's conv_transpose3d.
    """

    operation: ClassVar[str] = "conv3d_transpose"
