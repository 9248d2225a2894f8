"""Second derivatives of convolutions; see `_calls.conv` for the conventions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, overload

from convgrad._call import Call, Outputs, TensorLike, make_call, select
from convgrad._calls.conv import ConvLayout, Padding, Precision, Sizes
from convgrad._results import Array, ConvDoubleBackwardResult

__all__ = ["conv_double_backward", "conv_transpose_double_backward"]

SecondGradient: TypeAlias = Literal["grad_grad_output", "grad_input", "grad_weight"]


@overload
def conv_double_backward(
    grad_output: TensorLike,
    input: TensorLike,
    weight: TensorLike,
    *,
    grad_grad_input: TensorLike | None = None,
    grad_grad_weight: TensorLike | None = None,
    grad_grad_bias: TensorLike | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    layout: ConvLayout | None = None,
    precision: Precision = "highest",
    deterministic: bool = True,
) -> Call[ConvDoubleBackwardResult[Array, Array, Array]]: ...
@overload
def conv_double_backward(
    grad_output: TensorLike,
    input: TensorLike,
    weight: TensorLike,
    *,
    grad_grad_input: TensorLike | None = None,
    grad_grad_weight: TensorLike | None = None,
    grad_grad_bias: TensorLike | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    outputs: Sequence[SecondGradient],
    layout: ConvLayout | None = None,
    precision: Precision = "highest",
    deterministic: bool = True,
) -> Call[ConvDoubleBackwardResult[Array | None, Array | None, Array | None]]: ...
def conv_double_backward(
    grad_output: TensorLike,
    input: TensorLike,
    weight: TensorLike,
    *,
    grad_grad_input: TensorLike | None = None,
    grad_grad_weight: TensorLike | None = None,
    grad_grad_bias: TensorLike | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    outputs: Sequence[SecondGradient] = ("grad_grad_output", "grad_input", "grad_weight"),
    layout: ConvLayout | None = None,
    precision: Precision = "highest",
    deterministic: bool = True,
) -> Call[ConvDoubleBackwardResult[Any, Any, Any]]:
    """Double backward pass of a convolution: the gradients of `conv_backward`, with one upload.

    ``grad_grad_output = conv(grad_grad_input, weight) + conv(input, grad_grad_weight) +
    grad_grad_bias``; grad_input is `conv_bwd_data` of grad_output and grad_grad_weight, and
    grad_weight is `grouped_conv_bwd_weight` of grad_grad_input and grad_output.

    Parameters
    ----------
    grad_output : array (N, K, *out)
        Gradient with respect to the layer's output that the backward pass received.
    input : array (N, C, *in)
        The layer's input.
    weight : array (K, C/groups, *kernel)
        The filters.
    grad_grad_input : array (N, C, *in), optional
        Gradient with respect to the grad_input of the backward pass; zero if omitted.
    grad_grad_weight : array (K, C/groups, *kernel), optional
        Gradient with respect to the grad_weight of the backward pass; zero if omitted.
    grad_grad_bias : array (K,), optional
        Gradient with respect to the grad_bias of the backward pass; zero if omitted.
    stride : int or sequence of int, optional
        Step between windows: one int, or one per spatial dimension, always in the order D, H, W.
    padding : int or sequence, optional
        Zeros around the input: one int, one per dimension, or a pair (before, after) per dimension.
    dilation : int or sequence of int, optional
        Step between the taps of the kernel: one int, or one per dimension.
    groups : int, optional
        Number of groups that the channels are split into.
    outputs : sequence of {"grad_grad_output", "grad_input", "grad_weight"}, optional
        The gradients to compute.
    layout : str, optional
        Dimension order of all tensors: NCHW (channels first, the default), NHWC, a grouped layout
        such as NHWGC, or the 1D or 3D equivalent. Weights are KCRS for channels first, KRSC for
        channels last, and GKCRS or GKRSC for grouped layouts.
    precision : {"highest", "high"}, optional
        ``highest`` computes float32 in true float32; ``high`` may use TF32.
    deterministic : bool, optional
        Return identical bits for identical requests on the same device model.

    Returns
    -------
    ConvDoubleBackwardResult
        grad_grad_output, grad_input and grad_weight, shaped like grad_output, input and weight;
        None for those not named in ``outputs``.

    Raises
    ------
    MalformedRequest
        An argument has the wrong type or cannot be read.
    InvalidProblem
        The sizes contradict each other, or none of the three gradients of gradients is given.
    ServiceError
        The server answered with another error, such as ProblemTooLarge or Overloaded.
    ConnectionFailed, GatewayError, ClientTimeout, InvalidAnswer
        The server could not be reached, or gave no valid answer.

    Notes
    -----
    All tensors share one dtype: float16, bfloat16, float32 or float64. Accumulation is in float32
    (float64 for float64 tensors), and each output is rounded once.

    Source: aten::_convolution_double_backward.

    Examples
    --------
    >>> second = client.conv_double_backward(
    ...     grad_output, x, weight, grad_grad_input=v, grad_grad_weight=w, padding=1
    ... )
    >>> second.grad_grad_output.shape
    """
    return make_call("conv_double_backward", locals(), _read_second_gradients(outputs))


@overload
def conv_transpose_double_backward(
    grad_output: TensorLike,
    input: TensorLike,
    weight: TensorLike,
    *,
    grad_grad_input: TensorLike | None = None,
    grad_grad_weight: TensorLike | None = None,
    grad_grad_bias: TensorLike | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    output_padding: Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    layout: ConvLayout | None = None,
    precision: Precision = "highest",
    deterministic: bool = True,
) -> Call[ConvDoubleBackwardResult[Array, Array, Array]]: ...
@overload
def conv_transpose_double_backward(
    grad_output: TensorLike,
    input: TensorLike,
    weight: TensorLike,
    *,
    grad_grad_input: TensorLike | None = None,
    grad_grad_weight: TensorLike | None = None,
    grad_grad_bias: TensorLike | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    output_padding: Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    outputs: Sequence[SecondGradient],
    layout: ConvLayout | None = None,
    precision: Precision = "highest",
    deterministic: bool = True,
) -> Call[ConvDoubleBackwardResult[Array | None, Array | None, Array | None]]: ...
def conv_transpose_double_backward(
    grad_output: TensorLike,
    input: TensorLike,
    weight: TensorLike,
    *,
    grad_grad_input: TensorLike | None = None,
    grad_grad_weight: TensorLike | None = None,
    grad_grad_bias: TensorLike | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    output_padding: Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    outputs: Sequence[SecondGradient] = ("grad_grad_output", "grad_input", "grad_weight"),
    layout: ConvLayout | None = None,
    precision: Precision = "highest",
    deterministic: bool = True,
) -> Call[ConvDoubleBackwardResult[Any, Any, Any]]:
    """Double backward pass of a transposed convolution, with one upload.

    Like `conv_double_backward`, with `conv_transpose_fwd` as the convolution: ``grad_grad_output =
    conv_transpose(grad_grad_input, weight) + conv_transpose(input, grad_grad_weight) +
    grad_grad_bias``.

    Parameters
    ----------
    grad_output : array (N, K, *out)
        Gradient with respect to the layer's output that the backward pass received.
    input : array (N, C, *in)
        The layer's input.
    weight : array (C, K/groups, *kernel)
        The filters.
    grad_grad_input : array (N, C, *in), optional
        Gradient with respect to the grad_input of the backward pass; zero if omitted.
    grad_grad_weight : array (C, K/groups, *kernel), optional
        Gradient with respect to the grad_weight of the backward pass; zero if omitted.
    grad_grad_bias : array (K,), optional
        Gradient with respect to the grad_bias of the backward pass; zero if omitted.
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
    outputs : sequence of {"grad_grad_output", "grad_input", "grad_weight"}, optional
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
    ConvDoubleBackwardResult
        grad_grad_output, grad_input and grad_weight, shaped like grad_output, input and weight;
        None for those not named in ``outputs``.

    Raises
    ------
    MalformedRequest
        An argument has the wrong type or cannot be read.
    InvalidProblem
        The sizes contradict each other, or none of the three gradients of gradients is given.
    ServiceError
        The server answered with another error, such as ProblemTooLarge or Overloaded.
    ConnectionFailed, GatewayError, ClientTimeout, InvalidAnswer
        The server could not be reached, or gave no valid answer.

    Notes
    -----
    All tensors share one dtype: float16, bfloat16, float32 or float64. Accumulation is in float32
    (float64 for float64 tensors), and each output is rounded once.

    Source: aten::_convolution_double_backward with transposed=True.

    Examples
    --------
    >>> second = client.conv_transpose_double_backward(
    ...     grad_output, x, weight, grad_grad_input=v, stride=2, outputs=["grad_grad_output"]
    ... )
    """
    return make_call("conv_transpose_double_backward", locals(), _read_second_gradients(outputs))


def _read_second_gradients(
    asked: Sequence[str],
) -> Callable[[Outputs], ConvDoubleBackwardResult[Any, Any, Any]]:
    def read(outputs: Outputs) -> ConvDoubleBackwardResult[Any, Any, Any]:
        return ConvDoubleBackwardResult(*select(outputs, ConvDoubleBackwardResult._fields, asked))

    return read
