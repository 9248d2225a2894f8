"""Average pooling and adaptive average pooling; see `_calls.conv` for the conventions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np

from convgrad._call import Call, Stored, TensorLike, make_call, one_output
from convgrad._calls.conv import Padding, Sizes
from convgrad._results import Array

__all__ = [
    "OutputSize",
    "PoolLayout",
    "adaptive_avg_pool_bwd",
    "adaptive_avg_pool_fwd",
    "asked_size",
    "avg_pool_bwd",
    "avg_pool_fwd",
]

PoolLayout: TypeAlias = Literal["NCW", "NWC", "NCHW", "NHWC", "NCDHW", "NDHWC"]
OutputSize: TypeAlias = int | Sequence[int | None] | None


def avg_pool_fwd(
    input: TensorLike,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Padding = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    *,
    layout: PoolLayout | None = None,
    deterministic: bool = True,
) -> Call[Array]:
    """Average pooling over 1D, 2D or 3D windows.

    ``output[n, c, o] = sum over r of input[n, c, o*stride + r - pad] / divisor[o]``.

    Parameters
    ----------
    input : array (N, C, *in)
        The layer's input, 1D, 2D or 3D: float16, bfloat16, float32 or float64.
    kernel_size : int or sequence of int
        Size of the window: one int, or one per spatial dimension, always in the order D, H, W.
    stride : int or sequence of int, optional
        Step between windows; ``kernel_size`` by default.
    padding : int or sequence, optional
        Zeros around the input: one int, one per dimension, or a pair (before, after) per dimension.
    ceil_mode : bool, optional
        Round the output size up, so that the last window may extend past the edge.
    count_include_pad : bool, optional
        Count padded positions in the divisor of a window.
    divisor_override : int, optional
        Divisor used for every window instead of its size.
    layout : str, optional
        Channels first (the default: NCW, NCHW or NCDHW) or last (NWC, NHWC or NDHWC), for all
        tensors.
    deterministic : bool, optional
        Return identical bits for identical requests on the same device model.

    Returns
    -------
    array (N, C, *out)
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
    Accumulation is in float32 (float64 for float64 tensors), in a fixed order.
    Source: torch.nn.functional.avg_pool1d, avg_pool2d and avg_pool3d.

    Examples
    --------
    >>> output = client.avg_pool_fwd(x, 3, 1, padding=1)
    """
    return make_call("avg_pool_fwd", locals(), one_output("output"))


def avg_pool_bwd(
    grad_output: TensorLike,
    *,
    input_size: Sequence[int],
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Padding = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    layout: PoolLayout | None = None,
    deterministic: bool = True,
) -> Call[Array]:
    """Gradient of `avg_pool_fwd` with respect to its input.

    ``grad_input[n, c, i] = sum of grad_output[n, c, o] / divisor[o] over windows o containing i``.

    Parameters
    ----------
    grad_output : array (N, C, *out)
        Gradient with respect to the layer's output: float16, bfloat16, float32 or float64.
    input_size : sequence of int
        Spatial size or full shape of the input.
    kernel_size : int or sequence of int
        Size of the window: one int, or one per spatial dimension, always in the order D, H, W.
    stride : int or sequence of int, optional
        Step between windows; ``kernel_size`` by default.
    padding : int or sequence, optional
        Zeros around the input: one int, one per dimension, or a pair (before, after) per dimension.
    ceil_mode : bool, optional
        Round the output size up, so that the last window may extend past the edge.
    count_include_pad : bool, optional
        Count padded positions in the divisor of a window.
    divisor_override : int, optional
        Divisor used for every window instead of its size.
    layout : str, optional
        Channels first (the default: NCW, NCHW or NCDHW) or last (NWC, NHWC or NDHWC), for all
        tensors.
    deterministic : bool, optional
        Return identical bits for identical requests on the same device model.

    Returns
    -------
    array (N, C, *in)
        grad_input.

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
    Accumulation is in float32 (float64 for float64 tensors), in a fixed order.
    Source: aten::avg_pool2d_backward and avg_pool3d_backward.

    Examples
    --------
    >>> grad_input = client.avg_pool_bwd(g, input_size=[8, 8], kernel_size=3, stride=1, padding=1)
    """
    return make_call("avg_pool_bwd", locals(), one_output("grad_input"))


def adaptive_avg_pool_fwd(
    input: TensorLike,
    output_size: OutputSize,
    *,
    layout: PoolLayout | None = None,
    deterministic: bool = True,
) -> Call[Array]:
    """Average pooling with windows chosen so that the output has size ``output_size``.

    ``output[n, c, o] = mean of input[n, c, i] for floor(o*in/out) <= i < ceil((o + 1)*in/out)``.

    Parameters
    ----------
    input : array (N, C, *in)
        The layer's input, 1D, 2D or 3D: float16, bfloat16, float32 or float64.
    output_size : int, sequence of (int or None), or None
        Size of the output: one int, or one per spatial dimension, always in the order D, H, W. None
        keeps the size of the input.
    layout : str, optional
        Channels first (the default: NCW, NCHW or NCDHW) or last (NWC, NHWC or NDHWC), for all
        tensors.
    deterministic : bool, optional
        Return identical bits for identical requests on the same device model.

    Returns
    -------
    array (N, C, *out)
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
    Accumulation is in float32 (float64 for float64 tensors), in a fixed order.
    Source: torch.nn.functional.adaptive_avg_pool1d, adaptive_avg_pool2d and adaptive_avg_pool3d.

    Examples
    --------
    >>> pooled = client.adaptive_avg_pool_fwd(x, (7, None))
    """
    arguments = {**locals(), "output_size": asked_size(input, output_size)}
    return make_call("adaptive_avg_pool_fwd", arguments, one_output("output"))


def adaptive_avg_pool_bwd(
    grad_output: TensorLike,
    input_size: Sequence[int],
    *,
    layout: PoolLayout | None = None,
    deterministic: bool = True,
) -> Call[Array]:
    """Gradient of `adaptive_avg_pool_fwd` with respect to its input.

    ``grad_input[n, c, i] = sum of grad_output[n, c, o] / size[o] over windows o containing i``.

    Parameters
    ----------
    grad_output : array (N, C, *out)
        Gradient with respect to the layer's output: float16, bfloat16, float32 or float64.
    input_size : sequence of int
        Spatial size or full shape of the input.
    layout : str, optional
        Channels first (the default: NCW, NCHW or NCDHW) or last (NWC, NHWC or NDHWC), for all
        tensors.
    deterministic : bool, optional
        Return identical bits for identical requests on the same device model.

    Returns
    -------
    array (N, C, *in)
        grad_input.

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
    Accumulation is in float32 (float64 for float64 tensors), in a fixed order.
    Source: aten::_adaptive_avg_pool2d_backward and _adaptive_avg_pool3d_backward.

    Examples
    --------
    >>> grad_input = client.adaptive_avg_pool_bwd(grad_output, [14, 14])
    """
    return make_call("adaptive_avg_pool_bwd", locals(), one_output("grad_input"))


def asked_size(input: TensorLike, output_size: OutputSize) -> int | Sequence[int | None]:
    """Expand an ``output_size`` of None to one None per spatial dimension."""
    if output_size is not None:
        return output_size
    ndim = len(input.shape) if isinstance(input, Stored) else np.ndim(input)
    return (None,) * (ndim - 2)
