"""Plans of poolings and of max unpooling."""

from __future__ import annotations

from math import prod
from typing import Any

from convgrad.dtypes import DType
from convgrad_service.plans.cuda.assembly import sequential_plan
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Chosen, Families, choose
from convgrad_service.plans.cuda.program import CudaPlan, Workspace
from convgrad_service.plans.cuda.works import (
    PoolWork,
    UnpoolWork,
    WindowWork,
    activation_operand,
)
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
from convgrad_service.problems.windows import WindowAxis

__all__ = ["plan_average", "plan_max_backward", "plan_max_forward", "plan_unpool"]
__all__ += ["sliding_windows"]

MaxPool = MaxPoolFwd | MaxPoolBwd | AdaptiveMaxPoolFwd | AdaptiveMaxPoolBwd


def plan_average(
    problem: AvgPoolFwd | AvgPoolBwd, device: CudaDevice, families: Families
) -> CudaPlan:
    """Plan an average pooling, adaptive or not, or its gradient."""
    backward = isinstance(problem, AvgPoolBwd)
    work = WindowWork(
        kind="sums",
        **_planes(problem),
        windows=_transposed(problem.windows) if backward else problem.windows,
        x="grad_output" if backward else "input",
        y="grad_input" if backward else "output",
        counted=problem.counted,
        by="inputs" if backward else "outputs",
        divisor=problem.divisor,
    )
    return sequential_plan([choose(families.windows, work, device)])


def plan_max_forward(
    problem: MaxPoolFwd | AdaptiveMaxPoolFwd, device: CudaDevice, families: Families
) -> CudaPlan:
    """Plan a max pooling, adaptive or not."""
    work = WindowWork(
        kind="maxima",
        **_windows(problem),
        x="input",
        y="output",
        indices="indices" if problem.return_indices else None,
        index_dtype=problem.index_dtype,
    )
    return sequential_plan([choose(families.windows, work, device)])


def plan_max_backward(
    problem: MaxPoolBwd | AdaptiveMaxPoolBwd, device: CudaDevice, families: Families
) -> CudaPlan:
    """Plan a max pooling's gradient. From the input of an adaptive one, it first computes indices
    in a workspace."""
    given, chosen, workspace = problem.index_dtype, list[Chosen](), list[Workspace]()
    if given is None and isinstance(problem, MaxPoolBwd):
        return sequential_plan([choose(families.pool_bwd, _from_input(problem), device)])
    windows = _windows(problem)
    indices, index_dtype = "indices", given
    if index_dtype is None:
        positions = prod(axis.input for axis in windows["windows"])
        indices, index_dtype = "maxima", DType.INT32 if positions <= 2**31 else DType.INT64
        elements = problem.inputs["grad_output"].elements
        workspace.append(Workspace(indices, elements * index_dtype.itemsize))
        found = WindowWork(
            kind="maxima", **windows, x="input", y=None, indices=indices, index_dtype=index_dtype
        )
        chosen.append(choose(families.windows, found, device))
    routed = WindowWork(
        kind="routes",
        **windows | {"windows": _transposed(windows["windows"])},
        x="grad_output",
        y="grad_input",
        indices=indices,
        index_dtype=index_dtype,
        counted=windows["windows"],
        checked=given is not None,
    )
    chosen.append(choose(families.windows, routed, device))
    return sequential_plan(chosen, workspace)


def plan_unpool(
    problem: MaxUnpoolFwd | MaxUnpoolBwd, device: CudaDevice, families: Families
) -> CudaPlan:
    """Plan a max unpooling or its gradient."""
    forward = isinstance(problem, MaxUnpoolFwd)
    work = UnpoolWork(
        kind="scatter" if forward else "gather",
        **_planes(problem),
        size=problem.input_size,
        plane=problem.output_size,
        index_dtype=problem.index_dtype,
        x="input" if forward else "grad_output",
        y="output" if forward else "grad_input",
        windows=problem.windows if isinstance(problem, MaxUnpoolFwd) else None,
    )
    return sequential_plan([choose(families.unpool, work, device)])


def sliding_windows(pool: PoolShape) -> tuple[WindowAxis, ...]:
    """Return the windows of a max pooling, with a dilation also what is between the taps."""
    befores = [before for before, _ in pool.padding]
    reach = [
        (taps - 1) * step + 1 for taps, step in zip(pool.kernel_size, pool.dilation, strict=True)
    ]
    sides = pool.input_size, pool.output_size, reach, pool.stride, befores
    return tuple(map(WindowAxis.sliding, *sides))


def _from_input(problem: MaxPoolBwd) -> PoolWork:
    operands = {
        name: activation_operand(name, spec.dtype, problem.layout, spec.shape, 1)
        for name, spec in (*problem.inputs.items(), *problem.outputs.items())
    }
    return PoolWork(
        pool=problem.pool,
        dtype=problem.dtype,
        source=operands["input"],
        x=operands["grad_input"],
        y=operands["grad_output"],
    )


def _windows(problem: MaxPool) -> dict[str, Any]:
    """Return the fields of a piece of work that describe a max pooling's planes and windows."""
    planes = _planes(problem)
    if isinstance(problem, AdaptiveMaxPoolFwd | AdaptiveMaxPoolBwd):
        return planes | {"windows": problem.windows}
    return planes | {"windows": sliding_windows(problem.pool), "dilation": problem.pool.dilation}


def _planes(problem: PlaneProblem | MaxPoolFwd | MaxPoolBwd) -> dict[str, Any]:
    """Return the fields of a piece of work that describe its planes."""
    sizes = problem if isinstance(problem, PlaneProblem) else problem.pool
    return {
        "batch": sizes.batch,
        "channels": sizes.channels,
        "channels_last": problem.layout.channels_last,
        "dtype": problem.dtype,
    }


def _transposed(windows: tuple[WindowAxis, ...]) -> tuple[WindowAxis, ...]:
    return tuple(axis.transposed() for axis in windows)
