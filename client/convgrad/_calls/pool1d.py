"""Max pooling in one dimension; see `_calls.conv` for the conventions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, overload

from convgrad._call import Call, TensorLike, make_call, one_output
from convgrad._calls.conv import Padding, Sizes
from convgrad._calls.pool import IndexName, read_pooled
from convgrad._results import Array, IndexArray, MaxPoolResult

__all__ = ["maxpool1d_bwd", "maxpool1d_fwd"]

PoolLayout1d: TypeAlias = Literal["NCW", "NWC"]


@overload
def maxpool1d_fwd(
    input: TensorLike,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Padding = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
    return_indices: Literal[False] = False,
    *,
    index_dtype: IndexName = "int64",
    layout: PoolLayout1d | None = None,
    deterministic: bool = True,
) -> Call[MaxPoolResult[None]]: ...
@overload
def maxpool1d_fwd(
    input: TensorLike,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Padding = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
    *,
    return_indices: Literal[True],
    index_dtype: IndexName = "int64",
    layout: PoolLayout1d | None = None,
    deterministic: bool = True,
) -> Call[MaxPoolResult[IndexArray]]: ...
@overload
def maxpool1d_fwd(
    input: TensorLike,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Padding = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
    *,
    index_dtype: IndexName = "int64",
    layout: PoolLayout1d | None = None,
    deterministic: bool = True,
) -> Call[MaxPoolResult[IndexArray | None]]: ...
def maxpool1d_fwd(
    input: TensorLike,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Padding = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
    *,
    index_dtype: IndexName = "int64",
    layout: PoolLayout1d | None = None,
    deterministic: bool = True,
) -> Call[MaxPoolResult[Any]]:
    """Max pooling over 1D windows.

    ``output[n, c, q] = max over s of input[n, c, q*stride + s*dilation - pad]``.

    Parameters
    ----------
    input : array (N, C, W)
        The layer's input: float16, bfloat16, float32 or float64.
    kernel_size : int or sequence of int
        Size of the window: one int, or one per spatial dimension, always in the order D, H, W.
    stride : int or sequence of int, optional
        Step between windows; ``kernel_size`` by default.
    padding : int or sequence, optional
        Padding around the input, which is never selected as the maximum: one int, one per
        dimension, or a pair (before, after) per dimension.
    dilation : int or sequence of int, optional
        Step between the elements of a window.
    ceil_mode : bool, optional
        Round the output size up, so that the last window may extend past the edge.
    return_indices : bool, optional
        Also return the positions of the maxima.
    index_dtype : {"int64", "int32"}, optional
        Dtype of the indices.
    layout : str, optional
        NCW (the default) or NWC, for all tensors.
    deterministic : bool, optional
        Return identical bits for identical requests on the same device model.

    Returns
    -------
    MaxPoolResult
        output and indices, both (N, C, Q). indices are positions in each (n, c) row, and None
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
    Source: torch.nn.functional.max_pool1d.

    Examples
    --------
    >>> output, indices = client.maxpool1d_fwd(x, 3, 2, padding=1, return_indices=True)
    """
    return make_call("maxpool1d_fwd", locals(), read_pooled(return_indices))


def maxpool1d_bwd(
    grad_output: TensorLike,
    input: TensorLike | None = None,
    *,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Padding = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
    indices: TensorLike | None = None,
    input_size: Sequence[int] | None = None,
    layout: PoolLayout1d | None = None,
    deterministic: bool = True,
) -> Call[Array]:
    """Gradient of `maxpool1d_fwd`, from its input or from the indices it returned.

    ``grad_input[n, c, i] = sum of grad_output[n, c, o] over the windows o whose maximum is at i``.

    Parameters
    ----------
    grad_output : array (N, C, Q)
        Gradient with respect to the layer's output.
    input : array (N, C, W), optional
        The layer's input; pass either this or ``indices``.
    kernel_size : int or sequence of int
        Size of the window: one int, or one per spatial dimension, always in the order D, H, W.
    stride : int or sequence of int, optional
        Step between windows; ``kernel_size`` by default.
    padding : int or sequence, optional
        Padding around the input, which is never selected as the maximum: one int, one per
        dimension, or a pair (before, after) per dimension.
    dilation : int or sequence of int, optional
        Step between the elements of a window.
    ceil_mode : bool, optional
        Round the output size up, so that the last window may extend past the edge.
    indices : array (N, C, Q), optional
        The indices that the forward pass returned: int64 or int32.
    input_size : sequence of int, optional
        Spatial size or full shape of the input; required with ``indices``.
    layout : str, optional
        NCW (the default) or NWC, for all tensors.
    deterministic : bool, optional
        Return identical bits for identical requests on the same device model.

    Returns
    -------
    array (N, C, W)
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
    grad_output and input share one dtype: float16, bfloat16, float32 or float64. Accumulation is in
    float32 (float64 for float64 tensors), in a fixed order.

    Source: aten::max_pool2d_with_indices_backward.

    Examples
    --------
    >>> grad_input = client.maxpool1d_bwd(grad_output, x, kernel_size=3, stride=2, padding=1)
    """
    return make_call("maxpool1d_bwd", locals(), one_output("grad_input"))
