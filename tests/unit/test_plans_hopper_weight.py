"""Hopper's weight gradients: what is left to others, how tiles and pixels are cut; no GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.hopper_weight import HopperWeight
from convgrad_service.backends.cuda.kernels.hopper_weight_tiles import (
    LEAST_STAGES,
    PARTIAL_BYTES,
    SPLIT_TILES,
    TILES,
    cuts,
    expected_s,
)
from convgrad_service.plans.cuda_device import H200, CudaDevice
from convgrad_service.plans.cuda_program import Launch
from convgrad_service.plans.cuda_works import ConvWork
from tests.unit.test_plans_cuda_dense import work_of

A100 = CudaDevice("A100", (8, 0), 108, 166912, 167936, 40 * 2**20, 80 * 10**9)
# A small image, few channels, many of both, a stride, wide taps.
WORKS = {
    "small": work_of("bwd_weight", size=7),
    "few": work_of("bwd_weight", channels=(32, 32), size=64),
    "many": work_of("bwd_weight", channels=(1280, 1280), size=16, batch=16),
    "large": work_of("bwd_weight", channels=(256, 256), size=56, batch=64),
    "strided": work_of("bwd_weight", channels=(128, 256), size=71, stride=2, batch=128),
    "dilated": work_of("bwd_weight", channels=(2048, 256), size=33, pad=12, dilation=12, batch=16),
    "odd": work_of("bwd_weight", channels=(67, 131), size=9),
}


@pytest.mark.parametrize(
    ("work", "why"),
    [
        (work_of("bwd_weight", groups=4), "4 groups"),
        (work_of("bwd_weight", channels=(8, 64)), "8 channels to 64"),
        (work_of("bwd_weight", dtype=DType.FLOAT64), "float64"),
        (work_of("bwd_weight", dtype=DType.FLOAT32), "float32 of highest"),
        (
            work_of("bwd_weight", dtype=DType.FLOAT32, precision="high", stride=2),
            "share few copies",
        ),
        (work_of("bwd_weight", size=40, kernel=1, pad=0, stride=9), "a stride of 9"),
        (work_of("bwd_weight", size=300, kernel=3, pad=128, dilation=128), "reach over 256"),
        (work_of("bwd_weight", size=300, kernel=2, pad=130, dilation=255), "too far"),
    ],
)
def test_what_it_leaves_to_others(work: ConvWork, why: str) -> None:
    reason = HopperWeight().why_not(work, H200)
    assert reason is not None
    assert why in reason


def test_it_is_for_hopper_alone() -> None:
    work = work_of("bwd_weight")
    assert HopperWeight().why_not(work, H200) is None
    assert "sm_90a" in (HopperWeight().why_not(work, A100) or "")


@pytest.mark.parametrize("name", WORKS)
def test_every_pixel_is_counted_once_by_every_tile(name: str) -> None:
    work = WORKS[name]
    for cut in cuts(work, H200, direct=True):
        assert 0 <= cut.whole <= cut.tiles
        rows = work.batch * work.output[0] * work.output[1]
        pixels = rows * (work.output[2] + cut.halo)
        assert (cut.steps - 1) * cut.tile.pixels < pixels <= cut.steps * cut.tile.pixels
        # The kernel's bounds of each share.
        bounds = [cut.steps * share // cut.shares for share in range(cut.shares + 1)]
        assert bounds[0] == 0
        assert bounds[-1] == cut.steps
        assert all(low < high for low, high in pairwise(bounds))
        covered = cut.row_tiles * cut.tile.row_boxes * 64, cut.column_tiles * cut.tile.blocks
        blocks = -(-work.in_channels // cut.tile.channels) * work.kernel[0] * work.kernel[1]
        assert covered[0] >= work.out_channels
        assert covered[1] >= blocks * -(-work.kernel[2] // cut.shared_taps) * cut.shared_taps


@pytest.mark.parametrize("name", WORKS)
@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT32])
def test_what_is_asked_for_fits(name: str, dtype: DType) -> None:
    work = replace(WORKS[name], dtype=dtype, precision="high")
    for cut in cuts(work, H200, direct=True):
        assert cut.stages(H200) >= LEAST_STAGES
        assert cut.shared_bytes(H200) <= H200.shared_bytes_per_block - 1024
        assert cut.shares == 1 or cut.partial_bytes <= PARTIAL_BYTES
        assert cut.tile in (SPLIT_TILES if dtype is DType.FLOAT32 else TILES)


@pytest.mark.parametrize("name", WORKS)
def test_partial_sums_have_a_place_and_a_second_kernel(name: str) -> None:
    work = WORKS[name]
    for cut in cuts(work, H200, direct=True):
        fragment = HopperWeight().launches(work, H200, cut)
        kernels = [step.instance.entry for step in fragment.steps if isinstance(step, Launch)]
        partial = [space for space in fragment.workspace if space.name == "partials"]
        assert ("hopper_weight_sum" in kernels) is bool(partial) is (cut.parted > 0)
        if partial:
            assert partial[0].size_bytes == cut.parted * cut.shares * cut.tile.sums * 4


def test_an_epilogue_takes_the_second_kernel() -> None:
    work = replace(WORKS["many"], alpha=0.5)
    fragment = HopperWeight().launches(work, H200)
    assert [step.instance.entry for step in fragment.steps if isinstance(step, Launch)] == [
        "hopper_weight",
        "hopper_weight_sum",
    ]


def test_shares_asked_for_are_shares() -> None:
    work = replace(WORKS["large"], split_k=5)
    assert all(cut.shares == 5 and cut.whole == 0 for cut in cuts(work, H200, direct=True))


@pytest.mark.parametrize("name", WORKS)
def test_the_choice_is_the_least_expected(name: str) -> None:
    work = WORKS[name]
    even = work.in_channels % 2 == 0  # else pairs of results are not aligned
    least = min(cuts(work, H200, direct=even), key=lambda cut: expected_s(cut, H200))
    assert HopperWeight().launches(work, H200).kernel == f"hopper_weight_{least.name}"


def test_registers_taken_are_registers_that_a_block_starts_with() -> None:
    for instance in HopperWeight().instances():
        defines = dict(instance.defines)
        if "WARPGROUPS" not in defines:
            continue
        multiply = int(defines["WARPGROUPS"])
        both = instance.entry == "hopper_weight_split" and multiply == 2
        others = 2 if both else 1
        started = 65536 // ((multiply + others) * 128) // 8 * 8 * (multiply + others)
        taken = multiply * int(defines["CONSUMER_REGISTERS"])
        assert taken + others * int(defines["PRODUCER_REGISTERS"]) <= started
