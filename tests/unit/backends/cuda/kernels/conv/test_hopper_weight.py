"""Hopper's weight gradients: what is left to others, how tiles and pixels are cut; no GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.conv.hopper_weight import HopperWeight, reachable
from convgrad_service.backends.cuda.kernels.conv.hopper_weight_cuts import (
    LEAST_STAGES,
    PARTIAL_BYTES,
    cuts,
)
from convgrad_service.backends.cuda.kernels.conv.hopper_weight_model import expected_s
from convgrad_service.backends.cuda.kernels.conv.hopper_weight_tiles import PIXELS
from convgrad_service.plans.cuda.device import H200, CudaDevice
from convgrad_service.plans.cuda.program import ZEROS_BYTES, Launch
from convgrad_service.plans.cuda.works import ConvWork
from tests.support.kernels.conv_work import work_of

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
        (work_of("bwd_weight", channels=(8, 64)), "8 channels to 64"),
        (work_of("bwd_weight", dtype=DType.FLOAT64), "float64"),
        (work_of("bwd_weight", dtype=DType.FLOAT32), "TF32 is less"),
        (work_of("bwd_weight", size=40, kernel=1, pad=0, stride=9), "a stride of 9"),
        (work_of("bwd_weight", size=300, kernel=3, pad=128, dilation=128), "reach over 256"),
        (
            work_of("bwd_weight", size=300, kernel=2, pad=130, dilation=255),
            "no partition has indices",
        ),
    ],
)
def test_what_it_leaves_to_others(work: ConvWork, why: str) -> None:
    reason = HopperWeight().why_not(work, H200)
    assert reason is not None
    assert why in reason


def test_it_takes_float32_where_tf32_is_exact_enough() -> None:
    work = work_of("bwd_weight", dtype=DType.FLOAT32, precision="high", stride=2)
    assert HopperWeight().why_not(work, H200) is None


def test_blocks_that_share_boxes_have_tiles_of_one_group() -> None:
    work = work_of("bwd_weight", groups=3, channels=(96, 320), size=28)
    assert HopperWeight().why_not(work, H200) is None
    shared = [cut for cut in reachable(work, H200) if cut.copying > 1 and cut.rows_first]
    assert shared
    assert all(cut.row_tiles % (work.groups * cut.copying) == 0 for cut in shared)


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
        assert (cut.steps - 1) * PIXELS < pixels <= cut.steps * PIXELS
        # The kernel's bounds of each share.
        each, more = divmod(cut.steps, cut.shares)
        bounds = [each * share + min(share, more) for share in range(cut.shares + 1)]
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


@pytest.mark.parametrize("name", WORKS)
def test_partial_sums_have_a_place_and_a_second_kernel(name: str) -> None:
    work = WORKS[name]
    for cut in cuts(work, H200, direct=True):
        fragment = HopperWeight().launches(work, H200, cut)
        kernels = [step.instance.entry for step in fragment.steps if isinstance(step, Launch)]
        partial = [space for space in fragment.workspace if space.name == "partials"]
        assert bool(partial) is (cut.parted > 0)
        assert ("hopper_weight_sum" in kernels) is (cut.parted > 0 and not cut.together)
        if partial:
            assert partial[0].size_bytes == cut.parted * cut.shares * cut.tile.sums * 4


def test_an_epilogue_takes_partial_sums() -> None:
    work = replace(WORKS["many"], alpha=0.5)
    assert all(cut.whole == 0 for cut in cuts(work, H200, direct=False))
    fragment = HopperWeight().launches(work, H200)
    assert [space.name for space in fragment.workspace] == ["partials"]


@pytest.mark.parametrize("name", WORKS)
def test_blocks_that_add_up_together_have_one_unit_of_it_each_their_last(name: str) -> None:
    for cut in cuts(WORKS[name], H200, direct=True):
        if not cut.together:
            continue
        assert cut.parted * cut.shares <= cut.blocks(H200)
        assert cut.whole % cut.blocks(H200) == 0
        assert cut.shares <= 255
        assert cut.parted * 4 <= ZEROS_BYTES
        assert cut.tile.warpgroups * 4 % cut.slices == 0


@pytest.mark.parametrize("name", WORKS)
def test_blocks_that_sum_have_one_unit_each_and_room_for_slices(name: str) -> None:
    for cut in cuts(WORKS[name], H200, direct=True):
        if not cut.sums:
            continue
        assert cut.units == cut.blocks(H200)
        assert cut.steps >= cut.shares * cut.summing
        assert cut.tiles % cut.copying == 0
        assert cut.tile.joined_bytes(cut.summing) + 1024 <= cut.shared_bytes(H200)


@pytest.mark.usefixtures("uncorrected")
def test_few_tiles_are_summed_in_clusters() -> None:
    work = work_of("bwd_weight", channels=(256, 256), batch=64)
    fragment = HopperWeight().launches(work, H200)
    assert fragment.kernel == "hopper_weight_128x192_y_sum4/1"
    assert not fragment.workspace


def test_shares_asked_for_are_shares() -> None:
    work = replace(WORKS["large"], split_k=5)
    assert all(cut.shares == 5 and cut.whole == 0 for cut in cuts(work, H200, direct=True))


@pytest.mark.usefixtures("uncorrected")
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
        started = 65536 // ((multiply + 1) * 128) // 8 * 8 * (multiply + 1)
        taken = multiply * int(defines["CONSUMER_REGISTERS"])
        assert taken + int(defines["PRODUCER_REGISTERS"]) <= started
