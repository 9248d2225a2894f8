"""Transposed convolutions; see `_calls.conv` for the conventions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

from convgrad._call import Call, TensorLike, make_call, one_output
from convgrad._calls.conv import ConvLayout, Padding, Precision, Sizes
from convgrad._calls.conv_bwd import Gradient, read_gradients
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
    o*stride + r*dilation - pad_before`` in every dimension and c, k are in the same group.

    Parameters
    ----------
    input : array (N, C, *in)
        The layer's input.
    weight : array (C, K/groups, *kernel)
        The filters.
    bias : array (K,), optional
        One value per output channel.
    stride : int or sequence of int, optional
        Step between windows: one int, or one per spatial dimension, always in the order D, H, W.
    padding : int or sequence, optional
        Rows removed from each side of the output: one int, one per dimension, or a pair (before,
        after) per dimension.
    output_padding : int or sequence of int, optional
        Rows added at the end of the output; fewer than the larger of stride and dilation.
    groups : int, optional
        Number of groups that the channels are split into.
    dilation : int or sequence of int, optional
        Step between the taps of the kernel: one int, or one per dimension.
    layout : str, optional
        Dimension order of all tensors: NCHW (channels first, the default), NHWC, a grouped layout
        such as NHWGC, or the 1D or 3D equivalent. Weights are (C, K/groups, *kernel) for channels
        first, as in PyTorch, and (C, *kernel, K/groups) for channels last; grouped layouts put G
        first.
    precision : {"highest", "high"}, optional
        ``highest`` computes float32 in true float32; ``high`` may use TF32.
    deterministic : bool, optional
        Return identical bits for identical requests on the same device model.

    Returns
    -------
    array (N, K, *out)
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
    """Compute all gradients of a transposed convolution with one upload.

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
        Step between windows: one int, or one per spatial dimension, always in the order D, H, W.
    padding : int or sequence, optional
        Rows removed from each side of the output: one int, one per dimension, or a pair (before,
        after) per dimension.
    output_padding : int or sequence of int, optional
        Rows added at the end of the output; fewer than the larger of stride and dilation.
    dilation : int or sequence of int, optional
        Step between the taps of the kernel: one int, or one per dimension.
    groups : int, optional
        Number of groups that the channels are split into.
    outputs : sequence of {"grad_input", "grad_weight", "grad_bias"}, optional
        The gradients to compute.
    layout : str, optional
        Dimension order of all tensors: NCHW (channels first, the default), NHWC, a grouped layout
        such as NHWGC, or the 1D or 3D equivalent. Weights are (C, K/groups, *kernel) for channels
        first, as in PyTorch, and (C, *kernel, K/groups) for channels last; grouped layouts put G
        first.
    precision : {"highest", "high"}, optional
        ``highest`` computes float32 in true float32; ``high`` may use TF32.
    deterministic : bool, optional
        Return identical bits for identical requests on the same device model.

    Returns
    -------
    ConvBackwardResult
        grad_input and grad_weight, shaped like input and weight, and grad_bias (K,); None for
        those not named in ``outputs``.

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

    Source: aten::convolution_backward with transposed=True.

    Examples
    --------
    >>> grad_input, grad_weight, grad_bias = client.conv_transpose_backward(
    ...     grad_output, x, weight, stride=2, padding=1
    ... )
    """
    return make_call("conv_transpose_backward", locals(), read_gradients(outputs))
