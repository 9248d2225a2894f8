"""Plans of true float32 by products of bfloat16 parts; no GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.conv.hopper_gather import HopperGather
from convgrad_service.backends.cuda.kernels.conv.hopper_gather_plan import Schedule, candidates
from convgrad_service.backends.cuda.kernels.conv.split_gather import SplitGather
from convgrad_service.backends.cuda.kernels.core.gather_axes import gather_axes
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import H200
from convgrad_service.plans.cuda.families import choose
from convgrad_service.plans.cuda.program import Launch
from convgrad_service.plans.cuda.works import ConvWork, Direction
from tests.support.kernels.conv_work import ADA, work_of

DIRECTIONS: tuple[Direction, ...] = ("fwd", "bwd_data")


def float_work(direction: Direction, **how: Any) -> ConvWork:
    return work_of(direction, dtype=DType.FLOAT32, **how)


def launches_of(family: SplitGather, work: ConvWork) -> list[Launch]:
    steps = family.launches(work, H200).steps
    assert all(isinstance(step, Launch) for step in steps)
    return [step for step in steps if isinstance(step, Launch)]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_what_is_split(direction: Direction) -> None:
    family = SplitGather()
    for layout in ("NHWC", "NCHW"):
        assert family.why_not(float_work(direction, layout=layout), H200) is None
    assert family.why_not(float_work(direction), ADA) is not None
    for refused in (
        work_of(direction),
        work_of(direction, dtype=DType.FLOAT64),
        float_work(direction, precision="high"),
        float_work(direction, groups=2, channels=(40, 40)),
        float_work(direction, channels=(8, 128)),
    ):
        assert family.why_not(refused, H200) is not None


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("stride", [1, 2, 4])
def test_every_candidate_is_an_instance_of_the_library(
    direction: Direction, layout: str, stride: int
) -> None:
    work = float_work(direction, layout=layout, stride=stride, size=32)
    axes, library = gather_axes(work), set(SplitGather().instances())
    found = list(candidates(replace(work, dtype=DType.BFLOAT16), axes, H200, parts=3))
    assert found
    for schedule in found:
        assert not schedule.images_first
        family = SplitGather(HopperGather(schedule=schedule, parts=3))
        launches = launches_of(family, work)
        assert {one.instance for one in launches} <= library
        assert all(one.shared_bytes <= H200.shared_bytes_per_block for one in launches)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_both_operands_are_split_before_the_product(direction: Direction) -> None:
    work = float_work(direction, layout="NCHW", batch=5, channels=(36, 70), size=9)
    fragment = SplitGather().launches(work, H200)
    split, again, product = launches_of(SplitGather(), work)
    assert again.instance == split.instance
    assert not split.overlaps
    assert again.overlaps
    assert product.overlaps
    read, _ = work.channels
    padded = -(-read // 8) * 8
    elements = 5 * 81 * padded, 9 * 70 * 40
    assert [item.size_bytes for item in fragment.workspace[:2]] == [6 * count for count in elements]
    maps = {buffer: one for _, buffer, one in product.arguments.maps}  # type: ignore[attr-defined]
    source, weight = maps["parts_source"], maps["parts_weight"]
    assert source.sizes == (read, 9, 9, 3 * 5)
    assert weight.sizes == (36, 3, 3, 1, 3 * 70)
    args = structure("conv/hopper_gather.cuh", "HopperGatherArgs", MAPS=1)
    packed = product.arguments.packed  # type: ignore[attr-defined]
    assert args.from_buffer_copy(packed.template).images == 5


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_only_split_tiles_change_the_order_of_sums(direction: Direction) -> None:
    work = float_work(direction, size=28)
    axes = gather_axes(work)
    for schedule in candidates(replace(work, dtype=DType.BFLOAT16), axes, H200, parts=3):
        family = SplitGather(HopperGather(schedule=schedule, parts=3))
        split = schedule.tile.split
        assert family.launches(work, H200).order == (f"split {split}/1" if split > 1 else "")


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_layers_of_many_products_are_split(direction: Direction) -> None:
    families = FAMILIES.fwd if direction == "fwd" else FAMILIES.bwd_data
    for layout in ("NHWC", "NCHW"):
        large = float_work(direction, batch=32, channels=(256, 256), size=28, layout=layout)
        assert choose(families, large, H200).family == "split_gather"
    # Moving each element twice more would take longer than multiplying it.
    few = float_work(direction, batch=32, channels=(64, 64), size=56, kernel=1, pad=0)
    assert choose(families, few, H200).family != "split_gather"


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("read", "written", "kernel", "taken"),
    [(12, 64, 1, True), (12, 15, 1, False), (12, 16, 3, True), (8, 64, 3, False)],
)
def test_few_channels(
    direction: Direction, read: int, written: int, kernel: int, taken: bool
) -> None:
    """Sums of fewer than 16 products, which other tensor-core kernels leave to FMAs."""
    channels = (read, written) if direction == "fwd" else (written, read)
    work = float_work(direction, batch=32, channels=channels, kernel=kernel, pad=0, size=28)
    assert (SplitGather().why_not(work, H200) is None) == taken
    if taken and kernel == 1:
        families = FAMILIES.fwd if direction == "fwd" else FAMILIES.bwd_data
        assert choose(families, work, H200).family == "split_gather"


def test_pixels_that_a_stride_skips_are_not_split() -> None:
    work = float_work("fwd", batch=2, channels=(64, 128), size=14, kernel=1, pad=0, stride=2)
    fragment = SplitGather().launches(work, H200)
    assert fragment.workspace[0].size_bytes == 6 * 2 * 49 * 64
    padded = float_work("fwd", batch=2, channels=(64, 128), size=14, kernel=1, pad=1, stride=2)
    fragment = SplitGather().launches(padded, H200)
    assert fragment.workspace[0].size_bytes == 6 * 2 * 196 * 64


def test_strided_planes_are_written_by_a_copy() -> None:
    work = float_work("bwd_data", batch=32, channels=(128, 128), size=56, stride=2, layout="NCHW")
    assert choose(FAMILIES.bwd_data, work, H200).family == "split_gather_through_channels_last"


def test_a_schedule_is_kept() -> None:
    work = float_work("fwd", batch=32, size=28)
    axes = gather_axes(work)
    first, *_ = candidates(replace(work, dtype=DType.BFLOAT16), axes, H200, parts=3)
    assert isinstance(first, Schedule)
    kernel = SplitGather(HopperGather(schedule=first, parts=3)).launches(work, H200).kernel
    assert kernel == f"split_gather_hopper_gather_fwd_{first}"
