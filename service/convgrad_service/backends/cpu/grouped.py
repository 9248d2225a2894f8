"""Grouped convolutions of few channels a group: kernels/grouped.cpp and grouped_weight.cpp.

All take canonical views: activations (N, G, C/G, *spatial), weights (G, K/G, C/G, *kernel), bias
(G, K/G), any strides. They answer how many bytes of work memory they used, or None where the plan
finds that the padded planes would not fit, and then nothing was computed.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad.dtypes import DType
from convgrad_service.backends.cpu import depthwise
from convgrad_service.backends.cpu.arguments import DTYPE_CODES, view_of
from convgrad_service.backends.cpu.library import Library
from convgrad_service.backends.cpu.planar_args import (
    ACTIVATION_CODES,
    CODE_OF,
    PlanarArgs,
    fill,
    tap_table,
)
from convgrad_service.backends.cpu.threads import Workers
from convgrad_service.plans.planar import (
    PlanarPlan,
    bwd_data_plan,
    bwd_weight_plan,
    forward_plan,
    triple,
)
from convgrad_service.problems.geometry import ConvShape

__all__ = ["bwd_data", "bwd_weight", "forward"]

Array = NDArray[Any]


def forward(
    library: Library,
    workers: Workers,
    conv: ConvShape,
    dtype: DType,
    input: Array,
    weight: Array,
    output: Array,
    *,
    bias: Array | None = None,
    activation: str = "none",
    cancelled: threading.Event | None = None,
) -> int | None:
    """output = activation(conv(input, weight) + bias), rounded once."""
    plan = forward_plan(conv, *_sums(library, dtype), _swaps(input) or _swaps(output))
    if plan is None:
        return None
    args = _args(conv, dtype, plan, weight)
    args.src, args.dst, args.weight = view_of(input, 3), view_of(output, 3), view_of(weight)
    args.bias = view_of(bias)
    args.src_channels, args.dst_channels = conv.in_channels_per_group, conv.out_channels_per_group
    args.activation = ACTIVATION_CODES[activation]
    acc_bytes = _sums(library, dtype)[0]
    if depthwise.applies(conv, acc_bytes, input, output):
        return depthwise.correlate(library, workers, args, acc_bytes, cancelled)
    return _launch(library, workers, "grouped_correlate", args, plan, cancelled)


def bwd_data(
    library: Library,
    workers: Workers,
    conv: ConvShape,
    dtype: DType,
    grad_output: Array,
    weight: Array,
    grad_input: Array,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    accumulate: Array | None = None,
    bias: Array | None = None,
    cancelled: threading.Event | None = None,
) -> int | None:
    """grad_input = alpha * grad + beta * accumulate + bias (G, C/G), rounded once."""
    plan = bwd_data_plan(conv, *_sums(library, dtype), _swaps(grad_output) or _swaps(grad_input))
    if plan is None:
        return None
    args = _args(conv, dtype, plan, weight)
    args.src, args.dst = view_of(grad_output, 3), view_of(grad_input, 3)
    args.weight = view_of(weight)
    # What the forward calls output channels is summed over here.
    args.weight.stride[1], args.weight.stride[2] = args.weight.stride[2], args.weight.stride[1]
    args.src_channels, args.dst_channels = conv.out_channels_per_group, conv.in_channels_per_group
    args.alpha, args.beta = alpha, 0.0 if accumulate is None else beta
    args.accumulate, args.bias = view_of(accumulate, 3), view_of(bias)
    acc_bytes = _sums(library, dtype)[0]
    if depthwise.applies(conv, acc_bytes, grad_output, grad_input, accumulate):
        return depthwise.correlate(library, workers, args, acc_bytes, cancelled)
    return _launch(library, workers, "grouped_correlate", args, plan, cancelled)


def bwd_weight(
    library: Library,
    workers: Workers,
    conv: ConvShape,
    dtype: DType,
    input: Array,
    grad_output: Array,
    grad_weight: Array,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    accumulate: Array | None = None,
    cancelled: threading.Event | None = None,
) -> int | None:
    """grad_weight = alpha * grad + beta * accumulate; the two have the same strides."""
    plan = bwd_weight_plan(conv, *_sums(library, dtype), _swaps(input) or _swaps(grad_output))
    if plan is None:
        return None
    args = _args(conv, dtype, plan, grad_weight)
    args.src, args.dst = view_of(input, 3), view_of(grad_output, 3)
    args.weight = view_of(grad_weight)
    args.src_channels, args.dst_channels = conv.in_channels_per_group, conv.out_channels_per_group
    args.alpha, args.beta = alpha, 0.0 if accumulate is None else beta
    if accumulate is not None and accumulate.strides != grad_weight.strides:
        # The weight is small: a copy in its order keeps the kernel simple.
        same = np.empty_like(grad_weight)
        same[...] = accumulate
        accumulate = same
    args.accumulate = view_of(accumulate)
    args.result_dtype = CODE_OF[grad_weight.dtype]
    acc_bytes = _sums(library, dtype)[0]
    if depthwise.applies(conv, acc_bytes, input, grad_output):
        return depthwise.bwd_weight(library, workers, args, acc_bytes, cancelled)
    return _launch(library, workers, "grouped_bwd_weight", args, plan, cancelled)


def _sums(library: Library, dtype: DType) -> tuple[int, int]:
    """Bytes of a sum and sums in a vector."""
    acc_bytes = 8 if dtype is DType.FLOAT64 else 4
    return acc_bytes, library.vector_bytes // acc_bytes


def _swaps(activation: Array) -> bool:
    """Whether channels lie side by side and columns do not, so that squares are transposed."""
    size = activation.itemsize
    _, groups, channels, *_ = activation.shape
    adjacent = channels == 1 or activation.strides[2] == size
    adjacent &= groups == 1 or activation.strides[1] == channels * size
    return adjacent and groups * channels > 1 and activation.strides[-1] != size


def _args(conv: ConvShape, dtype: DType, plan: PlanarPlan, weight: Array) -> PlanarArgs:
    """The arguments that all directions share."""
    args = PlanarArgs()
    strides = tuple(stride // weight.itemsize for stride in weight.strides[3:])
    fill(args, plan, tap_table(plan, triple(conv.kernel_size, 1), triple(strides, 0)))
    args.batch, args.groups = conv.batch, conv.groups
    args.alpha, args.beta = 1.0, 0.0
    args.dtype = args.result_dtype = DTYPE_CODES[dtype]
    return args


def _launch(
    library: Library,
    workers: Workers,
    kernel: str,
    args: PlanarArgs,
    plan: PlanarPlan,
    cancelled: threading.Event | None,
) -> int:
    workspace = workers.workspaces.take(plan.workspace_bytes)
    try:
        args.workspace = workspace.ctypes.data
        workers.launch(
            library.kernel(kernel),
            args,
            scratch_bytes=plan.scratch_bytes,
            tasks=plan.tasks,
            cancelled=cancelled,
        )
    finally:
        workers.workspaces.give(workspace)
    return plan.workspace_bytes + plan.scratch_bytes * workers.threads
