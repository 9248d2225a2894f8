"""Plans of two convolutions in one forward that are two launches; those that are one:
backends/cuda/kernels/fused/test_hopper_separable.py."""

from __future__ import annotations

import pytest

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.plans.cuda.device import H200, CudaDevice
from convgrad_service.plans.cuda.planner import plan_for
from convgrad_service.plans.cuda.program import CudaPlan, Launch
from convgrad_service.problems import Problem
from convgrad_service.problems.geometry import ConvShape
from tests.support.kernels.fused_problems import AMPERE, conv, fused, separable


def plan(problem: Problem, device: CudaDevice = H200) -> CudaPlan:
    return plan_for(problem, device, FAMILIES)


def check_two(made: CudaPlan, said: str) -> None:
    """Two kernels around the intermediate, and why not one."""
    assert said in dict(made.passed_over)["hopper_separable"]
    assert len([step for step in made.steps if isinstance(step, Launch)]) > 1
    assert [workspace.name for workspace in made.workspace][:1] == ["fused.intermediate"]


def test_a_second_convolution_with_taps_is_not_fused() -> None:
    first = conv(2, 32, 32, (14, 14), 3, 1, 32, 1)
    made = plan(fused(first, conv(2, 32, 32, first.output_size, 3)))
    check_two(made, "second convolution is not 1x1")


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (conv(2, 32, 32, (14, 14), 3, 1, 4, 1), "not depthwise"),
        (conv(2, 36, 36, (14, 14), 3, 1, 36, 1), "contiguous"),
        (conv(2, 32, 64, (14, 14), 3, 1, 32, 1), "not depthwise"),
    ],
)
def test_other_first_convolutions_are_two_launches(first: ConvShape, said: str) -> None:
    check_two(plan(fused(first, conv(2, first.out_channels, 32, first.output_size))), said)


def test_float32_is_two_launches() -> None:
    check_two(plan(separable(32, 32, dtype=DType.FLOAT32)), "float32")


def test_other_architectures_compute_two_launches() -> None:
    check_two(plan(separable(32, 32), AMPERE), "no wgmma")
