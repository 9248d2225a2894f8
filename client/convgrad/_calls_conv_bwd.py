"""The gradients of convolutions: see `_calls_conv` for how these functions read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, overload

from convgrad._call import Call, Outputs, TensorLike, make_call, one_output, select
from convgrad._calls_conv import ConvLayout, Padding, Precision, Sizes
from convgrad._methods import by_name
from convgrad._results import Array, ConvBackwardResult, ConvWeightResult

__all__ = [
    "Gradient",
    "conv_backward",
    "conv_bwd_data",
    "grouped_conv_bwd_weight",
    "read_gradients",
]

FloatName: TypeAlias = Literal["float16", "bfloat16", "float32", "float64"]
WeightGradient: TypeAlias = Literal["grad_weight", "grad_bias"]
Gradient: TypeAlias = Literal["grad_input", "grad_weight", "grad_bias"]


def conv_bwd_data(
    grad_output: TensorLike,
    weight: TensorLike,
    *,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    input_size: Sequence[int] | None = None,
    layout: ConvLayout | None = None,
    precision: Precision = "highest",
    deterministic: bool = True,
    alpha: float = 1.0,
    beta: float | None = None,
    accumulate: TensorLike | None = None,
) -> Call[Array]:
    """Gradient of a convolution (cross-correlation) with respect to its input, in 1D, 2D or 3D.

    ``grad_input[n, c, i] = sum over k, r, o of grad_output[n, k, o] * weight[k, c, r]`` where ``i =
    o*stride + r*dilation - pad_before`` in every dimension and c, k are of one group; then
    ``alpha*grad_input + beta*accumulate`` where ``accumulate`` is given.

    Parameters
    ----------
    grad_output : array (N, K, *out)
        Gradient with respect to the layer's output.
    weight : array (K, C/groups, *kernel)
        The filters.
    stride : int or sequence of int, optional
        Step between windows: one int, or one per spatial dimension in the order D, H, W, whatever
        the layout.
    padding : int or sequence, optional
        Zeros around the input: one int, one per dimension, or a pair (before, after) per dimension.
    dilation : int or sequence of int, optional
        Step between the taps of a window: one int, or one per dimension.
    groups : int, optional
        Number of blocks into which the channels are divided.
    input_size : sequence of int, optional
        Size of the input, spatial or the full shape. By default the smallest that yields
        grad_output.
    layout : str, optional
        Order of the dimensions of all tensors: NCHW (channels first, the default in any rank),
        NHWC, a grouped one such as NHWGC, or their 1D and 3D kin. Weights are KCRS for channels
        first, KRSC for channels last, GKCRS and GKRSC for grouped layouts.
    precision : {"highest", "high"}, optional
        ``highest`` computes float32 in true float32; ``high`` may use TF32.
    deterministic : bool, optional
        The same bits for the same request on the same device model.
    alpha : float, optional
        Factor of the gradient.
    beta : float, optional
        Factor of ``accumulate``: 1 where that is given.
    accumulate : array, optional
        Added to the gradient, times ``beta``; of grad_input's shape.

    Returns
    -------
    array (N, C, *in)
        grad_input, with ``out = (in + pad_before + pad_after - dilation*(kernel-1) - 1)//stride +
        1``.

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
    float64), epilogue included, and are rounded once.

    Source: composable_kernel, 17_convnd_bwd_data; torch.nn.grad.conv2d_input.

    Examples
    --------
    >>> grad_input = client.conv_bwd_data(grad_output, weight, stride=2, padding=1)
    """
    return make_call("conv_bwd_data", locals(), one_output("grad_input"))


@overload
def grouped_conv_bwd_weight(
    *,
    input: TensorLike,
    grad_output: TensorLike,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    weight_size: Sequence[int] | None = None,
    layout: ConvLayout | None = None,
    weight_dtype: FloatName | None = None,
    split_k: Literal["auto"] | int = "auto",
    precision: Precision = "highest",
    deterministic: bool = True,
    alpha: float = 1.0,
    beta: float | None = None,
    accumulate: TensorLike | None = None,
) -> Call[ConvWeightResult[Array, None]]: ...
@overload
def grouped_conv_bwd_weight(
    *,
    input: TensorLike,
    grad_output: TensorLike,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    weight_size: Sequence[int] | None = None,
    layout: ConvLayout | None = None,
    weight_dtype: FloatName | None = None,
    outputs: tuple[Literal["grad_weight"], Literal["grad_bias"]],
    split_k: Literal["auto"] | int = "auto",
    precision: Precision = "highest",
    deterministic: bool = True,
    alpha: float = 1.0,
    beta: float | None = None,
    accumulate: TensorLike | None = None,
) -> Call[ConvWeightResult[Array, Array]]: ...
@overload
def grouped_conv_bwd_weight(
    *,
    input: TensorLike,
    grad_output: TensorLike,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    weight_size: Sequence[int] | None = None,
    layout: ConvLayout | None = None,
    weight_dtype: FloatName | None = None,
    outputs: Sequence[WeightGradient],
    split_k: Literal["auto"] | int = "auto",
    precision: Precision = "highest",
    deterministic: bool = True,
    alpha: float = 1.0,
    beta: float | None = None,
    accumulate: TensorLike | None = None,
) -> Call[ConvWeightResult[Array | None, Array | None]]: ...
@by_name
def grouped_conv_bwd_weight(
    *,
    input: TensorLike,
    grad_output: TensorLike,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    weight_size: Sequence[int] | None = None,
    layout: ConvLayout | None = None,
    weight_dtype: FloatName | None = None,
    outputs: Sequence[WeightGradient] = ("grad_weight",),
    split_k: Literal["auto"] | int = "auto",
    precision: Precision = "highest",
    deterministic: bool = True,
    alpha: float = 1.0,
    beta: float | None = None,
    accumulate: TensorLike | None = None,
) -> Call[ConvWeightResult[Any, Any]]:
    """Gradient of a convolution with respect to its weight, and its bias on request.

    ``grad_weight[k, c, r] = sum over n, o of grad_output[n, k, o] * input[n, c, i]`` where ``i =
    o*stride + r*dilation - pad_before``; ``grad_bias[k] = sum over n, o of grad_output[n, k, o]``;
    then ``alpha*grad_weight + beta*accumulate`` where ``accumulate`` is given.

    Parameters
    ----------
    input : array (N, C, *in)
        The layer's input.
    grad_output : array (N, K, *out)
        Gradient with respect to the layer's output.
    stride : int or sequence of int, optional
        Step between windows: one int, or one per spatial dimension in the order D, H, W, whatever
        the layout.
    padding : int or sequence, optional
        Zeros around the input: one int, one per dimension, or a pair (before, after) per dimension.
    dilation : int or sequence of int, optional
        Step between the taps of a window: one int, or one per dimension.
    groups : int, optional
        Number of blocks into which the channels are divided.
    weight_size : sequence of int, optional
        Size of the kernel, spatial or the weight's full shape. Needed where input, grad_output and
        geometry leave it open, as some strides above 1 do.
    layout : str, optional
        Order of the dimensions of all tensors: NCHW (channels first, the default in any rank),
        NHWC, a grouped one such as NHWGC, or their 1D and 3D kin. Weights are KCRS for channels
        first, KRSC for channels last, GKCRS and GKRSC for grouped layouts.
    weight_dtype : str, optional
        ``float32`` asks for gradients in float32 from 16-bit tensors; by default that of the
        tensors.
    outputs : sequence of {"grad_weight", "grad_bias"}, optional
        The gradients wanted.
    split_k : "auto" or int, optional
        Number of parts into which the sum over N and space is divided.
    precision : {"highest", "high"}, optional
        ``highest`` computes float32 in true float32; ``high`` may use TF32.
    deterministic : bool, optional
        The same bits for the same request on the same device model.
    alpha : float, optional
        Factor of the gradient.
    beta : float, optional
        Factor of ``accumulate``: 1 where that is given.
    accumulate : array, optional
        Added to the gradient, times ``beta``; of grad_weight's shape.

    Returns
    -------
    ConvWeightResult
        grad_weight (K, C/groups, *kernel) and grad_bias (K,), None for what ``outputs`` does not
        name.

    Raises
    ------
    TypeError
        A tensor is given by position.
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

    Tensors are taken by name alone: the order in composable_kernel is not that of `conv_bwd_data`
    and `conv_backward`, and tensors of one shape could be swapped unnoticed.

    Source: composable_kernel, 20_grouped_conv_bwd_weight; torch.nn.grad.conv2d_weight.

    Examples
    --------
    >>> result = client.grouped_conv_bwd_weight(input=x, grad_output=grad_output, padding=1)
    >>> result.grad_weight.shape
    """
    return make_call("grouped_conv_bwd_weight", locals(), _read_weight_gradients(outputs))


@overload
def conv_backward(
    grad_output: TensorLike,
    input: TensorLike,
    weight: TensorLike,
    *,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    layout: ConvLayout | None = None,
    precision: Precision = "highest",
    deterministic: bool = True,
) -> Call[ConvBackwardResult[Array, Array, Array]]: ...
@overload
def conv_backward(
    grad_output: TensorLike,
    input: TensorLike,
    weight: TensorLike,
    *,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    outputs: Sequence[Gradient],
    layout: ConvLayout | None = None,
    precision: Precision = "highest",
    deterministic: bool = True,
) -> Call[ConvBackwardResult[Array | None, Array | None, Array | None]]: ...
def conv_backward(
    grad_output: TensorLike,
    input: TensorLike,
    weight: TensorLike,
    *,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    outputs: Sequence[Gradient] = ("grad_input", "grad_weight", "grad_bias"),
    layout: ConvLayout | None = None,
    precision: Precision = "highest",
    deterministic: bool = True,
) -> Call[ConvBackwardResult[Any, Any, Any]]:
    """All gradients of one convolution from one upload.

    The formulas are those of `conv_bwd_data` (grad_input) and `grouped_conv_bwd_weight`
    (grad_weight, grad_bias).

    Parameters
    ----------
    grad_output : array (N, K, *out)
        Gradient with respect to the layer's output.
    input : array (N, C, *in)
        The layer's input.
    weight : array (K, C/groups, *kernel)
        The filters.
    stride : int or sequence of int, optional
        Step between windows: one int, or one per spatial dimension in the order D, H, W, whatever
        the layout.
    padding : int or sequence, optional
        Zeros around the input: one int, one per dimension, or a pair (before, after) per dimension.
    dilation : int or sequence of int, optional
        Step between the taps of a window: one int, or one per dimension.
    groups : int, optional
        Number of blocks into which the channels are divided.
    outputs : sequence of {"grad_input", "grad_weight", "grad_bias"}, optional
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

    Source: aten::convolution_backward; aclnnConvolutionBackward.

    Examples
    --------
    >>> grad_input, grad_weight, grad_bias = client.conv_backward(
    ...     grad_output, x, weight, padding=1
    ... )
    """
    return make_call("conv_backward", locals(), read_gradients(outputs))


def _read_weight_gradients(asked: Sequence[str]) -> Callable[[Outputs], ConvWeightResult[Any, Any]]:
    def read(outputs: Outputs) -> ConvWeightResult[Any, Any]:
        return ConvWeightResult(*select(outputs, ConvWeightResult._fields, asked))

    return read


def read_gradients(asked: Sequence[str]) -> Callable[[Outputs], ConvBackwardResult[Any, Any, Any]]:
    """A reader for the gradients of a convolution's backward pass."""

    def read(outputs: Outputs) -> ConvBackwardResult[Any, Any, Any]:
        return ConvBackwardResult(*select(outputs, ConvBackwardResult._fields, asked))

    return read
