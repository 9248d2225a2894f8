"""Dense convolutions: kernels/dense_gather.cpp, dense_bwd_weight.cpp and first_bwd_weight.cpp.

All functions take canonical views of any strides: activations (N, G, C/G, *spatial), weights
(G, K/G, C/G, *kernel), bias (G, K/G) or, for bwd_data, (G, C/G). The plan lists the launches.
"""

from __future__ import annotations

import threading
from typing import Any

from numpy.typing import NDArray

from convgrad.errors import Internal
from convgrad_service.backends.cpu.arguments import ConvArgs, conv_args, view_of
from convgrad_service.backends.cpu.library import Library
from convgrad_service.backends.cpu.threads import Workers
from convgrad_service.plans.cpu_dense_parts import DensePlan, Part
from convgrad_service.problems.geometry import ConvShape

__all__ = ["bwd_data", "bwd_weight", "forward"]

Array = NDArray[Any]


def forward(
    library: Library,
    workers: Workers,
    plan: DensePlan,
    conv: ConvShape,
    input: Array,
    weight: Array,
    output: Array,
    *,
    bias: Array | None = None,
    cancelled: threading.Event | None = None,
) -> None:
    """Compute output = conv(input, weight) + bias, rounded once."""
    for part in plan.parts:
        groups, channels = slice(*part.groups), slice(*part.channels)
        args = conv_args(conv, input.dtype, output.dtype)
        args.groups, args.out_channels = _extent(part.groups), _extent(part.channels)
        args.x = view_of(input[:, groups], 3)
        args.w = view_of(weight[groups, channels], 3)
        args.y = view_of(output[:, groups, channels], 3)
        args.bias = view_of(None if bias is None else bias[groups, channels])
        _launch(library, workers, "dense_fwd", args, plan, part, cancelled)


def bwd_data(
    library: Library,
    workers: Workers,
    plan: DensePlan,
    conv: ConvShape,
    grad_output: Array,
    weight: Array,
    grad_input: Array,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    accumulate: Array | None = None,
    bias: Array | None = None,
    cancelled: threading.Event | None = None,
) -> None:
    """Compute grad_input = alpha * grad + beta * accumulate + bias, rounded once."""
    for part in plan.parts:
        groups, channels = slice(*part.groups), slice(*part.channels)
        args = conv_args(conv, grad_output.dtype, grad_input.dtype)
        args.groups, args.in_channels = _extent(part.groups), _extent(part.channels)
        args.x = view_of(grad_input[:, groups, channels], 3)
        args.w = view_of(weight[groups, :, channels], 3)
        args.y = view_of(grad_output[:, groups], 3)
        args.alpha = alpha
        if accumulate is not None:
            args.beta, args.accumulate = beta, view_of(accumulate[:, groups, channels], 3)
        args.bias = view_of(None if bias is None else bias[groups, channels])
        _launch(library, workers, "dense_bwd_data", args, plan, part, cancelled)


def bwd_weight(
    library: Library,
    workers: Workers,
    kernel: str,
    plan: DensePlan,
    conv: ConvShape,
    input: Array,
    grad_output: Array,
    grad_weight: Array,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    accumulate: Array | None = None,
    cancelled: threading.Event | None = None,
) -> None:
    """Compute grad_weight = alpha * grad + beta * accumulate, rounded once to its own dtype."""
    for part in plan.parts:
        groups, channels = slice(*part.groups), slice(*part.channels)
        args = conv_args(conv, input.dtype, grad_weight.dtype)
        args.groups, args.out_channels = _extent(part.groups), _extent(part.channels)
        args.x = view_of(input[:, groups], 3)
        args.w = view_of(grad_weight[groups, channels], 3)
        args.y = view_of(grad_output[:, groups, channels], 3)
        args.alpha = alpha
        if accumulate is not None:
            args.beta, args.accumulate = beta, view_of(accumulate[groups, channels], 3)
        _launch(library, workers, kernel, args, plan, part, cancelled)


def _extent(span: tuple[int, int]) -> int:
    return span[1] - span[0]


def _launch(
    library: Library,
    workers: Workers,
    kernel: str,
    args: ConvArgs,
    plan: DensePlan,
    part: Part,
    cancelled: threading.Event | None,
) -> None:
    tiles = part.tiles
    workspace = workers.workspaces.take(tiles.workspace_bytes)
    try:
        args.workspace, args.workspace_bytes = workspace.address, tiles.workspace_bytes
        args.scratch_bytes = tiles.scratch_bytes
        args.block[: len(tiles.block)] = tiles.block
        control = workers.launch(
            library.kernel(kernel),
            args,
            scratch_bytes=tiles.scratch_bytes,
            tasks=min(tiles.tasks, plan.threads),
            cancelled=cancelled,
        )
    finally:
        workers.workspaces.give(workspace)
    if control.error:
        raise Internal(f"{kernel} was given less work memory than its tiles {tiles.block} need")
