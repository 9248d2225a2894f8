"""Plans of average pooling, adaptive pooling and max unpooling: pieces of work on whole planes."""

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

__all__ = [
    "adaptive_max_backward",
    "adaptive_max_forward",
    "average_backward",
    "average_forward",
    "max_backward_from_indices",
    "max_forward",
    "unpool_backward",
    "unpool_forward",
]

Parts = tuple[list[Chosen], list[Workspace]]
"""What a problem's work is done by, one after another, and the memory between them."""


def average_forward(problem: AvgPoolFwd, device: CudaDevice, families: Families) -> Parts:
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


def average_backward(problem: AvgPoolBwd, device: CudaDevice, families: Families) -> Parts:
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
) -> Parts:
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
) -> Parts:
    """adaptive_max_pool_bwd: from the input by way of indices in a workspace."""
    planes, chosen, workspace = _planes(problem), [], []
    indices, index_dtype = "indices", problem.index_dtype
    if index_dtype is None:
        spec = problem.inputs["grad_output"]
        indices, index_dtype = "maxima", _index_of(problem.input_size)
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
    """maxpool1d_fwd to maxpool3d_fwd of windows that are not dilated."""
    pool = problem.pool
    work = WindowWork(
        kind="maxima",
        batch=pool.batch,
        channels=pool.channels,
        channels_last=problem.layout.channels_last,
        dtype=problem.dtype,
        windows=_sliding(pool),
        x="input",
        y="output",
        indices="indices" if problem.return_indices else None,
        index_dtype=problem.index_dtype,
    )
    return choose(families.windows, work, device)


def _sliding(pool: PoolShape) -> tuple[WindowAxis, ...]:
    """The windows of a max pooling that are not dilated."""
    befores = [before for before, _ in pool.padding]
    sides = pool.input_size, pool.output_size, pool.kernel_size, pool.stride, befores
    return tuple(map(WindowAxis.sliding, *sides))


def max_backward_from_indices(
    problem: MaxPoolBwd, device: CudaDevice, families: Families
) -> Chosen:
    """maxpool1d_bwd to maxpool3d_bwd of windows that are not dilated, from indices."""
    pool = problem.pool
    windows = _sliding(pool)
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
    )
    return choose(families.windows, work, device)


def unpool_forward(problem: MaxUnpoolFwd, device: CudaDevice, families: Families) -> Parts:
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


def unpool_backward(problem: MaxUnpoolBwd, device: CudaDevice, families: Families) -> Parts:
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


def _index_of(size: Size) -> DType:
    """The narrower type that counts a plane's positions."""
    return DType.INT32 if prod(size) <= 2**31 else DType.INT64


def _planes(problem: PlaneProblem) -> dict[str, Any]:
    """The fields of a work that say how its planes lie."""
    return {
        "batch": problem.batch,
        "channels": problem.channels,
        "channels_last": problem.layout.channels_last,
        "dtype": problem.dtype,
    }
