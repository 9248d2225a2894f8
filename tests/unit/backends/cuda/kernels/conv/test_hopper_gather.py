"""Plans of Hopper's dense kernels: what they take, their tiles, taps and maps; no GPU."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import numpy as np
import pytest

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.conv.hopper_gather import HopperGather
from convgrad_service.backends.cuda.kernels.conv.hopper_gather_maps import (
    Combined,
    sides_of,
)
from convgrad_service.backends.cuda.kernels.conv.hopper_gather_model import (
    choose_schedule,
    expected_s,
)
from convgrad_service.backends.cuda.kernels.conv.hopper_gather_plan import (
    Schedule,
    candidates,
    kept_taps,
    may_start_with_images,
    possible,
    skips_taps,
)
from convgrad_service.backends.cuda.kernels.conv.hopper_gather_tiles import (
    TILES,
    HopperTile,
    tiles_of,
)
from convgrad_service.backends.cuda.kernels.core.gather_axes import Axes, gather_axes
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import H200
from convgrad_service.plans.cuda.program import Launch
from convgrad_service.plans.cuda.works import ConvWork, Direction
from tests.support.kernels.conv_work import ADA, work_of

DIRECTIONS: tuple[Direction, ...] = ("fwd", "bwd_data")


def axes_of(work: ConvWork) -> Axes:
    return gather_axes(work)


def arguments_of(work: ConvWork) -> Any:
    args = structure("conv/hopper_gather.cuh", "HopperGatherArgs", MAPS=1)
    packed = launch_of(work).arguments.packed  # type: ignore[attr-defined]
    return args.from_buffer_copy(packed.template)


def launches_of(work: ConvWork, schedule: Schedule | None = None) -> list[Launch]:
    return [
        step
        for step in HopperGather(True, schedule).launches(work, H200).steps
        if isinstance(step, Launch) and step.instance.entry == "hopper_gather"
    ]


def launch_of(work: ConvWork, schedule: Schedule | None = None) -> Launch:
    """Return the first launch; others have the same instance."""
    first, *others = launches_of(work, schedule)
    assert {one.instance for one in others} <= {first.instance}
    return first


@pytest.mark.parametrize(("stride", "counts"), [(2, [4]), (3, [5, 4]), (5, [7, 6, 6, 6])])
def test_many_phases_are_several_launches(stride: int, counts: list[int]) -> None:
    """The kernel parameters of a launch are at most 4 KB before CUDA 12.1."""
    work = work_of("bwd_data", size=30, kernel=7, stride=stride)
    args = structure("conv/hopper_gather.cuh", "HopperGatherArgs", MAPS=8)
    packed = [one.arguments.packed for one in launches_of(work)]  # type: ignore[attr-defined]
    assert [args.from_buffer_copy(one.template).phases for one in packed] == counts
    assert all(len(one.template) <= 4096 for one in packed)


@pytest.mark.parametrize("activation", ["none", "relu", "relu6", "silu"])
def test_a_bias_and_a_comparison_are_finished_in_rows(activation: str) -> None:
    """However few products a sum has; other epilogues take longer to store than such sums."""
    plain = work_of("fwd", channels=(64, 256), kernel=1, pad=0)
    work = replace(plain, bias="bias", activation=activation)
    reason = HopperGather().why_not(work, H200)
    if activation == "silu":
        assert reason is not None
        assert "than storing them" in reason
    else:
        assert reason is None
        assert arguments_of(work).plain == 2
        assert launch_of(work).instance in HopperGather().instances()
    assert arguments_of(plain).plain == 1


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("stride", [1, 2, 4])
@pytest.mark.parametrize("biased", [False, True])
def test_every_candidate_is_an_instance_of_the_library(
    direction: Direction, layout: str, stride: int, biased: bool
) -> None:
    work = work_of(direction, layout=layout, stride=stride, channels=(64, 128), size=32)
    work = replace(work, bias="bias") if biased else work
    axes, library = axes_of(work), set(HopperGather().instances())
    found = list(candidates(work, axes, H200))
    assert {launch_of(work, one).instance for one in found} <= library
    rows = [one for one in found if one.tile.pingpong and one.tile.taps > 1]
    assert len(rows) == (layout == "NHWC" and stride == 1)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_what_is_not_hoppers_goes_elsewhere(direction: Direction) -> None:
    family = HopperGather()
    assert family.why_not(work_of(direction), H200) is None
    assert family.why_not(work_of(direction), ADA) is not None
    for refused in (
        work_of(direction, groups=2, channels=(40, 40)),
        work_of(direction, dtype=DType.FLOAT64),
        work_of(direction, dtype=DType.FLOAT32),
        work_of(direction, channels=(8, 128)),
        work_of(direction, size=400, kernel=3, dilation=150, pad=150),
    ):
        assert family.why_not(refused, H200) is not None
    assert family.why_not(work_of(direction, dtype=DType.FLOAT32, precision="high"), H200) is None
    assert family.why_not(work_of(direction, groups=3, channels=(48, 96)), H200) is None


def test_the_choice_of_the_family_ignores_how_many_images_there_are() -> None:
    for batch in (1, 7, 1000):
        assert HopperGather().why_not(work_of("bwd_data", batch=batch), H200) is None


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_blocks_fit_the_device(tile: object, direction: Direction) -> None:
    work = work_of(direction, channels=(256, 320), stride=2)
    if tile not in tiles_of(work.dtype):
        work = replace(work, dtype=DType.FLOAT32, precision="high")
    launch = launch_of(work, Schedule(tile))  # type: ignore[arg-type]
    assert launch.shared_bytes <= H200.shared_bytes_per_block
    assert "SINGLE" in dict(launch.instance.defines) or launch.grid[0] <= H200.multiprocessors
    assert launch.instance in HopperGather().instances()


def _met(work: ConvWork, phase: Combined, tile: Sequence[tuple[int, ...]]) -> int:
    """The taps that some pixel of a tile meets inside the source, by looking at each."""
    axes = axes_of(work)
    count = 0
    for taps in product(*(range(along.taps) for along in phase)):
        count += any(
            all(
                0 <= along.x0 + m * axis.x_step + j * axis.x_tap < axis.x_size
                for m, j, axis, along in zip(pixel, taps, axes, phase, strict=True)
            )
            for pixel in tile
        )
    return count


@pytest.mark.parametrize("seed", range(20))
def test_no_tap_is_left_out_that_a_pixel_meets(seed: int) -> None:
    rng = random.Random(seed)
    work = work_of(
        rng.choice(DIRECTIONS),
        batch=rng.randint(1, 9),
        size=rng.randint(3, 14),
        kernel=rng.randint(1, 4),
        stride=rng.randint(1, 3),
        pad=rng.randint(2, 5),
        dilation=rng.randint(1, 3),
    )
    axes, pixels = axes_of(work), rng.choice((1, 5, 16, 64))
    for phase, images_first in product(axes.phases, (False, True)):
        counts = [along.count for along in phase]
        places = [(0, *place) for place in np.ndindex(work.batch, *counts[1:])]
        if images_first:
            places = [(0, n, h, w) for h, w, n in np.ndindex(*counts[1:], work.batch)]
        kept = kept_taps(axes, phase, work.batch, pixels, images_first)
        assert len(kept) == -(-work.batch * prod(counts) // pixels)
        for i, found in enumerate(kept):
            tile = [(0, h, w) for _, _, h, w in places[i * pixels : (i + 1) * pixels]]
            least = _met(work, phase, tile)
            assert least <= found <= prod(along.taps for along in phase)
            if pixels == 1:
                assert found == least


def test_padding_is_left_out_where_images_are_neighbours() -> None:
    work = work_of("bwd_data", batch=128, size=7)
    axes = axes_of(work)
    (phase,) = axes.phases
    kept = kept_taps(axes, phase, work.batch, 128, images_first=True)
    assert sorted(kept) == sorted([4] * 4 + [6] * 20 + [9] * 25)


@pytest.mark.usefixtures("uncorrected")
def test_the_choice_is_the_least_expected_time() -> None:
    for work in (
        work_of("bwd_data", batch=64, channels=(512, 512), size=7),
        work_of("bwd_data", batch=128, channels=(128, 256), size=71, stride=2),
        work_of("fwd", batch=1, channels=(64, 64), size=20),
    ):
        axes = axes_of(work)
        _, chosen = choose_schedule(work, axes, H200)
        others = list(candidates(work, axes, H200))
        assert chosen in others
        least = min(expected_s(work, axes, H200, other) for other in others)
        assert expected_s(work, axes, H200, chosen) == least


def test_the_copy_engine_takes_every_map() -> None:
    work = work_of("bwd_data", channels=(72, 200), size=15, stride=3, dilation=2, kernel=3, pad=2)
    axes = axes_of(work)
    sides = sides_of(work, H200)
    assert may_start_with_images(work, axes)
    for tile, images_first in product(TILES, (False, True)):
        assert sides.weight_map(tile).why_not() is None
        for phase in axes.phases:
            assert sides.source_map(axes, phase, tile, images_first).why_not() is None


def test_steps_leave_images_where_they_are() -> None:
    work = work_of("fwd", stride=2)
    axes = axes_of(work)
    assert not may_start_with_images(work, axes)
    plain = launch_of(work, Schedule(TILES[0]))
    asked = launch_of(work, Schedule(TILES[0], images_first=True))
    assert plain.arguments.packed == asked.arguments.packed  # type: ignore[attr-defined]


def test_warpgroups_take_turns_at_plain_results_alone() -> None:
    turns = Schedule(HopperTile(192, 128, pingpong=True))
    for layout, taken in (("NHWC", 1), ("NCHW", 0)):
        work = work_of("bwd_data", layout=layout)
        launch = launch_of(work, turns)
        assert dict(launch.instance.defines)["PINGPONG"] == str(taken)
        axes = axes_of(work)
        assert any(one.tile.pingpong for one in candidates(work, axes, H200)) == bool(taken)


def test_what_is_beside_products_is_expected_under_the_others() -> None:
    work = work_of("bwd_data", batch=64, channels=(256, 256), size=56)
    turns, together = (
        expected_s(work, axes_of(work), H200, Schedule(HopperTile(128, 128, pingpong=pingpong)))
        for pingpong in (True, False)
    )
    assert turns < together


def test_narrow_layers() -> None:
    """In TF32, only plain results have a tile for 32 channels."""
    family = HopperGather()
    assert family.why_not(work_of("fwd", channels=(24, 32)), H200) is not None
    assert family.why_not(work_of("fwd", channels=(32, 32)), H200) is None
    high = work_of("fwd", channels=(32, 32), dtype=DType.FLOAT32, precision="high")
    assert family.why_not(replace(high, activation="silu"), H200) is not None
    assert (
        family.why_not(
            work_of("fwd", channels=(32, 32), dtype=DType.FLOAT32, precision="high"), H200
        )
        is None
    )


@pytest.mark.usefixtures("uncorrected")
def test_few_tiles_are_split_over_clusters() -> None:
    work = work_of("bwd_data", batch=1, channels=(512, 512), size=7)
    _, chosen = choose_schedule(work, axes_of(work), H200)
    assert chosen.tile.single
    assert chosen.tile.split > 1
    launch = launch_of(work, chosen)
    assert launch.cluster == launch.grid[0] == chosen.tile.split
    assert prod(launch.grid[1:]) <= chosen.tile.clusters(H200)


@pytest.mark.parametrize("tile", [tile for tile in TILES if tile.single], ids=str)
def test_single_tiles_have_a_pipeline(tile: HopperTile) -> None:
    assert tile.stages(H200) >= (2 if tile.taps > 1 else 3)
    assert H200.fitting_blocks(tile.shared_bytes(tile.stages(H200))) >= tile.blocks


def test_taps_share_pixels_of_whole_rows() -> None:
    """If they are all of one phase, adjacent, and few."""
    shared = Schedule(HopperTile(64, 64, 1, single=True, taps=3))
    for work, wanted in (
        (work_of("bwd_data", batch=1), True),
        (work_of("fwd", batch=1), True),
        (work_of("bwd_data", batch=1, dilation=2, pad=2), False),
        (work_of("bwd_data", batch=1, stride=2), False),
        (work_of("fwd", batch=1, stride=2), False),
        (work_of("bwd_data", batch=1, kernel=1, pad=0), False),
        (work_of("bwd_data", batch=1, layout="NCHW"), False),
    ):
        axes = axes_of(work)
        assert possible(work, axes, H200, shared) is wanted
        assert not possible(work, axes, H200, replace(shared, images_first=True))


def test_tiles_are_searched_for_taps_where_some_are_skipped() -> None:
    tile = HopperTile(64, 64, 1, single=True)
    for work, images_first, wanted in (
        (work_of("bwd_data", batch=1, size=16), False, False),
        (work_of("bwd_data", batch=128, size=7), True, True),
        (work_of("bwd_data", batch=1, size=28, dilation=12, pad=12), False, True),
    ):
        assert skips_taps(work, axes_of(work), tile, images_first) is wanted


def test_a_partial_chunk_of_channels_takes_no_less_time_than_a_whole_one() -> None:
    schedule = Schedule(HopperTile(128, 128))
    for direction in DIRECTIONS:
        few, many = (
            expected_s(work, axes_of(work), H200, schedule)
            for read in (80, 128)
            for channels in [(read, 128) if direction == "fwd" else (128, read)]
            for work in [work_of(direction, batch=32, size=28, channels=channels)]
        )
        assert few >= many


def test_from_16_channels_on_plain_tf32_is_taken() -> None:
    given = {"channels": (512, 16), "dtype": DType.FLOAT32, "precision": "high"}
    work = work_of("bwd_data", batch=8, size=14, **given)
    assert HopperGather().why_not(work, H200) is None
    assert HopperGather().why_not(replace(work, alpha=0.5), H200) is not None


def test_from_16_channels_on_16_bit_types_are_compared_with_other_families() -> None:
    direct, usual = HopperGather(direct=True), HopperGather()
    for channels, dtype, compared in (
        ((512, 16), DType.BFLOAT16, True),
        ((16, 512), DType.BFLOAT16, True),
        ((512, 8), DType.BFLOAT16, False),
        ((512, 8), DType.FLOAT32, False),
    ):
        given = {"channels": channels, "dtype": dtype, "precision": "high"}
        work = work_of("bwd_data", batch=8, size=14, **given)
        assert usual.why_not(work, H200) is not None
        assert (direct.why_not(work, H200) is None) is compared
