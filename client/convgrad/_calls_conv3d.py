"""The 3D convolutions in Ascend C's formats and names: see `_calls_conv` for how these read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from numpy.typing import NDArray

from convgrad._call import Call, TensorLike, make_call, one_output
from convgrad._calls_conv import Padding, Precision, Sizes

__all__ = ["conv3d_backprop_input", "conv3d_transpose"]

Format: TypeAlias = Literal["NCDHW", "NDHWC", "NDC1HWC0"]
WeightFormat: TypeAlias = Literal["NCDHW", "NDHWC", "FRACTAL_Z_3D"]


def conv3d_backprop_input(
    grad_output: TensorLike,
    weight: TensorLike,
    *,
    input_size: Sequence[int] | None = None,
    weight_size: Sequence[int] | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    output_padding: Sizes = 0,
    grad_output_format: Format = "NCDHW",
    weight_format: WeightFormat = "NCDHW",
    output_format: Format = "NCDHW",
    region: Mapping[str, Sequence[int]] | None = None,
    precision: Precision = "highest",
    deterministic: bool = True,
) -> Call[NDArray[Any]]:
    """Gradient of a 3D convolution with respect to its input, in Ascend's formats or plain ones.

    The formula is that of `conv_bwd_data`. ``region={"d": [start, stop], "h": [start, stop]}``
    computes that part of grad_input alone; either may be left out.

    Shapes
        In NCDHW: grad_output (N, K, Do, Ho, Wo), weight (K, C/groups, Dk, Hk, Wk); returns
        grad_input (N, C, D, H, W), or (N, C, region D, region H, W). ``input_size`` is [D, H, W]
        or [N, C, D, H, W]. In NDC1HWC0 an activation is (N, D, ceil(C/C0), H, W, C0); in
        FRACTAL_Z_3D a weight is (D*C1*H*W, N1, 16, C0), groups one after another along the first
        axis, and ``weight_size`` [K, C/groups, D, H, W] must be given. C0 is 16 for 16-bit types
        and 8 for float32; padded channels are zero. Formats rather than ``layout`` name the order
        of dimensions here, one per tensor.
    Dtypes
        float16, bfloat16, float32 or float64, one for all; sums in float32 (float64 for float64).
    Layout
        ``grad_output_format``, ``weight_format`` and ``output_format``, one per tensor.
    Raises
        As `conv_bwd_data`.
    Source
        Ascend C Conv3DBackpropInput.
    """
    return make_call("conv3d_backprop_input", locals(), one_output("grad_input"))


def conv3d_transpose(
    input: TensorLike,
    weight: TensorLike,
    bias: TensorLike | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
    *,
    layout: str | None = None,
    precision: Precision = "highest",
    deterministic: bool = True,
) -> Call[NDArray[Any]]:
    """Transposed 3D convolution: the mathematics of `conv_bwd_data`, with a bias.

    ``output[n, k, i] = bias[k] + sum over c, r, o of input[n, c, o] * weight[c, k, r]`` where
    ``i = o*stride + r*dilation - pad_before``.

    Shapes
        input (N, C, D, H, W), weight (C, K/groups, Dk, Hk, Wk), bias (K,); returns output
        (N, K, Do, Ho, Wo), with
        ``out = (in-1)*stride - pad_before - pad_after + dilation*(kernel-1) + output_padding + 1``.
    Dtypes
        float16, bfloat16, float32 or float64, one for all; sums in float32 (float64 for float64).
    Layout
        NCDHW (the default), NDHWC or a grouped one.
    Raises
        As `conv_bwd_data`.
    Source
        Ascend C Conv3DTranspose; torch.nn.functional.conv_transpose3d.
    """
    return make_call("conv3d_transpose", locals(), one_output("output"))
