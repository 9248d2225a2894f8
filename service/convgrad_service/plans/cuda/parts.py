"""What planners put plans together from: pieces of work, chosen and joined."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

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
from convgrad_service.plans.cuda.sharing import taken_out
from convgrad_service.plans.cuda.works import ConvWork, activation_operand, weight_operand
from convgrad_service.problems import Problem
from convgrad_service.problems.convolution import ConvProblem

__all__ = ["choose_conv", "conv_work", "put_together", "side_by_side"]


def put_together(chosen: Iterable[Chosen], more: Iterable[Workspace] = ()) -> CudaPlan:
    """One plan of several pieces of work, one after another."""
    return _plan_of([(part, part.fragment) for part in chosen], (), more)


def side_by_side(
    branches: Sequence[Sequence[Chosen]], problem: Problem, more: Iterable[Workspace] = ()
) -> CudaPlan:
    """One plan of branches that need nothing of each other, each of pieces of work one after
    another; what they make alike of the inputs goes first."""
    parts = [part for branch in branches for part in branch]
    first, fragments = taken_out([part.fragment for part in parts], problem.inputs)
    plan = _plan_of(list(zip(parts, fragments, strict=True)), first, more)
    left = iter(fragments)
    lengths = [sum(len(next(left).steps) for _ in branch) for branch in branches]
    starts = accumulate(lengths[:-1], initial=len(first))
    return replace(plan, branches=tuple(starts)) if len(branches) > 1 else plan


def _plan_of(
    parts: Sequence[tuple[Chosen, Fragment]], first: tuple[Step, ...], more: Iterable[Workspace]
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
        (*first, *(step for one in fragments for step in one.steps)),
        workspace,
        tuple(check for one in fragments for check in one.checks),
        orders=tuple(f"{part.family} {part.fragment.order}".strip() for part, _ in parts),
        expected_s=sum(expected) if len(expected) == len(fragments) else None,
    )


def conv_work(
    problem: ConvProblem, direction: Any, x: str, w: str, y: str, **more: Any
) -> ConvWork:
    """A convolution on the problem's tensors, by the names of their buffers."""
    layout, groups = problem.layout, problem.conv.groups
    result = more.pop("result_dtype", problem.dtype)
    of_w = result if direction == "bwd_weight" else problem.dtype
    return ConvWork(
        direction=direction,
        conv=problem.conv,
        dtype=problem.dtype,
        result_dtype=result,
        x=activation_operand(x, problem.dtype, layout, problem.input_spec.shape, groups),
        w=weight_operand(w, of_w, layout, problem.weight_spec.shape, groups),
        y=activation_operand(y, problem.dtype, layout, problem.output_spec.shape, groups),
        precision=problem.precision,
        deterministic=problem.deterministic,
        **more,
    )


def choose_conv(work: ConvWork, device: CudaDevice, families: Families) -> Chosen:
    """The first family of its direction that takes it."""
    return choose(families.of(work), work, device)
