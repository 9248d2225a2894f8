"""Plans for a GPU, made without one: what runs, why not another kernel, and that buffers fit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from convgrad.dtypes import DType
from convgrad.errors import DeviceOutOfMemory, UnsupportedProblem
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.fallback.gather_tile import GatherTile
from convgrad_service.backends.cuda.kernels.fallback.weight_direct import WeightDirect
from convgrad_service.backends.cuda.kernels.fallback.weight_tile import WeightTile
from convgrad_service.plans.cuda.device import H200, CudaDevice
from convgrad_service.plans.cuda.families import choose
from convgrad_service.plans.cuda.planner import PLANNERS, plan_for
from convgrad_service.plans.cuda.program import (
    Fragment,
    Instance,
)
from convgrad_service.plans.cuda.splitting import parts_that_fit
from convgrad_service.plans.cuda.works import activation_operand, weight_operand
from convgrad_service.problems import PROBLEMS, Problem
from convgrad_service.problems.layouts import LAYOUTS, activation_view, weight_view
from tests.support.kernels.conv_work import ADA
from tests.support.kernels.cuda_backends import general
from tests.support.kernels.harness import with_layouts
from tests.support.kernels.plans import check_plan, large_problem_of, problem_of
from tests.support.numerics.arrays import DTYPES
from tests.support.numerics.cases import (
    EPILOGUES,
    FROM_CONV,
    FROM_CONV3D,
    FUSED,
    PASSES,
    Case,
    conv_cases,
    pool_cases,
)
from tests.support.numerics.classes import any_request
from tests.support.numerics.window_cases import OPERATIONS as WINDOWS
from tests.support.numerics.window_cases import window_cases

A100 = CudaDevice("A100", (8, 0), 108, 166912, 167936, 40 * 2**20, 80 * 10**9)
CASES = [
    *(case for op in (*FROM_CONV, *FROM_CONV3D) for case in conv_cases(op)),
    *(
        case
        for n in (1, 2, 3)
        for way in ("fwd", "bwd")
        for case in pool_cases(f"maxpool{n}d_{way}")
    ),
    *(case for op in WINDOWS for case in window_cases(op)),
    *FUSED,
    *EPILOGUES,
    *PASSES,
]


def problems(case: Case, dtype: str) -> Iterable[Problem]:
    layouts = [None] if "backprop" in case.operation else with_layouts(case.ndim, grouped=False)
    return [problem_of(case, dtype, layout) for layout in layouts]


def test_every_operations_problem_has_a_planner() -> None:
    made = {
        operation: type(problem_of(next(case for case in CASES if case.operation == operation)))
        for operation in PROBLEMS
    }
    assert set(made.values()) == set(PLANNERS)


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        *((H200, dtype) for dtype in DTYPES),
        *((A100, dtype) for dtype in ("bfloat16", "float32")),
        # The planner treats float16 as bfloat16; float64 has no kernels of one architecture.
        *(pytest.param(A100, dtype, marks=pytest.mark.slow) for dtype in ("float16", "float64")),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_every_case_has_a_plan(device: CudaDevice, dtype: str) -> None:
    for case in CASES:
        for problem in problems(case, dtype):
            check_plan(plan_for(problem, device, FAMILIES), problem, device)


@pytest.mark.parametrize("device", [H200, A100, ADA], ids=lambda device: device.name)
@pytest.mark.parametrize("draws", [40, pytest.param(2000, marks=pytest.mark.slow)])
def test_layers_of_any_size_have_a_plan(seed: int, device: CudaDevice, draws: int) -> None:
    rng = Random(f"{seed} {device.name}")
    for number in range(draws):
        case, dtype = any_request(rng), rng.choice(sorted(DTYPES))
        if dtype == "float32" and rng.random() < 0.5:
            case = case.with_params("high", precision="high")
        problem = large_problem_of(case, dtype, last=rng.random() < 0.5)
        try:
            check_plan(plan_for(problem, device, FAMILIES), problem, device)
        except Exception as error:
            error.add_note(f"seed {seed}, number {number}: {dtype} {case}")
            raise


@pytest.mark.parametrize("operation", PROBLEMS)
def test_plans_are_values(operation: str) -> None:
    problem = problem_of(next(case for case in CASES if case.operation == operation))
    assert plan_for(problem, H200, FAMILIES) == plan_for(problem, H200, FAMILIES)


def test_plans_say_why_kernels_were_passed_over() -> None:
    said = {
        name: reason
        for case in CASES
        for problem in problems(case, "bfloat16")
        for name, reason in plan_for(problem, H200, FAMILIES).passed_over
    }
    assert said
    assert all(reason.strip() and not reason.endswith(".") for reason in said.values())


class Refusing:
    """A family that takes nothing."""

    name = "refusing"

    def why_not(self, work: Any, device: CudaDevice) -> str | None:
        return "it is a test"

    def launches(self, work: Any, device: CudaDevice) -> Fragment:
        raise AssertionError("asked though it refused")

    def instances(self) -> Iterable[Instance]:
        return ()


def test_no_family_at_all_is_unsupported_with_each_reason() -> None:
    problem = problem_of(conv_cases("conv_fwd")[0])
    none = replace(FAMILIES, fwd=(Refusing(), Refusing()))
    with pytest.raises(UnsupportedProblem, match="refusing: it is a test; refusing: it is a test"):
        plan_for(problem, H200, none)


def test_a_refusing_family_is_passed_over_with_its_reason() -> None:
    problem = problem_of(conv_cases("conv_fwd")[0])
    before = replace(FAMILIES, fwd=(Refusing(), *FAMILIES.fwd))
    plan = plan_for(problem, H200, before)
    assert plan.passed_over[0] == ("refusing", "it is a test")
    assert plan.kernel == plan_for(problem, H200, FAMILIES).kernel


def test_choose_takes_the_first_that_applies() -> None:
    class Taking(Refusing):
        name = "taking"

        def why_not(self, work: Any, device: CudaDevice) -> str | None:
            return None

        def launches(self, work: Any, device: CudaDevice) -> Fragment:
            return Fragment("taking", ())

    chosen = choose([Refusing(), Taking(), Refusing()], Any, H200)  # type: ignore[type-var]
    assert chosen.fragment.kernel == "taking"
    assert chosen.passed_over == (("refusing", "it is a test"),)


@pytest.mark.parametrize("name", LAYOUTS)
def test_strides_are_those_of_the_views(name: str) -> None:
    layout, groups = LAYOUTS[name], 3
    sizes = dict(zip("NGCDHWKTRS", (2, groups, 4, 5, 6, 7, 5, 2, 3, 4), strict=True))
    if not layout.grouped:
        sizes["C"] *= groups
    for view, operand, letters, padded in (
        (activation_view, activation_operand, layout.activation, (2, 3)),
        (weight_view, weight_operand, layout.weight, (2, 3)),
    ):
        extents = dict(sizes)
        if letters == layout.weight and not layout.grouped:
            extents |= {"K": sizes["K"] * groups, "C": 4}
        array = np.zeros([extents[letter] for letter in letters], np.float32)
        strides = [stride // 4 for stride in view(array, layout, groups).strides]
        lead, spatial = strides[:3], strides[3:]
        made = operand("x", DType.FLOAT32, layout, array.shape, groups)
        assert made.strides == (*lead, *[0] * (padded[1] - len(spatial)), *spatial)


def test_pieces_are_as_few_as_fit() -> None:
    problem = problem_of(conv_cases("conv_fwd")[0])
    needed = lambda part: part.memory_bytes  # noqa: E731
    whole = problem.memory_bytes
    assert parts_that_fit(problem, whole, needed) == 1
    parts = parts_that_fit(problem, whole - 1, needed)
    assert parts > 1
    assert all(piece.problem.memory_bytes < whole for piece in problem.split(parts))
    with pytest.raises(DeviceOutOfMemory, match=r"expected at most 10"):
        parts_that_fit(problem, 10, needed)


def test_what_is_compiled_for_hopper_runs_on_no_other() -> None:
    hopper = Instance("a.cu", "a", (), ("sm_90a",))
    assert hopper.runs_on(H200)
    assert not hopper.runs_on(A100)


@pytest.mark.parametrize("weight", [WeightTile(), WeightDirect()], ids=lambda one: one.name)
def test_split_k_is_what_was_asked_for(weight: Any) -> None:
    """The workspace has one sum in float32 for each range of pixels and weight element."""
    case = next(c for c in conv_cases("grouped_conv_bwd_weight") if c.name == "plain")
    for split in (1, 2, 7):
        problem = problem_of(case.with_params("s", split_k=split))
        plan = plan_for(problem, H200, general(GatherTile(), weight))
        sizes = {item.name: item.size_bytes for item in plan.workspace}
        elements = problem.outputs["grad_weight"].elements
        assert sizes.get("partials", 0) == (0 if split == 1 else split * elements * 4)
