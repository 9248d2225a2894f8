"""Plans of the fused forward by Hopper's own kernel: what it takes, and how it is laid out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.fused.hopper_separable import (
    TILES,
    HopperSeparable,
    SeparableTile,
)
from convgrad_service.plans.cuda.device import H200, CudaDevice
from convgrad_service.plans.cuda.planner import plan_for
from convgrad_service.plans.cuda.program import CudaPlan, Launch
from convgrad_service.problems import Problem
from tests.support.kernels.fused_problems import separable

LAYERS = [
    (32, 64, 112, 1),
    (64, 128, 112, 2),
    (256, 256, 28, 1),
    (512, 256, 14, 1),
    (728, 256, 19, 1),
    (128, 128, 56, 1),
    (128, 256, 56, 2),
    (64, 64, 7, 1),
]


def plan(problem: Problem, device: CudaDevice = H200) -> CudaPlan:
    return plan_for(problem, device, FAMILIES)


def why_not(problem: Problem, device: CudaDevice = H200) -> str:
    return dict(plan(problem, device).passed_over)["hopper_separable"]


@pytest.mark.parametrize(("channels", "outputs", "size", "stride"), LAYERS)
def test_one_launch_computes_both(channels: int, outputs: int, size: int, stride: int) -> None:
    made = plan(separable(channels, outputs, (size, size), stride=stride))
    assert made.kernel.startswith("hopper_separable")
    [step] = made.steps
    assert isinstance(step, Launch)
    assert step.shared_bytes <= H200.shared_bytes_per_block
    assert step.instance in list(HopperSeparable().instances())
    assert step.grid[0] <= H200.multiprocessors


def test_many_outputs_are_two_launches() -> None:
    assert "512 outputs" in why_not(separable(512, 512))
    made = plan(separable(728, 728, (19, 19)))
    # The intermediate's pixels start at whole lines, and so do the weights' rows.
    assert [one.size_bytes for one in made.workspace] == [64 * 19 * 19 * 768 * 2, 728 * 768 * 2]


@pytest.mark.parametrize(
    ("channels", "copies", "second"), [(512, 0, "pointwise_gemm"), (728, 1, "hopper_gather")]
)
def test_the_second_of_two_launches_begins_while_the_first_ends(
    channels: int, copies: int, second: str
) -> None:
    steps = [step for step in plan(plain(channels)).steps if isinstance(step, Launch)]
    assert [step.instance.entry for step in steps] == [
        "depthwise_direct",
        *["row_copy"] * copies,
        second,
    ]
    assert [step.overlaps for step in steps] == [False, *[True] * (copies + 1)]


def plain(channels: int) -> Problem:
    """Nothing but the two convolutions."""
    problem = separable(channels, channels)
    return replace(problem, bias0=False, bias1=False, activation0="none", activation1="none")


def test_other_problems_are_left_to_others() -> None:
    assert "dilation" in why_not(separable(64, 64, kernel=5))
    assert "16-bit" in why_not(separable(64, 64, dtype=DType.FLOAT32))
    assert "16-byte chunks" in why_not(separable(64, 67))
    assert "wgmma" in why_not(separable(64, 64), replace(H200, capability=(8, 0)))


def test_channels_first_goes_by_way_of_copies() -> None:
    made = plan(separable(64, 128, layout="NCHW"))
    assert made.kernel.startswith("hopper_separable")
    assert made.kernel.endswith("through_channels_last")
    assert len(made.steps) == 3


def test_pieces_choose_as_the_whole() -> None:
    """Each tile gives the same bits; what must not change is that it is this kernel."""
    whole = separable(64, 128, batch=64)
    for piece in whole.split(5):
        assert plan(piece.problem).kernel.startswith("hopper_separable")


@pytest.mark.parametrize("tile", TILES)
def test_registers_of_a_block_are_those_that_it_starts_with(tile: SeparableTile) -> None:
    consumers, makers, loaders = tile.registers
    start = 65536 // tile.threads // 8 * 8
    assert tile.groups * consumers + 2 * makers + loaders <= tile.threads // 128 * start
    assert makers < start < consumers


def test_instances_are_few() -> None:
    assert len(list(HopperSeparable().instances())) <= 40
