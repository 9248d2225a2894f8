"""Average pooling, adaptive too: see `_calls_conv` for how these functions read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np

from convgrad._call import Call, Stored, TensorLike, make_call, one_output
from convgrad._calls_conv import Padding, Sizes
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
        The layer's input, of one to three dimensions: float16, bfloat16, float32 or float64.
    kernel_size : int or sequence of int
        Size of the window: one int, or one per spatial dimension in the order D, H, W, whatever the
        layout.
    stride : int or sequence of int, optional
        Step between windows; ``kernel_size`` by default.
    padding : int or sequence, optional
        Zeros around the input: one int, one per dimension, or a pair (before, after) per dimension.
    ceil_mode : bool, optional
        Let a last window hang over the edge.
    count_include_pad : bool, optional
        Count the padding's positions in a window's divisor.
    divisor_override : int, optional
        The divisor of every window, in the place of its size.
    layout : str, optional
        Channels first (the default: NCW, NCHW or NCDHW) or last (NWC, NHWC or NDHWC), for all
        tensors.
    deterministic : bool, optional
        The same bits for the same request on the same device model.

    Returns
    -------
    array (N, C, *out)
        output.

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
    Sums run in float32 (float64 for float64), in a fixed order.
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

    ``grad_input[n, c, i] = sum of grad_output[n, c, o] / divisor[o] over the windows o with i``.

    Parameters
    ----------
    grad_output : array (N, C, *out)
        Gradient with respect to the layer's output: float16, bfloat16, float32 or float64.
    input_size : sequence of int
        Size of the input, spatial or the full shape.
    kernel_size : int or sequence of int
        Size of the window: one int, or one per spatial dimension in the order D, H, W, whatever the
        layout.
    stride : int or sequence of int, optional
        Step between windows; ``kernel_size`` by default.
    padding : int or sequence, optional
        Zeros around the input: one int, one per dimension, or a pair (before, after) per dimension.
    ceil_mode : bool, optional
        Let a last window hang over the edge.
    count_include_pad : bool, optional
        Count the padding's positions in a window's divisor.
    divisor_override : int, optional
        The divisor of every window, in the place of its size.
    layout : str, optional
        Channels first (the default: NCW, NCHW or NCDHW) or last (NWC, NHWC or NDHWC), for all
        tensors.
    deterministic : bool, optional
        The same bits for the same request on the same device model.

    Returns
    -------
    array (N, C, *in)
        grad_input.

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
    Sums run in float32 (float64 for float64), in a fixed order.
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
    """Average pooling over windows that divide the input into ``output_size``.

    ``output[n, c, o] = mean of input[n, c, i], floor(o*in/out) <= i < ceil((o + 1)*in/out)``.

    Parameters
    ----------
    input : array (N, C, *in)
        The layer's input, of one to three dimensions: float16, bfloat16, float32 or float64.
    output_size : int, sequence of (int or None), or None
        Size of the output: one int, or one per spatial dimension in the order D, H, W; None is the
        input's own.
    layout : str, optional
        Channels first (the default: NCW, NCHW or NCDHW) or last (NWC, NHWC or NDHWC), for all
        tensors.
    deterministic : bool, optional
        The same bits for the same request on the same device model.

    Returns
    -------
    array (N, C, *out)
        output.

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
    Sums run in float32 (float64 for float64), in a fixed order.
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

    ``grad_input[n, c, i] = sum of grad_output[n, c, o] / size[o] over the windows o with i``.

    Parameters
    ----------
    grad_output : array (N, C, *out)
        Gradient with respect to the layer's output: float16, bfloat16, float32 or float64.
    input_size : sequence of int
        Size of the input, spatial or the full shape.
    layout : str, optional
        Channels first (the default: NCW, NCHW or NCDHW) or last (NWC, NHWC or NDHWC), for all
        tensors.
    deterministic : bool, optional
        The same bits for the same request on the same device model.

    Returns
    -------
    array (N, C, *in)
        grad_input.

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
    Sums run in float32 (float64 for float64), in a fixed order.
    Source: aten::_adaptive_avg_pool2d_backward and _adaptive_avg_pool3d_backward.

    Examples
    --------
    >>> grad_input = client.adaptive_avg_pool_bwd(grad_output, [14, 14])
    """
    return make_call("adaptive_avg_pool_bwd", locals(), one_output("grad_input"))


def asked_size(input: TensorLike, output_size: OutputSize) -> int | Sequence[int | None]:
    """An adaptive pooling's size, None for the whole of it said of each dimension."""
    if output_size is not None:
        return output_size
    ndim = len(input.shape) if isinstance(input, Stored) else np.ndim(input)
    return (None,) * (ndim - 2)
