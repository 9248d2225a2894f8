"""Adaptive max pooling and max unpooling; see `_calls.conv` for the conventions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

from convgrad._call import Call, TensorLike, make_call, one_output
from convgrad._calls.avg_pool import OutputSize, PoolLayout, asked_size
from convgrad._calls.conv import Sizes
from convgrad._calls.pool import IndexName, read_pooled
from convgrad._results import Array, IndexArray, MaxPoolResult

__all__ = ["adaptive_max_pool_bwd", "adaptive_max_pool_fwd", "max_unpool_bwd", "max_unpool_fwd"]


@overload
def adaptive_max_pool_fwd(
    input: TensorLike,
    output_size: OutputSize,
    return_indices: Literal[False] = False,
    *,
    index_dtype: IndexName = "int64",
    layout: PoolLayout | None = None,
    deterministic: bool = True,
) -> Call[MaxPoolResult[None]]: ...
@overload
def adaptive_max_pool_fwd(
    input: TensorLike,
    output_size: OutputSize,
    *,
    return_indices: Literal[True],
    index_dtype: IndexName = "int64",
    layout: PoolLayout | None = None,
    deterministic: bool = True,
) -> Call[MaxPoolResult[IndexArray]]: ...
@overload
def adaptive_max_pool_fwd(
    input: TensorLike,
    output_size: OutputSize,
    return_indices: bool = False,
    *,
    index_dtype: IndexName = "int64",
    layout: PoolLayout | None = None,
    deterministic: bool = True,
) -> Call[MaxPoolResult[IndexArray | None]]: ...
def adaptive_max_pool_fwd(
    input: TensorLike,
    output_size: OutputSize,
    return_indices: bool = False,
    *,
    index_dtype: IndexName = "int64",
    layout: PoolLayout | None = None,
    deterministic: bool = True,
) -> Call[MaxPoolResult[Any]]:
    """Max pooling with windows chosen so that the output has size ``output_size``.

    ``output[n, c, o] = max of input[n, c, i] for floor(o*in/out) <= i < ceil((o + 1)*in/out)``.

    Parameters
    ----------
    input : array (N, C, *in)
        The layer's input, 1D, 2D or 3D: float16, bfloat16, float32 or float64.
    output_size : int, sequence of (int or None), or None
        Size of the output: one int, or one per spatial dimension, always in the order D, H, W. None
        keeps the size of the input.
    return_indices : bool, optional
        Also return the positions of the maxima.
    index_dtype : {"int64", "int32"}, optional
        Dtype of the indices.
    layout : str, optional
        Channels first (the default: NCW, NCHW or NCDHW) or last (NWC, NHWC or NDHWC), for all
        tensors.
    deterministic : bool, optional
        Return identical bits for identical requests on the same device model.

    Returns
    -------
    MaxPoolResult
        output and indices, both (N, C, *out). indices are flat in each (n, c) plane, and None
        unless ``return_indices``.

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
    The first maximum of a window wins a tie, and a NaN wins over any number.
    Source: torch.nn.functional.adaptive_max_pool1d, adaptive_max_pool2d and adaptive_max_pool3d.

    Examples
    --------
    >>> output, indices = client.adaptive_max_pool_fwd(x, 7, return_indices=True)
    """
    arguments = {**locals(), "output_size": asked_size(input, output_size)}
    return make_call("adaptive_max_pool_fwd", arguments, read_pooled(return_indices))


def adaptive_max_pool_bwd(
    grad_output: TensorLike,
    input: TensorLike | None = None,
    *,
    indices: TensorLike | None = None,
    input_size: Sequence[int] | None = None,
    layout: PoolLayout | None = None,
    deterministic: bool = True,
) -> Call[Array]:
    """Gradient of `adaptive_max_pool_fwd`, from its input or from the indices it returned.

    ``grad_input[n, c, i] = sum of grad_output[n, c, o] over the windows o whose maximum is at i``.

    Parameters
    ----------
    grad_output : array (N, C, *out)
        Gradient with respect to the layer's output: float16, bfloat16, float32 or float64.
    input : array (N, C, *in), optional
        The layer's input, with the dtype of grad_output; pass either this or ``indices``.
    indices : array (N, C, *out), optional
        The indices that the forward pass returned: int64 or int32.
    input_size : sequence of int, optional
        Spatial size or full shape of the input; required with ``indices``.
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
        The sizes contradict each other, or an index is out of range or outside its window.
    ServiceError
        The server answered with another error, such as ProblemTooLarge or Overloaded.
    ConnectionFailed, GatewayError, ClientTimeout, InvalidAnswer
        The server could not be reached, or gave no valid answer.

    Notes
    -----
    Accumulation is in float32 (float64 for float64 tensors), in a fixed order.
    Source: aten::adaptive_max_pool2d_backward and adaptive_max_pool3d_backward.

    Examples
    --------
    >>> grad_input = client.adaptive_max_pool_bwd(grad_output, x)
    """
    return make_call("adaptive_max_pool_bwd", locals(), one_output("grad_input"))


def max_unpool_fwd(
    input: TensorLike,
    indices: TensorLike,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    output_size: Sequence[int] | None = None,
    *,
    layout: PoolLayout | None = None,
    deterministic: bool = True,
) -> Call[Array]:
    """Max unpooling: write each element to the position given by its index, and zero elsewhere.

    ``output[n, c, indices[n, c, i]] = input[n, c, i]``.

    Parameters
    ----------
    input : array (N, C, *in)
        The layer's input, 1D, 2D or 3D: float16, bfloat16, float32 or float64.
    indices : array (N, C, *in)
        Flat position of each element in its (n, c) plane of the output: int64 or int32.
    kernel_size : int or sequence of int
        Window size of the max pooling: one int, or one per spatial dimension, always in the order
        D, H, W.
    stride : int or sequence of int, optional
        Step between windows; ``kernel_size`` by default.
    padding : int or sequence of int, optional
        Padding of the max pooling, the same on both sides.
    output_size : sequence of int, optional
        Spatial size or full shape of the output; by default ``(in - 1)*stride - 2*padding +
        kernel_size``, from which it may differ by less than one stride.
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
        The sizes contradict each other, or an index lies outside its plane.
    ServiceError
        The server answered with another error, such as ProblemTooLarge or Overloaded.
    ConnectionFailed, GatewayError, ClientTimeout, InvalidAnswer
        The server could not be reached, or gave no valid answer.

    Notes
    -----
    If several elements have the same index, the last one wins.
    Source: torch.nn.functional.max_unpool1d, max_unpool2d and max_unpool3d.

    Examples
    --------
    >>> x = client.max_unpool_fwd(output, indices, 2)
    """
    return make_call("max_unpool_fwd", locals(), one_output("output"))


def max_unpool_bwd(
    grad_output: TensorLike,
    indices: TensorLike,
    *,
    layout: PoolLayout | None = None,
    deterministic: bool = True,
) -> Call[Array]:
    """Gradient of `max_unpool_fwd` with respect to its input.

    ``grad_input[n, c, i] = grad_output[n, c, indices[n, c, i]]``.

    Parameters
    ----------
    grad_output : array (N, C, *out)
        Gradient with respect to the layer's output: float16, bfloat16, float32 or float64.
    indices : array (N, C, *in)
        Flat position of each element in its (n, c) plane of the output: int64 or int32.
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
        The sizes contradict each other, or an index lies outside its plane.
    ServiceError
        The server answered with another error, such as ProblemTooLarge or Overloaded.
    ConnectionFailed, GatewayError, ClientTimeout, InvalidAnswer
        The server could not be reached, or gave no valid answer.

    Notes
    -----
    Elements are copied unchanged.
    Source: torch.nn.functional.max_unpool1d, max_unpool2d and max_unpool3d.

    Examples
    --------
    >>> grad_input = client.max_unpool_bwd(grad_output, indices)
    """
    return make_call("max_unpool_bwd", locals(), one_output("grad_input"))
