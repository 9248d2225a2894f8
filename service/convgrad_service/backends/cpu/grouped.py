"""Grouped convolutions with few channels per group: kernels/grouped*.cpp, depthwise*.cpp.

All functions take canonical views of any strides: activations (N, G, C/G, *spatial), weights
(G, K/G, C/G, *kernel), bias (G, K/G) or, for bwd_data, (G, C/G). They return the bytes of workspace
used. `convgrad_service.plans.cpu.choose` tells whether the padded planes fit the scratch limit.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from convgrad.dtypes import DType
from convgrad.errors import Internal
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
from convgrad_service.plans.cpu_depthwise import depthwise_tiles
from convgrad_service.plans.cpu_device import sum_bytes
from convgrad_service.plans.planar import (
    PLANS_KEPT,
    bwd_data_plan,
    bwd_weight_plan,
    forward_plan,
    triple,
)
from convgrad_service.problems.geometry import ConvShape

__all__ = ["bwd_data", "bwd_weight", "channels_last", "forward"]

Array = NDArray[Any]
Direction = Literal["fwd", "bwd_data", "bwd_weight"]
# The depthwise kernels, whose lanes are groups, run only if groups fill at least 1/LEAST_FILLED of
# a vector. The lanes of the grouped kernels are positions.
LEAST_FILLED = 4
PLANNED = {"fwd": forward_plan, "bwd_data": bwd_data_plan, "bwd_weight": bwd_weight_plan}


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
) -> int:
    """Compute output = activation(conv(input, weight) + bias), rounded once."""
    swap = channels_last(input, output)
    prepared = _prepared("fwd", conv, dtype, library.vector_bytes, swap, _taps_of(weight))
    args = prepared.args()
    args.src, args.dst, args.weight = view_of(input, 3), view_of(output, 3), view_of(weight)
    args.bias = view_of(bias)
    args.activation = ACTIVATION_CODES[activation]
    return _launch(library, workers, prepared, args, cancelled)


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
) -> int:
    """Compute grad_input = alpha * grad + beta * accumulate + bias, rounded once."""
    swap = channels_last(grad_output, grad_input)
    prepared = _prepared("bwd_data", conv, dtype, library.vector_bytes, swap, _taps_of(weight))
    args = prepared.args()
    args.src, args.dst = view_of(grad_output, 3), view_of(grad_input, 3)
    args.weight = view_of(weight)
    # The roles of input and output channels are exchanged: this sums over output channels.
    args.weight.stride[1], args.weight.stride[2] = args.weight.stride[2], args.weight.stride[1]
    args.alpha, args.beta = alpha, 0.0 if accumulate is None else beta
    args.accumulate, args.bias = view_of(accumulate, 3), view_of(bias)
    return _launch(library, workers, prepared, args, cancelled)


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
) -> int:
    """Compute grad_weight = alpha * grad + beta * accumulate, rounded once."""
    swap, taps = channels_last(input, grad_output), _taps_of(grad_weight)
    prepared = _prepared("bwd_weight", conv, dtype, library.vector_bytes, swap, taps)
    args = prepared.args()
    args.src, args.dst = view_of(input, 3), view_of(grad_output, 3)
    args.weight = view_of(grad_weight)
    args.alpha, args.beta = alpha, 0.0 if accumulate is None else beta
    if accumulate is not None and accumulate.strides != grad_weight.strides:
        # The kernel requires equal strides, and the weight is small enough to copy.
        same = np.empty_like(grad_weight)
        same[...] = accumulate
        accumulate = same
    args.accumulate = view_of(accumulate)
    args.result_dtype = CODE_OF[grad_weight.dtype]
    return _launch(library, workers, prepared, args, cancelled)


def channels_last(*activations: Array) -> bool:
    """Whether channels of one are contiguous and its columns are not: blocks are transposed."""
    return any(map(_swaps, activations))


def _swaps(activation: Array) -> bool:
    size = activation.itemsize
    _, groups, channels, *_ = activation.shape
    adjacent = channels == 1 or activation.strides[2] == size
    adjacent &= groups == 1 or activation.strides[1] == channels * size
    return adjacent and groups * channels > 1 and activation.strides[-1] != size


def _taps_of(weight: Array) -> tuple[int, ...]:
    """Return the strides of a weight's spatial dimensions, in elements."""
    return tuple(stride // weight.itemsize for stride in weight.strides[3:])


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The state shared by all launches of a problem: arguments without tensors, and tables."""

    template: PlanarArgs
    kernel: str
    tasks: int
    scratch_bytes: int
    workspace_bytes: int

    def args(self) -> PlanarArgs:
        """Return a copy for one launch."""
        args = PlanarArgs.from_buffer_copy(self.template)
        args.keeps = self.template.keeps
        return args


@lru_cache(maxsize=PLANS_KEPT)
def _prepared(
    direction: Direction,
    conv: ConvShape,
    dtype: DType,
    vector_bytes: int,
    swap: bool,
    strides: tuple[int, ...],
) -> _Prepared:
    lanes = vector_bytes // sum_bytes(dtype)
    plan = PLANNED[direction](conv, sum_bytes(dtype), lanes, swap)
    if plan is None:
        raise Internal("the grouped kernels were chosen for planes that do not fit")
    args = PlanarArgs()
    fill(args, plan, tap_table(plan, triple(conv.kernel_size, 1), triple(strides, 0)))
    args.batch, args.groups = conv.batch, conv.groups
    args.alpha, args.beta = 1.0, 0.0
    args.dtype = args.result_dtype = DTYPE_CODES[dtype]
    channels = conv.in_channels_per_group, conv.out_channels_per_group
    args.src_channels, args.dst_channels = channels[::-1] if direction == "bwd_data" else channels
    kernel = "bwd_weight" if direction == "bwd_weight" else "correlate"
    tiles = None
    if channels == (1, 1) and conv.groups * LEAST_FILLED >= lanes:
        weight = direction == "bwd_weight"
        tiles = depthwise_tiles(plan, conv.batch, conv.groups, vector_bytes, lanes, weight=weight)
    if tiles is None:
        sizes = plan.tasks, plan.scratch_bytes, plan.workspace_bytes
        return _Prepared(args, f"grouped_{kernel}", *sizes)
    args.tile[:], args.tiles[:] = tiles.tile, tiles.tiles
    args.group_block, args.splits = tiles.group_block, tiles.splits
    sizes = tiles.tasks, tiles.scratch_bytes, tiles.workspace_bytes
    return _Prepared(args, f"depthwise_{kernel}", *sizes)


def _launch(
    library: Library,
    workers: Workers,
    prepared: _Prepared,
    args: PlanarArgs,
    cancelled: threading.Event | None,
) -> int:
    workspace = workers.workspaces.take(prepared.workspace_bytes)
    try:
        args.workspace = workspace.address
        workers.launch(
            library.kernel(prepared.kernel),
            args,
            scratch_bytes=prepared.scratch_bytes,
            tasks=prepared.tasks,
            cancelled=cancelled,
        )
    finally:
        workers.workspaces.give(workspace)
    return prepared.workspace_bytes + prepared.scratch_bytes * workers.threads
