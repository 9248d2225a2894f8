"""The convolutions: one function per operation, each of which builds the operation's Call.

A function's parameters are the fields of the operation's contract, name for name (a test holds
it), which is why `locals()` is all that it has to hand on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypedDict

from numpy.typing import NDArray

from convgrad._call import Call, Outputs, TensorLike, make_call, one_output, select
from convgrad._results import ConvBackwardResult, ConvWeightResult

__all__ = [
    "ConvOptions",
    "Padding",
    "Precision",
    "Sizes",
    "conv_backward",
    "conv_bwd_data",
    "conv_fwd",
    "grouped_conv_bwd_weight",
    "grouped_conv_conv_fwd",
]

Sizes: TypeAlias = int | Sequence[int]
Padding: TypeAlias = int | Sequence[int | Sequence[int]]
Precision: TypeAlias = Literal["highest", "high"]
Activation: TypeAlias = Literal["none", "relu", "relu6", "silu"]


class ConvOptions(TypedDict, total=False):
    """The geometry of one convolution of `grouped_conv_conv_fwd`; defaults as everywhere."""

    stride: Sizes
    padding: Padding
    dilation: Sizes
    groups: int


def conv_bwd_data(
    grad_output: TensorLike,
    weight: TensorLike,
    *,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    input_size: Sequence[int] | None = None,
    layout: str | None = None,
    precision: Precision = "highest",
    deterministic: bool = True,
    alpha: float = 1.0,
    beta: float | None = None,
    accumulate: TensorLike | None = None,
) -> Call[NDArray[Any]]:
    """Gradient of a convolution (cross-correlation) with respect to its input, in 1D, 2D or 3D.

    ``grad_input[n, c, i] = sum over k, r, o of grad_output[n, k, o] * weight[k, c, r]`` where
    ``i = o*stride + r*dilation - pad_before`` in every dimension and c, k are of one group;
    then ``alpha*grad_input + beta*accumulate`` where ``accumulate`` is given.

    Shapes
        grad_output (N, K, *out), weight (K, C/groups, *kernel), accumulate as the result;
        returns grad_input (N, C, *in), with
        ``out = (in + pad_before + pad_after - dilation*(kernel-1) - 1)//stride + 1``.
        ``input_size``, spatial or full, settles which of the sizes that give ``out`` is meant; by
        default the smallest. ``padding`` is one int, one per dimension, or a pair
        (before, after) per dimension; ``stride`` and ``dilation`` are one int or one per
        dimension, in the order D, H, W whatever the layout.
    Dtypes
        float16, bfloat16, float32 or float64, one for all tensors and the result; sums and the
        epilogue in float32 (float64 for float64), rounded once. ``precision="high"`` allows TF32.
    Layout
        ``layout`` names the order of dimensions of all tensors: NCW, NWC, NCHW, NHWC, NCDHW,
        NDHWC, or a grouped one such as NHWGC or NGCHW; by default channels first. Weights are
        KCRS for channels first, KRSC for channels last, GKCRS and GKRSC for the grouped ones.
    Raises
        MalformedRequest for arguments of the wrong kind; InvalidProblem for sizes that contradict
        each other; ProblemTooLarge, Overloaded and any other `ServiceError` of the server;
        ConnectionFailed, ClientTimeout and InvalidAnswer from the way there and back.
    Source
        composable_kernel, 17_convnd_bwd_data; torch.nn.grad.conv2d_input.
    """
    return make_call("conv_bwd_data", locals(), one_output("grad_input"))


def grouped_conv_bwd_weight(
    input: TensorLike,
    grad_output: TensorLike,
    *,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    weight_size: Sequence[int] | None = None,
    layout: str | None = None,
    weight_dtype: str | None = None,
    outputs: Sequence[Literal["grad_weight", "grad_bias"]] = ("grad_weight",),
    split_k: Literal["auto"] | int = "auto",
    precision: Precision = "highest",
    deterministic: bool = True,
    alpha: float = 1.0,
    beta: float | None = None,
    accumulate: TensorLike | None = None,
) -> Call[ConvWeightResult]:
    """Gradient of a convolution with respect to its weight, and its bias on request.

    ``grad_weight[k, c, r] = sum over n, o of grad_output[n, k, o] * input[n, c, i]`` where
    ``i = o*stride + r*dilation - pad_before``; ``grad_bias[k] = sum over n, o of
    grad_output[n, k, o]``; then ``alpha*grad_weight + beta*accumulate`` where ``accumulate`` is
    given.

    Shapes
        input (N, C, *in), grad_output (N, K, *out); returns a tuple (grad_weight, grad_bias):
        grad_weight (K, C/groups, *kernel), grad_bias (K,), None for what ``outputs`` does not
        name. ``weight_size``, spatial or full, settles the kernel's size where input, grad_output
        and geometry leave it open.
    Dtypes
        float16, bfloat16, float32 or float64, one for all tensors; sums in float32 (float64 for
        float64). The result has the tensors' dtype, or float32 with ``weight_dtype="float32"``.
    Layout
        As in `conv_bwd_data`; grad_weight comes in the layout's order for weights.
    Raises
        As `conv_bwd_data`.
    Source
        composable_kernel, 20_grouped_conv_bwd_weight; torch.nn.grad.conv2d_weight.
    """
    return make_call("grouped_conv_bwd_weight", locals(), _read_weight_gradients(outputs))


def conv_fwd(
    input: TensorLike,
    weight: TensorLike,
    bias: TensorLike | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    *,
    layout: str | None = None,
    precision: Precision = "highest",
    deterministic: bool = True,
) -> Call[NDArray[Any]]:
    """Convolution (cross-correlation) in 1D, 2D or 3D.

    ``output[n, k, o] = bias[k] + sum over c, r of input[n, c, i] * weight[k, c, r]`` where
    ``i = o*stride + r*dilation - pad_before``.

    Shapes
        input (N, C, *in), weight (K, C/groups, *kernel), bias (K,); returns output
        (N, K, *out), with
        ``out = (in + pad_before + pad_after - dilation*(kernel-1) - 1)//stride + 1``.
    Dtypes
        float16, bfloat16, float32 or float64, one for all; sums in float32 (float64 for float64).
    Layout
        As in `conv_bwd_data`.
    Raises
        As `conv_bwd_data`.
    Source
        torch.nn.functional.conv1d, conv2d, conv3d.
    """
    return make_call("conv_fwd", locals(), one_output("output"))


def conv_backward(
    grad_output: TensorLike,
    input: TensorLike,
    weight: TensorLike,
    *,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    outputs: Sequence[Literal["grad_input", "grad_weight", "grad_bias"]] = (
        "grad_input",
        "grad_weight",
        "grad_bias",
    ),
    layout: str | None = None,
    precision: Precision = "highest",
    deterministic: bool = True,
) -> Call[ConvBackwardResult]:
    """All gradients of one convolution from one upload.

    The formulas are those of `conv_bwd_data` (grad_input) and `grouped_conv_bwd_weight`
    (grad_weight, grad_bias).

    Shapes
        grad_output (N, K, *out), input (N, C, *in), weight (K, C/groups, *kernel); returns a
        tuple (grad_input, grad_weight, grad_bias) with the shapes of input and weight and (K,),
        None for what ``outputs`` does not name.
    Dtypes
        float16, bfloat16, float32 or float64, one for all; sums in float32 (float64 for float64).
    Layout
        As in `conv_bwd_data`.
    Raises
        As `conv_bwd_data`.
    Source
        aten::convolution_backward; aclnnConvolutionBackward.
    """
    return make_call("conv_backward", locals(), _read_gradients(outputs))


def grouped_conv_conv_fwd(
    input: TensorLike,
    weight0: TensorLike,
    weight1: TensorLike,
    bias0: TensorLike | None = None,
    bias1: TensorLike | None = None,
    *,
    conv0: ConvOptions | Mapping[str, Any] | None = None,
    conv1: ConvOptions | Mapping[str, Any] | None = None,
    activation0: Activation = "none",
    activation1: Activation = "none",
    layout: str | None = None,
    precision: Precision = "highest",
    deterministic: bool = True,
) -> Call[NDArray[Any]]:
    """Two convolutions in one, whose intermediate is never stored: depthwise → pointwise, say.

    ``output = activation1(conv1(activation0(conv0(input) + bias0)) + bias1)``, where conv0 and
    conv1 are as in `conv_fwd`.

    Shapes
        input (N, C, *in), weight0 (M, C/groups0, *kernel0), weight1 (K, M/groups1, *kernel1),
        bias0 (M,), bias1 (K,); returns output (N, K, *out).
        ``conv0`` and ``conv1`` are mappings with any of stride, padding, dilation and groups.
    Dtypes
        float16, bfloat16, float32 or float64, one for all; sums in float32 (float64 for float64);
        the intermediate is rounded once to the tensors' dtype, after activation0.
    Layout
        As in `conv_bwd_data`.
    Raises
        As `conv_bwd_data`.
    Source
        composable_kernel, 41_grouped_conv_conv_fwd.
    """
    return make_call("grouped_conv_conv_fwd", locals(), one_output("output"))


def _read_weight_gradients(asked: Sequence[str]) -> Callable[[Outputs], ConvWeightResult]:
    def read(outputs: Outputs) -> ConvWeightResult:
        return ConvWeightResult(*select(outputs, ConvWeightResult._fields, asked))

    return read


def _read_gradients(asked: Sequence[str]) -> Callable[[Outputs], ConvBackwardResult]:
    def read(outputs: Outputs) -> ConvBackwardResult:
        return ConvBackwardResult(*select(outputs, ConvBackwardResult._fields, asked))

    return read
