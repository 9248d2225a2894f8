"""The work of poolings and max unpooling. Max pooling's gradient from its input is `planner`'s."""

from __future__ import annotations

from math import prod
from typing import Any

from convgrad.dtypes import DType
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Chosen, Families, choose
from convgrad_service.plans.cuda.program import Workspace
from convgrad_service.plans.cuda.works import UnpoolWork, WindowWork
from convgrad_service.problems import (
    AdaptiveMaxPoolBwd,
    AdaptiveMaxPoolFwd,
    AvgPoolBwd,
    AvgPoolFwd,
    MaxPoolBwd,
    MaxPoolFwd,
    MaxUnpoolBwd,
    MaxUnpoolFwd,
)
from convgrad_service.problems.geometry import PoolShape
from convgrad_service.problems.planes import PlaneProblem
from convgrad_service.problems.sizes import Size
from convgrad_service.problems.windows import WindowAxis

__all__ = ["adaptive_max_backward", "adaptive_max_forward", "average_backward", "average_forward"]
__all__ += ["max_backward_from_indices", "max_forward", "sliding_windows", "unpool_backward"]
__all__ += ["unpool_forward"]

Sequential = tuple[list[Chosen], list[Workspace]]
"""Pieces of work that run one after another, and the workspace between them."""


def average_forward(problem: AvgPoolFwd, device: CudaDevice, families: Families) -> Sequential:
    """avg_pool_fwd and adaptive_avg_pool_fwd."""
    work = WindowWork(
        kind="sums",
        **_planes(problem),
        windows=problem.windows,
        x="input",
        y="output",
        counted=problem.counted,
        by="outputs",
        divisor=problem.divisor,
    )
    return [choose(families.windows, work, device)], []


def average_backward(problem: AvgPoolBwd, device: CudaDevice, families: Families) -> Sequential:
    """avg_pool_bwd and adaptive_avg_pool_bwd."""
    work = WindowWork(
        kind="sums",
        **_planes(problem),
        windows=tuple(axis.transposed() for axis in problem.windows),
        x="grad_output",
        y="grad_input",
        counted=problem.counted,
        by="inputs",
        divisor=problem.divisor,
    )
    return [choose(families.windows, work, device)], []


def adaptive_max_forward(
    problem: AdaptiveMaxPoolFwd, device: CudaDevice, families: Families
) -> Sequential:
    """adaptive_max_pool_fwd."""
    work = WindowWork(
        kind="maxima",
        **_planes(problem),
        windows=problem.windows,
        x="input",
        y="output",
        indices="indices" if problem.return_indices else None,
        index_dtype=problem.index_dtype,
    )
    return [choose(families.windows, work, device)], []


def adaptive_max_backward(
    problem: AdaptiveMaxPoolBwd, device: CudaDevice, families: Families
) -> Sequential:
    """adaptive_max_pool_bwd; from an input, it computes indices in a workspace first."""
    planes, chosen, workspace = _planes(problem), [], []
    indices, index_dtype = "indices", problem.index_dtype
    if index_dtype is None:
        spec = problem.inputs["grad_output"]
        indices, index_dtype = "maxima", _index_dtype(problem.input_size)
        workspace.append(Workspace(indices, spec.elements * index_dtype.itemsize))
        found = WindowWork(
            kind="maxima",
            **planes,
            windows=problem.windows,
            x="input",
            y=None,
            indices=indices,
            index_dtype=index_dtype,
        )
        chosen.append(choose(families.windows, found, device))
    routed = WindowWork(
        kind="routes",
        **planes,
        windows=tuple(axis.transposed() for axis in problem.windows),
        x="grad_output",
        y="grad_input",
        indices=indices,
        index_dtype=index_dtype,
        counted=problem.windows,
        checked=problem.index_dtype is not None,
    )
    chosen.append(choose(families.windows, routed, device))
    return chosen, workspace


def max_forward(problem: MaxPoolFwd, device: CudaDevice, families: Families) -> Chosen:
    """maxpool1d_fwd to maxpool3d_fwd."""
    pool = problem.pool
    work = WindowWork(
        kind="maxima",
        batch=pool.batch,
        channels=pool.channels,
        channels_last=problem.layout.channels_last,
        dtype=problem.dtype,
        windows=sliding_windows(pool),
        dilation=pool.dilation,
        x="input",
        y="output",
        indices="indices" if problem.return_indices else None,
        index_dtype=problem.index_dtype,
    )
    return choose(families.windows, work, device)


def sliding_windows(pool: PoolShape) -> tuple[WindowAxis, ...]:
    """Return the windows of a max pooling, with a dilation also what is between the taps."""
    befores = [before for before, _ in pool.padding]
    reach = [
        (taps - 1) * step + 1 for taps, step in zip(pool.kernel_size, pool.dilation, strict=True)
    ]
    sides = pool.input_size, pool.output_size, reach, pool.stride, befores
    return tuple(map(WindowAxis.sliding, *sides))


def max_backward_from_indices(
    problem: MaxPoolBwd, device: CudaDevice, families: Families
) -> Chosen:
    """maxpool1d_bwd to maxpool3d_bwd, from indices."""
    pool = problem.pool
    windows = sliding_windows(pool)
    work = WindowWork(
        kind="routes",
        batch=pool.batch,
        channels=pool.channels,
        channels_last=problem.layout.channels_last,
        dtype=problem.dtype,
        windows=tuple(axis.transposed() for axis in windows),
        x="grad_output",
        y="grad_input",
        indices="indices",
        index_dtype=problem.index_dtype or DType.INT64,
        counted=windows,
        checked=True,
        dilation=pool.dilation,
    )
    return choose(families.windows, work, device)


def unpool_forward(problem: MaxUnpoolFwd, device: CudaDevice, families: Families) -> Sequential:
    """max_unpool_fwd."""
    work = UnpoolWork(
        kind="scatter",
        **_planes(problem),
        size=problem.input_size,
        plane=problem.output_size,
        index_dtype=problem.index_dtype,
        x="input",
        y="output",
        windows=problem.windows,
    )
    return [choose(families.unpool, work, device)], []


def unpool_backward(problem: MaxUnpoolBwd, device: CudaDevice, families: Families) -> Sequential:
    """max_unpool_bwd."""
    work = UnpoolWork(
        kind="gather",
        **_planes(problem),
        size=problem.input_size,
        plane=problem.output_size,
        index_dtype=problem.index_dtype,
        x="grad_output",
        y="grad_input",
    )
    return [choose(families.unpool, work, device)], []


def _index_dtype(size: Size) -> DType:
    """Return the narrowest type that indexes a plane of this size."""
    return DType.INT32 if prod(size) <= 2**31 else DType.INT64


def _planes(problem: PlaneProblem) -> dict[str, Any]:
    """Return the fields of a piece of work that describe its planes."""
    return {
        "batch": problem.batch,
        "channels": problem.channels,
        "channels_last": problem.layout.channels_last,
        "dtype": problem.dtype,
    }
