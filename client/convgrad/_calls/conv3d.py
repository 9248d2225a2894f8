"""3D convolutions with Ascend C's names and formats; see `_calls.conv` for the conventions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

from convgrad._call import Call, TensorLike, make_call, one_output
from convgrad._calls.conv import ConvLayout3d, Padding, Precision, Sizes
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
    """Gradient of a 3D convolution with respect to its input, in Ascend or plain formats.

    Uses the formula of `conv_bwd_data`.

    Parameters
    ----------
    grad_output : array
        (N, K, Do, Ho, Wo) in NCDHW; in NDC1HWC0 an activation is (N, D, ceil(C/C0), H, W, C0).
    weight : array
        (K, C/groups, Dk, Hk, Wk) in NCDHW; in FRACTAL_Z_3D it is (D*C1*H*W, N1, 16, C0), with the
        groups concatenated along the first axis.
    input_size : sequence of int, optional
        Size of the input: [D, H, W] or [N, C, D, H, W].
    weight_size : sequence of int, optional
        Size of the weight: [K, C/groups, D, H, W]; required with FRACTAL_Z_3D.
    stride : int or sequence of int, optional
        Step between windows: one int, or one per spatial dimension, always in the order D, H, W.
    padding : int or sequence, optional
        Zeros around the input: one int, one per dimension, or a pair (before, after) per dimension.
    dilation : int or sequence of int, optional
        Step between the taps of the kernel: one int, or one per dimension.
    groups : int, optional
        Number of groups that the channels are split into.
    output_padding : int or sequence of int, optional
        Rows at the end of the input beyond its smallest possible size.
    grad_output_format, weight_format, output_format : str, optional
        Dimension order of each tensor; these replace ``layout``.
    region : mapping, optional
        ``{"d": [start, stop], "h": [start, stop]}`` computes only that part of grad_input; either
        key may be omitted.
    precision : {"highest", "high"}, optional
        ``highest`` computes float32 in true float32; ``high`` may use TF32.
    deterministic : bool, optional
        Return identical bits for identical requests on the same device model.

    Returns
    -------
    array (N, C, D, H, W)
        grad_input, or the requested region of it, in ``output_format``.

    Raises
    ------
    MalformedRequest
        An argument has the wrong type or cannot be read.
    InvalidProblem
        The sizes contradict each other.
    ServiceError
        The server answered with another error, such as ProblemTooLarge or Overloaded.
    ConnectionFailed, GatewayError, ClientTimeout, InvalidAnswer
        The server could not be reached, or gave no valid answer.

    Notes
    -----
    All tensors share one dtype: float16, bfloat16, float32 or float64. Accumulation is in float32
    (float64 for float64 tensors).

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
    """Transposed 3D convolution: the computation of `conv_bwd_data`, with a bias.

    ``output[n, k, i] = bias[k] + sum over c, r, o of input[n, c, o] * weight[c, k, r]`` where ``i =
    o*stride + r*dilation - pad_before``.

    Parameters
    ----------
    input : array (N, C, D, H, W)
        The layer's input.
    weight : array (C, K/groups, Dk, Hk, Wk)
        The filters.
    bias : array (K,), optional
        One value per output channel.
    stride : int or sequence of int, optional
        Step between windows: one int, or one per spatial dimension, always in the order D, H, W.
    padding : int or sequence, optional
        Zeros around the input: one int, one per dimension, or a pair (before, after) per dimension.
    output_padding : int or sequence of int, optional
        Rows added at the end of the output.
    groups : int, optional
        Number of groups that the channels are split into.
    dilation : int or sequence of int, optional
        Step between the taps of the kernel: one int, or one per dimension.
    layout : str, optional
        NCDHW (the default), NDHWC or a grouped layout.
    precision : {"highest", "high"}, optional
        ``highest`` computes float32 in true float32; ``high`` may use TF32.
    deterministic : bool, optional
        Return identical bits for identical requests on the same device model.

    Returns
    -------
    array (N, K, Do, Ho, Wo)
        output, with ``out = (in-1)*stride - pad_before - pad_after + dilation*(kernel-1) +
        output_padding + 1``.

    Raises
    ------
    MalformedRequest
        An argument has the wrong type or cannot be read.
    InvalidProblem
        The sizes contradict each other.
    ServiceError
        The server answered with another error, such as ProblemTooLarge or Overloaded.
    ConnectionFailed, GatewayError, ClientTimeout, InvalidAnswer
        The server could not be reached, or gave no valid answer.

    Notes
    -----
    All tensors share one dtype: float16, bfloat16, float32 or float64. Accumulation is in float32
    (float64 for float64 tensors).

    Source: Ascend C Conv3DTranspose; torch.nn.functional.conv_transpose3d.

    Examples
    --------
    >>> output = client.conv3d_transpose(x, weight, stride=2, padding=1, output_padding=1)
    """
    return make_call("conv3d_transpose", locals(), one_output("output"))
