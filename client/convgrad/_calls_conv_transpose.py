"""Transposed convolutions: see `_calls_conv` for how these functions read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

from convgrad._call import Call, TensorLike, make_call, one_output
from convgrad._calls_conv import ConvLayout, Padding, Precision, Sizes
from convgrad._calls_conv_bwd import Gradient, read_gradients
from convgrad._results import Array, ConvBackwardResult

__all__ = ["conv_transpose_backward", "conv_transpose_fwd"]


def conv_transpose_fwd(
    input: TensorLike,
    weight: TensorLike,
    bias: TensorLike | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
    *,
    layout: ConvLayout | None = None,
    precision: Precision = "highest",
    deterministic: bool = True,
) -> Call[Array]:
    """Transposed convolution in 1D, 2D or 3D.

    ``output[n, k, i] = bias[k] + sum over c, r, o of input[n, c, o] * weight[c, k, r]`` where ``i =
    o*stride + r*dilation - pad_before`` in every dimension and c, k are of one group.

    Parameters
    ----------
    input : array (N, C, *in)
        The layer's input.
    weight : array (C, K/groups, *kernel)
        The filters.
    bias : array (K,), optional
        One value for each output channel.
    stride : int or sequence of int, optional
        Step between windows: one int, or one per spatial dimension in the order D, H, W, whatever
        the layout.
    padding : int or sequence, optional
        Rows taken from each side of the output: one int, one per dimension, or a pair (before,
        after) per dimension.
    output_padding : int or sequence of int, optional
        Rows added at the end of the output, fewer than the larger of stride and dilation.
    groups : int, optional
        Number of blocks into which the channels are divided.
    dilation : int or sequence of int, optional
        Step between the taps of a window: one int, or one per dimension.
    layout : str, optional
        Order of the dimensions of all tensors: NCHW (channels first, the default in any rank),
        NHWC, a grouped one such as NHWGC, or their 1D and 3D kin. Weights are (C, K/groups,
        *kernel) for channels first, as PyTorch's, and (C, *kernel, K/groups) for channels last;
        grouped layouts have G before either.
    precision : {"highest", "high"}, optional
        ``highest`` computes float32 in true float32; ``high`` may use TF32.
    deterministic : bool, optional
        The same bits for the same request on the same device model.

    Returns
    -------
    array (N, K, *out)
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

    Source: torch.nn.functional.conv_transpose1d, conv_transpose2d and conv_transpose3d.

    Examples
    --------
    >>> output = client.conv_transpose_fwd(x, weight, stride=2, padding=1, output_padding=1)
    """
    return make_call("conv_transpose_fwd", locals(), one_output("output"))


@overload
def conv_transpose_backward(
    grad_output: TensorLike,
    input: TensorLike,
    weight: TensorLike,
    *,
    stride: Sizes = 1,
    padding: Padding = 0,
    output_padding: Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    layout: ConvLayout | None = None,
    precision: Precision = "highest",
    deterministic: bool = True,
) -> Call[ConvBackwardResult[Array, Array, Array]]: ...
@overload
def conv_transpose_backward(
    grad_output: TensorLike,
    input: TensorLike,
    weight: TensorLike,
    *,
    stride: Sizes = 1,
    padding: Padding = 0,
    output_padding: Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    outputs: Sequence[Gradient],
    layout: ConvLayout | None = None,
    precision: Precision = "highest",
    deterministic: bool = True,
) -> Call[ConvBackwardResult[Array | None, Array | None, Array | None]]: ...
def conv_transpose_backward(
    grad_output: TensorLike,
    input: TensorLike,
    weight: TensorLike,
    *,
    stride: Sizes = 1,
    padding: Padding = 0,
    output_padding: Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    outputs: Sequence[Gradient] = ("grad_input", "grad_weight", "grad_bias"),
    layout: ConvLayout | None = None,
    precision: Precision = "highest",
    deterministic: bool = True,
) -> Call[ConvBackwardResult[Any, Any, Any]]:
    """All gradients of one transposed convolution from one upload.

    With ``i = o*stride + r*dilation - pad_before``: ``grad_input[n, c, o] = sum over k, r of
    grad_output[n, k, i] * weight[c, k, r]``, ``grad_weight[c, k, r] = sum over n, o of input[n, c,
    o] * grad_output[n, k, i]`` and ``grad_bias[k] = sum over n, i of grad_output[n, k, i]``.

    Parameters
    ----------
    grad_output : array (N, K, *out)
        Gradient with respect to the layer's output.
    input : array (N, C, *in)
        The layer's input.
    weight : array (C, K/groups, *kernel)
        The filters.
    stride : int or sequence of int, optional
        Step between windows: one int, or one per spatial dimension in the order D, H, W, whatever
        the layout.
    padding : int or sequence, optional
        Rows taken from each side of the output: one int, one per dimension, or a pair (before,
        after) per dimension.
    output_padding : int or sequence of int, optional
        Rows added at the end of the output, fewer than the larger of stride and dilation.
    dilation : int or sequence of int, optional
        Step between the taps of a window: one int, or one per dimension.
    groups : int, optional
        Number of blocks into which the channels are divided.
    outputs : sequence of {"grad_input", "grad_weight", "grad_bias"}, optional
        The gradients wanted.
    layout : str, optional
        Order of the dimensions of all tensors: NCHW (channels first, the default in any rank),
        NHWC, a grouped one such as NHWGC, or their 1D and 3D kin. Weights are (C, K/groups,
        *kernel) for channels first, as PyTorch's, and (C, *kernel, K/groups) for channels last;
        grouped layouts have G before either.
    precision : {"highest", "high"}, optional
        ``highest`` computes float32 in true float32; ``high`` may use TF32.
    deterministic : bool, optional
        The same bits for the same request on the same device model.

    Returns
    -------
    ConvBackwardResult
        grad_input and grad_weight, of the shapes of input and weight, and grad_bias (K,); None for
        what ``outputs`` does not name.

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

    Source: aten::convolution_backward with transposed=True.

    Examples
    --------
    >>> grad_input, grad_weight, grad_bias = client.conv_transpose_backward(
    ...     grad_output, x, weight, stride=2, padding=1
    ... )
    """
    return make_call("conv_transpose_backward", locals(), read_gradients(outputs))
