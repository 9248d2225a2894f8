"""Forward convolutions: one function per operation, each of which builds the operation's Call.

The parameters of each function have the names of the fields of the operation's contract (a test
checks this), so each function passes `locals()` on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypedDict

from convgrad._call import Call, TensorLike, make_call, one_output
from convgrad._results import Array

__all__ = [
    "ConvLayout",
    "ConvLayout3d",
    "ConvOptions",
    "Padding",
    "Precision",
    "Sizes",
    "conv_fwd",
    "grouped_conv_conv_fwd",
]

Sizes: TypeAlias = int | Sequence[int]
Padding: TypeAlias = int | Sequence[int | Sequence[int]]
Precision: TypeAlias = Literal["highest", "high"]
Activation: TypeAlias = Literal["none", "relu", "relu6", "silu"]
ConvLayout3d: TypeAlias = Literal["NCDHW", "NDHWC", "NGCDHW", "NDHWGC", "GNDHWC"]
ConvLayout: TypeAlias = (
    Literal["NCW", "NWC", "NGCW", "NWGC", "GNWC", "NCHW", "NHWC", "NGCHW", "NHWGC", "GNHWC"]
    | ConvLayout3d
)


class ConvOptions(TypedDict, total=False):
    """Geometry of one convolution of `grouped_conv_conv_fwd`, with the defaults of `conv_fwd`."""

    stride: Sizes
    padding: Padding
    dilation: Sizes
    groups: int


def conv_fwd(
    input: TensorLike,
    weight: TensorLike,
    bias: TensorLike | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    *,
    layout: ConvLayout | None = None,
    precision: Precision = "highest",
    deterministic: bool = True,
) -> Call[Array]:
    """Convolution (cross-correlation) in 1D, 2D or 3D.

    ``output[n, k, o] = bias[k] + sum over c, r of input[n, c, i] * weight[k, c, r]`` where ``i =
    o*stride + r*dilation - pad_before``.

    Parameters
    ----------
    input : array (N, C, *in)
        The layer's input.
    weight : array (K, C/groups, *kernel)
        The filters.
    bias : array (K,), optional
        One value per output channel.
    stride : int or sequence of int, optional
        Step between windows: one int, or one per spatial dimension, always in the order D, H, W.
    padding : int or sequence, optional
        Zeros around the input: one int, one per dimension, or a pair (before, after) per dimension.
    dilation : int or sequence of int, optional
        Step between the taps of the kernel: one int, or one per dimension.
    groups : int, optional
        Number of groups that the channels are split into.
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
    array (N, K, *out)
        output, with ``out = (in + pad_before + pad_after - dilation*(kernel-1) - 1)//stride + 1``.

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

    Source: torch.nn.functional.conv1d, conv2d, conv3d.

    Examples
    --------
    >>> output = client.conv_fwd(x, weight, bias, stride=2, padding=1)
    """
    return make_call("conv_fwd", locals(), one_output("output"))


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
    layout: ConvLayout | None = None,
    precision: Precision = "highest",
    deterministic: bool = True,
) -> Call[Array]:
    """Two fused convolutions, such as depthwise → pointwise; the intermediate is never stored.

    ``output = activation1(conv1(activation0(conv0(input) + bias0)) + bias1)``, where conv0 and
    conv1 are convolutions as in `conv_fwd`.

    Parameters
    ----------
    input : array (N, C, *in)
        The layer's input.
    weight0 : array (M, C/groups0, *kernel0)
        The filters of the first convolution.
    weight1 : array (K, M/groups1, *kernel1)
        The filters of the second convolution.
    bias0 : array (M,), optional
        One value per intermediate channel.
    bias1 : array (K,), optional
        One value per output channel.
    conv0, conv1 : mapping, optional
        Geometry of each: any of stride, padding, dilation and groups; see `ConvOptions`.
    activation0, activation1 : {"none", "relu", "relu6", "silu"}, optional
        The activation that follows each convolution.
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
    array (N, K, *out)
        output.

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
    One dtype for all: float16, bfloat16, float32 or float64. Sums run in float32 (float64 for
    float64); the intermediate is rounded once to the tensors' dtype, after activation0.

    Source: composable_kernel, 41_grouped_conv_conv_fwd.

    Examples
    --------
    >>> output = client.grouped_conv_conv_fwd(
    ...     x, depthwise, pointwise,
    ...     conv0={"padding": 1, "groups": 32}, activation0="relu",
    ... )
    """
    return make_call("grouped_conv_conv_fwd", locals(), one_output("output"))
