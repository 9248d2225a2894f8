"""Second derivatives of convolutions: see `_calls_conv` for how these functions read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, overload

from convgrad._call import Call, Outputs, TensorLike, make_call, select
from convgrad._calls_conv import ConvLayout, Padding, Precision, Sizes
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
    """Double backward pass of a convolution: the gradients of `conv_backward`, from one upload.

    ``grad_grad_output = conv(grad_grad_input, weight) + conv(input, grad_grad_weight) +
    grad_grad_bias``; grad_input is what `conv_bwd_data` makes of grad_output and grad_grad_weight,
    grad_weight what `grouped_conv_bwd_weight` makes of grad_grad_input and grad_output.

    Parameters
    ----------
    grad_output : array (N, K, *out)
        Gradient with respect to the layer's output, as the backward pass had it.
    input : array (N, C, *in)
        The layer's input.
    weight : array (K, C/groups, *kernel)
        The filters.
    grad_grad_input : array (N, C, *in), optional
        Gradient with respect to the backward pass's grad_input; not given, it counts as zero.
    grad_grad_weight : array (K, C/groups, *kernel), optional
        Likewise with respect to its grad_weight.
    grad_grad_bias : array (K,), optional
        Likewise with respect to its grad_bias.
    stride : int or sequence of int, optional
        Step between windows: one int, or one per spatial dimension in the order D, H, W, whatever
        the layout.
    padding : int or sequence, optional
        Zeros around the input: one int, one per dimension, or a pair (before, after) per dimension.
    dilation : int or sequence of int, optional
        Step between the taps of a window: one int, or one per dimension.
    groups : int, optional
        Number of blocks into which the channels are divided.
    outputs : sequence of {"grad_grad_output", "grad_input", "grad_weight"}, optional
        The gradients wanted.
    layout : str, optional
        Order of the dimensions of all tensors: NCHW (channels first, the default in any rank),
        NHWC, a grouped one such as NHWGC, or their 1D and 3D kin. Weights are KCRS for channels
        first, KRSC for channels last, GKCRS and GKRSC for grouped layouts.
    precision : {"highest", "high"}, optional
        ``highest`` computes float32 in true float32; ``high`` may use TF32.
    deterministic : bool, optional
        The same bits for the same request on the same device model.

    Returns
    -------
    ConvDoubleBackwardResult
        grad_grad_output, grad_input and grad_weight, of the shapes of grad_output, input and
        weight; None for what ``outputs`` does not name.

    Raises
    ------
    MalformedRequest
        An argument is of the wrong kind.
    InvalidProblem
        Sizes contradict each other, or none of the three gradients of gradients is given.
    ServiceError
        Any other error that the server answers with: ProblemTooLarge, Overloaded, …
    ConnectionFailed, GatewayError, ClientTimeout, InvalidAnswer
        The server was not reached, or did not answer.

    Notes
    -----
    One dtype for all: float16, bfloat16, float32 or float64. Sums run in float32 (float64 for
    float64),
    and each output is rounded once.

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
    """Double backward pass of a transposed convolution, from one upload.

    As `conv_double_backward`, with `conv_transpose_fwd` for the convolution: ``grad_grad_output =
    conv_transpose(grad_grad_input, weight) + conv_transpose(input, grad_grad_weight) +
    grad_grad_bias``.

    Parameters
    ----------
    grad_output : array (N, K, *out)
        Gradient with respect to the layer's output, as the backward pass had it.
    input : array (N, C, *in)
        The layer's input.
    weight : array (C, K/groups, *kernel)
        The filters.
    grad_grad_input : array (N, C, *in), optional
        Gradient with respect to the backward pass's grad_input; not given, it counts as zero.
    grad_grad_weight : array (C, K/groups, *kernel), optional
        Likewise with respect to its grad_weight.
    grad_grad_bias : array (K,), optional
        Likewise with respect to its grad_bias.
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
    outputs : sequence of {"grad_grad_output", "grad_input", "grad_weight"}, optional
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
    ConvDoubleBackwardResult
        grad_grad_output, grad_input and grad_weight, of the shapes of grad_output, input and
        weight; None for what ``outputs`` does not name.

    Raises
    ------
    MalformedRequest
        An argument is of the wrong kind.
    InvalidProblem
        Sizes contradict each other, or none of the three gradients of gradients is given.
    ServiceError
        Any other error that the server answers with: ProblemTooLarge, Overloaded, …
    ConnectionFailed, GatewayError, ClientTimeout, InvalidAnswer
        The server was not reached, or did not answer.

    Notes
    -----
    One dtype for all: float16, bfloat16, float32 or float64. Sums run in float32 (float64 for
    float64),
    and each output is rounded once.

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
