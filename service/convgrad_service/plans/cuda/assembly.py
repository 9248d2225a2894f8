"""Assembling plans from the launches chosen for each piece of work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from convgrad_service.plans.cuda.common_launches import hoist_common_launches
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Chosen, Families, choose
from convgrad_service.plans.cuda.program import (
    ALIGNMENT,
    CudaPlan,
    Fragment,
    Step,
    Workspace,
    ceil_div,
)
from convgrad_service.plans.cuda.works import (
    ConvWork,
    Operand,
    activation_operand,
    weight_operand,
)
from convgrad_service.problems import Epilogue, Problem
from convgrad_service.problems.convolution import ConvProblem
from convgrad_service.problems.geometry import ConvShape

__all__ = ["choose_conv", "concurrent_plan", "conv_work", "sequential_plan", "work_on"]


def sequential_plan(chosen: Iterable[Chosen], more: Iterable[Workspace] = ()) -> CudaPlan:
    """Return a plan that runs several pieces of work one after another.

    ``more`` is workspace beside the fragments' own.
    """
    return _plan_of([(part, part.fragment) for part in chosen], (), more)


def concurrent_plan(
    branches: Sequence[Sequence[Chosen]], problem: Problem, more: Iterable[Workspace] = ()
) -> CudaPlan:
    """Return a plan of independent branches, each a sequence of pieces of work.

    Launches that the branches have in common run first, once.
    """
    parts = [part for branch in branches for part in branch]
    common, fragments = hoist_common_launches([part.fragment for part in parts], problem.inputs)
    plan = _plan_of(list(zip(parts, fragments, strict=True)), common, more)
    left = iter(fragments)
    lengths = [sum(len(next(left).steps) for _ in branch) for branch in branches]
    starts = accumulate(lengths[:-1], initial=len(common))
    return replace(plan, branches=tuple(starts)) if len(branches) > 1 else plan


def _plan_of(
    parts: Sequence[tuple[Chosen, Fragment]], common: tuple[Step, ...], more: Iterable[Workspace]
) -> CudaPlan:
    fragments = [fragment for _, fragment in parts]
    workspace = (*more, *(item for one in fragments for item in one.workspace))
    passed_over: dict[tuple[str, str], None] = {}
    for part, _ in parts:
        passed_over |= dict.fromkeys(part.passed_over)
    expected = [one.expected_s for one in fragments if one.expected_s is not None]
    return CudaPlan(
        " + ".join(one.kernel for one in fragments),
        sum(ceil_div(w.size_bytes, ALIGNMENT) * ALIGNMENT for w in workspace),
        1,
        tuple(passed_over),
        (*common, *(step for one in fragments for step in one.steps)),
        workspace,
        tuple(check for one in fragments for check in one.checks),
        orders=tuple(f"{part.family} {part.fragment.order}".strip() for part, _ in parts),
        expected_s=sum(expected) if len(expected) == len(fragments) else None,
    )


def conv_work(
    problem: ConvProblem,
    direction: Any,
    x: str,
    w: str,
    y: str,
    *,
    epilogue: Epilogue | None = None,
    **more: Any,
) -> ConvWork:
    """Return a convolution on the problem's tensors; ``x``, ``w`` and ``y`` name their buffers.

    With an ``epilogue``, the buffer "accumulate" is like the result.
    """
    dtype, layout, groups = problem.dtype, problem.layout, problem.conv.groups
    weight_dtype = more.get("result_dtype", dtype) if direction == "bwd_weight" else dtype
    work = work_on(
        problem,
        direction,
        problem.conv,
        activation_operand(x, dtype, layout, problem.input_spec.shape, groups),
        weight_operand(w, weight_dtype, layout, problem.weight_spec.shape, groups),
        activation_operand(y, dtype, layout, problem.output_spec.shape, groups),
        **more,
    )
    if epilogue is None:
        return work
    if not epilogue.accumulate:
        return replace(work, alpha=epilogue.alpha)
    accumulate = replace(work.result, buffer="accumulate")
    return replace(work, alpha=epilogue.alpha, beta=epilogue.beta, accumulate=accumulate)


def work_on(
    problem: Any, direction: Any, conv: ConvShape, x: Operand, w: Operand, y: Operand, **more: Any
) -> ConvWork:
    """Return a convolution of these operands in the type and precision of a problem."""
    fields = {name: getattr(problem, name) for name in ("dtype", "precision", "deterministic")}
    fields |= {"result_dtype": problem.dtype, **more}
    return ConvWork(direction=direction, conv=conv, x=x, w=w, y=y, **fields)


def choose_conv(work: ConvWork, device: CudaDevice, families: Families) -> Chosen:
    """Choose among the families of the convolution's direction."""
    return choose(families.of(work), work, device)
