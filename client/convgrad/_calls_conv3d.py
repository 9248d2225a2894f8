"""The 3D convolutions in Ascend C's formats and names: see `_calls_conv` for how these read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

from convgrad._call import Call, TensorLike, make_call, one_output
from convgrad._calls_conv import ConvLayout3d, Padding, Precision, Sizes
from convgrad._results import Array

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
) -> Call[Array]:
    """Gradient of a 3D convolution with respect to its input, in Ascend's formats or plain ones.

    The formula is that of `conv_bwd_data`.

    Parameters
    ----------
    grad_output : array
        (N, K, Do, Ho, Wo) in NCDHW; in NDC1HWC0 an activation is (N, D, ceil(C/C0), H, W, C0).
    weight : array
        (K, C/groups, Dk, Hk, Wk) in NCDHW; in FRACTAL_Z_3D it is (D*C1*H*W, N1, 16, C0), groups one
        after another along the first axis.
    input_size : sequence of int, optional
        [D, H, W] or [N, C, D, H, W] of the input.
    weight_size : sequence of int, optional
        [K, C/groups, D, H, W]; needed with FRACTAL_Z_3D.
    stride : int or sequence of int, optional
        Step between windows: one int, or one per spatial dimension in the order D, H, W, whatever
        the layout.
    padding : int or sequence, optional
        Zeros around the input: one int, one per dimension, or a pair (before, after) per dimension.
    dilation : int or sequence of int, optional
        Step between the taps of a window: one int, or one per dimension.
    groups : int, optional
        Number of blocks into which the channels are divided.
    output_padding : int or sequence of int, optional
        Rows that the input has beyond the smallest, at its end.
    grad_output_format, weight_format, output_format : str, optional
        Order of the dimensions, one per tensor, in the place of ``layout``.
    region : mapping, optional
        ``{"d": [start, stop], "h": [start, stop]}`` computes that part of grad_input alone; either
        may be left out.
    precision : {"highest", "high"}, optional
        ``highest`` computes float32 in true float32; ``high`` may use TF32.
    deterministic : bool, optional
        The same bits for the same request on the same device model.

    Returns
    -------
    array (N, C, D, H, W)
        grad_input, or the region of it, in ``output_format``.

    Raises
    ------
    MalformedRequest
        An argument is of the wrong kind.
    InvalidProblem
        Sizes contradict each other.
    ServiceError
        Any other error that the server answers with: ProblemTooLarge, Overloaded, …
    ConnectionFailed, GatewayError, ClientTimeout, InvalidAnswer
        The server was not reached, or did not answer.

    Notes
    -----
    One dtype for all: float16, bfloat16, float32 or float64. Sums run in float32 (float64 for
    float64).

    C0 is 16 for 16-bit types and 8 for float32; padded channels are zero.

    Source: Ascend C Conv3DBackpropInput.

    Examples
    --------
    >>> upper = client.conv3d_backprop_input(
    ...     grad_output, weight, padding=1, region={"d": [0, 4]}
    ... )
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
    layout: ConvLayout3d | None = None,
    precision: Precision = "highest",
    deterministic: bool = True,
) -> Call[Array]:
    """Transposed 3D convolution: the mathematics of `conv_bwd_data`, with a bias.

    ``output[n, k, i] = bias[k] + sum over c, r, o of input[n, c, o] * weight[c, k, r]`` where ``i =
    o*stride + r*dilation - pad_before``.

    Parameters
    ----------
    input : array (N, C, D, H, W)
        The layer's input.
    weight : array (C, K/groups, Dk, Hk, Wk)
        The filters.
    bias : array (K,), optional
        One value for each output channel.
    stride : int or sequence of int, optional
        Step between windows: one int, or one per spatial dimension in the order D, H, W, whatever
        the layout.
    padding : int or sequence, optional
        Zeros around the input: one int, one per dimension, or a pair (before, after) per dimension.
    output_padding : int or sequence of int, optional
        Rows added at the end of the output.
    groups : int, optional
        Number of blocks into which the channels are divided.
    dilation : int or sequence of int, optional
        Step between the taps of a window: one int, or one per dimension.
    layout : str, optional
        NCDHW (the default), NDHWC or a grouped one.
    precision : {"highest", "high"}, optional
        ``highest`` computes float32 in true float32; ``high`` may use TF32.
    deterministic : bool, optional
        The same bits for the same request on the same device model.

    Returns
    -------
    array (N, K, Do, Ho, Wo)
        output, with ``out = (in-1)*stride - pad_before - pad_after + dilation*(kernel-1) +
        output_padding + 1``.

    Raises
    ------
    MalformedRequest
        An argument is of the wrong kind.
    InvalidProblem
        Sizes contradict each other.
    ServiceError
        Any other error that the server answers with: ProblemTooLarge, Overloaded, …
    ConnectionFailed, GatewayError, ClientTimeout, InvalidAnswer
        The server was not reached, or did not answer.

    Notes
    -----
    One dtype for all: float16, bfloat16, float32 or float64. Sums run in float32 (float64 for
    float64).

    Source: Ascend C Conv3DTranspose; torch.nn.functional.conv_transpose3d.

    Examples
    --------
    >>> output = client.conv3d_transpose(x, weight, stride=2, padding=1, output_padding=1)
    """
    return make_call("conv3d_transpose", locals(), one_output("output"))
