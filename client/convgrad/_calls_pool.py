"""Max pooling, forward and backward: see `_calls_conv` for how these functions read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from numpy.typing import NDArray

from convgrad._call import Call, Outputs, TensorLike, make_call, one_output, required
from convgrad._calls_conv import Padding, Sizes
from convgrad._results import MaxPoolResult

__all__ = ["maxpool2d_bwd", "maxpool2d_fwd", "maxpool3d_bwd", "maxpool3d_fwd"]


def maxpool2d_fwd(
    input: TensorLike,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Padding = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
    *,
    index_dtype: Literal["int64", "int32"] = "int64",
    layout: str | None = None,
    deterministic: bool = True,
) -> Call[MaxPoolResult]:
    """Max pooling over 2D windows.

    ``output[n, c, p, q] = max over r, s of input[n, c, p*stride + r*dilation - pad, …]``; the
    first maximum of a window wins a tie, and a NaN wins over any number.

    Shapes
        input (N, C, H, W); returns a tuple (output, indices), both (N, C, P, Q), indices None
        unless ``return_indices``. ``stride`` defaults to ``kernel_size``; ``ceil_mode`` lets a
        last window hang over the edge; ``padding`` is one int, one per dimension, or a pair
        (before, after) per dimension. Indices are flat, ``h*W + w``, per (n, c) plane.
    Dtypes
        input and output float16, bfloat16, float32 or float64; indices ``index_dtype``.
    Layout
        NCHW (the default) or NHWC, for output and indices too.
    Raises
        As `conv_bwd_data`.
    Source
        torch.nn.functional.max_pool2d.
    """
    return make_call("maxpool2d_fwd", locals(), _read_pooled(return_indices))


def maxpool3d_fwd(
    input: TensorLike,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Padding = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
    *,
    index_dtype: Literal["int64", "int32"] = "int64",
    layout: str | None = None,
    deterministic: bool = True,
) -> Call[MaxPoolResult]:
    """Max pooling over 3D windows.

    The formula is that of `maxpool2d_fwd`, with a third dimension.

    Shapes
        input (N, C, D, H, W); returns a tuple (output, indices), both (N, C, Z, P, Q), indices
        None unless ``return_indices``; they are flat, ``(d*H + h)*W + w``, per (n, c) volume.
        The rest as in `maxpool2d_fwd`.
    Dtypes
        input and output float16, bfloat16, float32 or float64; indices ``index_dtype``.
    Layout
        NCDHW (the default) or NDHWC.
    Raises
        As `conv_bwd_data`.
    Source
        torch.nn.functional.max_pool3d.
    """
    return make_call("maxpool3d_fwd", locals(), _read_pooled(return_indices))


def maxpool2d_bwd(
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
    layout: str | None = None,
    deterministic: bool = True,
) -> Call[NDArray[Any]]:
    """Gradient of `maxpool2d_fwd`, from its input or from the indices it returned.

    ``grad_input[n, c, i] = sum of grad_output[n, c, o] over the windows o whose maximum is at
    i``.

    Shapes
        grad_output (N, C, P, Q); input (N, C, H, W), or else indices (N, C, P, Q) with
        ``input_size``, spatial or full; returns grad_input (N, C, H, W).
    Dtypes
        grad_output and input float16, bfloat16, float32 or float64, alike; indices int64 or
        int32; sums in float32 (float64 for float64), in a fixed order.
    Layout
        NCHW (the default) or NHWC.
    Raises
        InvalidProblem also for an index out of range or outside its window; else as
        `conv_bwd_data`.
    Source
        composable_kernel, 49_maxpool2d_bwd; aten::max_pool2d_with_indices_backward.
    """
    return make_call("maxpool2d_bwd", locals(), one_output("grad_input"))


def maxpool3d_bwd(
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
    layout: str | None = None,
    deterministic: bool = True,
) -> Call[NDArray[Any]]:
    """Gradient of `maxpool3d_fwd`, from its input or from the indices it returned.

    The formula is that of `maxpool2d_bwd`.

    Shapes
        grad_output (N, C, Z, P, Q); input (N, C, D, H, W), or else indices (N, C, Z, P, Q) with
        ``input_size``, spatial or full; returns grad_input (N, C, D, H, W).
    Dtypes
        As in `maxpool2d_bwd`: sums in float32 or wider and in a fixed order, in 3D too.
    Layout
        NCDHW (the default) or NDHWC.
    Raises
        As `maxpool2d_bwd`.
    Source
        aten::max_pool3d_with_indices_backward.
    """
    return make_call("maxpool3d_bwd", locals(), one_output("grad_input"))


def _read_pooled(return_indices: bool) -> Callable[[Outputs], MaxPoolResult]:
    def read(outputs: Outputs) -> MaxPoolResult:
        indices = required(outputs, "indices") if return_indices else None
        return MaxPoolResult(required(outputs, "output"), indices)

    return read
