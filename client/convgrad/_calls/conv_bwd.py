"""The gradients of convolutions; see `_calls.conv` for the conventions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, overload

from convgrad._call import Call, Outputs, TensorLike, make_call, one_output, select
from convgrad._calls.conv import ConvLayout, Padding, Precision, Sizes
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
    o*stride + r*dilation - pad_before`` in every dimension and c, k are in the same group. If
    ``accumulate`` is given, the result is ``alpha*grad_input + beta*accumulate``.

    Parameters
    ----------
    grad_output : array (N, K, *out)
        Gradient with respect to the layer's output.
    weight : array (K, C/groups, *kernel)
        The filters.
    stride : int or sequence of int, optional
        Step between windows: one int, or one per spatial dimension, always in the order D, H, W.
    padding : int or sequence, optional
        Zeros around the input: one int, one per dimension, or a pair (before, after) per dimension.
    dilation : int or sequence of int, optional
        Step between the taps of the kernel: one int, or one per dimension.
    groups : int, optional
        Number of groups that the channels are split into.
    input_size : sequence of int, optional
        Spatial size or full shape of the input. By default the smallest size that yields
        grad_output.
    layout : str, optional
        Dimension order of all tensors: NCHW (channels first, the default), NHWC, a grouped layout
        such as NHWGC, or the 1D or 3D equivalent. Weights are KCRS for channels first, KRSC for
        channels last, and GKCRS or GKRSC for grouped layouts.
    precision : {"highest", "high"}, optional
        ``highest`` computes float32 in true float32; ``high`` may use TF32.
    deterministic : bool, optional
        Return identical bits for identical requests on the same device model.
    alpha : float, optional
        Multiplies the gradient.
    beta : float, optional
        Multiplies ``accumulate``; 1 by default.
    accumulate : array, optional
        Added to the gradient after multiplication by ``beta``; has the shape of grad_input.

    Returns
    -------
    array (N, C, *in)
        grad_input, with ``out = (in + pad_before + pad_after - dilation*(kernel-1) - 1)//stride +
        1``.

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
    All tensors share one dtype: float16, bfloat16, float32 or float64. Accumulation, including the
    epilogue, is in float32 (float64 for float64 tensors), with one rounding at the end.

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
    """Gradient of a convolution with respect to its weight and, on request, its bias.

    ``grad_weight[k, c, r] = sum over n, o of grad_output[n, k, o] * input[n, c, i]`` where ``i =
    o*stride + r*dilation - pad_before``; ``grad_bias[k] = sum over n, o of grad_output[n, k, o]``.
    If ``accumulate`` is given, the result is ``alpha*grad_weight + beta*accumulate``.

    Parameters
    ----------
    input : array (N, C, *in)
        The layer's input.
    grad_output : array (N, K, *out)
        Gradient with respect to the layer's output.
    stride : int or sequence of int, optional
        Step between windows: one int, or one per spatial dimension, always in the order D, H, W.
    padding : int or sequence, optional
        Zeros around the input: one int, one per dimension, or a pair (before, after) per dimension.
    dilation : int or sequence of int, optional
        Step between the taps of the kernel: one int, or one per dimension.
    groups : int, optional
        Number of groups that the channels are split into.
    weight_size : sequence of int, optional
        Spatial size of the kernel, or the full shape of the weight. Required where input,
        grad_output and the geometry do not determine it, which can happen with a stride above 1.
    layout : str, optional
        Dimension order of all tensors: NCHW (channels first, the default), NHWC, a grouped layout
        such as NHWGC, or the 1D or 3D equivalent. Weights are KCRS for channels first, KRSC for
        channels last, and GKCRS or GKRSC for grouped layouts.
    weight_dtype : str, optional
        ``float32`` returns float32 gradients of 16-bit tensors; by default the dtype of the
        tensors.
    outputs : sequence of {"grad_weight", "grad_bias"}, optional
        The gradients to compute.
    split_k : "auto" or int, optional
        Number of partial sums that the reduction over N and space is split into.
    precision : {"highest", "high"}, optional
        ``highest`` computes float32 in true float32; ``high`` may use TF32.
    deterministic : bool, optional
        Return identical bits for identical requests on the same device model.
    alpha : float, optional
        Multiplies the gradient.
    beta : float, optional
        Multiplies ``accumulate``; 1 by default.
    accumulate : array, optional
        Added to the gradient after multiplication by ``beta``; has the shape of grad_weight.

    Returns
    -------
    ConvWeightResult
        grad_weight (K, C/groups, *kernel) and grad_bias (K,), None for those not named in
        ``outputs``.

    Raises
    ------
    TypeError
        A tensor is passed by position.
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

    Tensors are keyword-only: composable_kernel orders them differently from `conv_bwd_data` and
    `conv_backward`, so tensors of the same shape could be swapped unnoticed.

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
    """Compute all gradients of a convolution with one upload.

    Uses the formulas of `conv_bwd_data` (grad_input) and `grouped_conv_bwd_weight` (grad_weight,
    grad_bias).

    Parameters
    ----------
    grad_output : array (N, K, *out)
        Gradient with respect to the layer's output.
    input : array (N, C, *in)
        The layer's input.
    weight : array (K, C/groups, *kernel)
        The filters.
    stride : int or sequence of int, optional
        Step between windows: one int, or one per spatial dimension, always in the order D, H, W.
    padding : int or sequence, optional
        Zeros around the input: one int, one per dimension, or a pair (before, after) per dimension.
    dilation : int or sequence of int, optional
        Step between the taps of the kernel: one int, or one per dimension.
    groups : int, optional
        Number of groups that the channels are split into.
    outputs : sequence of {"grad_input", "grad_weight", "grad_bias"}, optional
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
    """Make the reader for the outputs of a convolution's backward pass."""

    def read(outputs: Outputs) -> ConvBackwardResult[Any, Any, Any]:
        return ConvBackwardResult(*select(outputs, ConvBackwardResult._fields, asked))

    return read
