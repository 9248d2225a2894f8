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
from tests.support.kernels.plans import check_plan


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


@pytest.mark.parametrize("channels", [36, 100])
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("size", [14, 56])
def test_copies_of_the_intermediate_wait_for_it(channels: int, kernel: int, size: int) -> None:
    """Channels of the intermediate that are not whole chunks are copied for some families."""
    first = conv(8, 64, channels, (size, size), 3, 1, 1, 1)
    second = conv(8, channels, 128, first.output_size, kernel, 1, 1, kernel // 2)
    problem = fused(first, second)
    check_plan(plan(problem), problem, H200)


def test_float32_is_two_launches() -> None:
    check_two(plan(separable(32, 32, dtype=DType.FLOAT32)), "float32")


def test_other_architectures_compute_two_launches() -> None:
    check_two(plan(separable(32, 32), AMPERE), "no wgmma")
