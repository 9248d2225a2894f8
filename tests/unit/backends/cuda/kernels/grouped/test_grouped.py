"""The grouped tensor-core kernels' plans: merges, lattices, boxes, splits; no GPU."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from math import prod

import pytest

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.grouped.grouped_box import lattice_axis
from convgrad_service.backends.cuda.kernels.grouped.grouped_gather import GroupedGather
from convgrad_service.backends.cuda.kernels.grouped.grouped_merge import merge_of, piece_of
from convgrad_service.backends.cuda.kernels.grouped.grouped_weight import GroupedWeight
from convgrad_service.backends.cuda.kernels.layout.channels_first import ConvThroughChannelsLast
from convgrad_service.backends.cuda.kernels.layout.strided_copy import StridedCopy
from convgrad_service.plans.cuda.device import H200, CudaDevice
from convgrad_service.plans.cuda.families import choose
from convgrad_service.plans.cuda.program import Launch
from convgrad_service.plans.cuda.works import ConvWork, Direction
from tests.perf.random_grouped import random_grouped_layers
from tests.support.kernels.conv_work import work_of

DIRECTIONS: tuple[Direction, ...] = ("fwd", "bwd_data", "bwd_weight")
TURING = CudaDevice("T4", (7, 5), 40, 65536, 65536, 4 * 2**20, 16 * 10**9)


def grouped(direction: Direction, channels: tuple[int, int] = (4, 4), groups: int = 32) -> ConvWork:
    return work_of(direction, channels=channels, groups=groups)


@pytest.mark.parametrize(
    ("channels", "dtype", "merged"),
    [
        ((4, 4), DType.BFLOAT16, 2),
        ((2, 2), DType.FLOAT16, 4),
        ((8, 4), DType.BFLOAT16, 2),
        ((24, 40), DType.BFLOAT16, 1),
        ((4, 4), DType.FLOAT32, 1),
        ((6, 2), DType.FLOAT32, 2),
    ],
)
def test_merged_groups_fill_whole_chunks(
    channels: tuple[int, int], dtype: DType, merged: int
) -> None:
    work = work_of("fwd", channels=channels, groups=32, dtype=dtype, precision="high")
    merge = merge_of(work)
    assert merge.groups == merged
    assert merge.in_channels == merged * channels[0]
    assert merge.in_channels % merge.chunk == merge.out_channels % merge.chunk == 0


@pytest.mark.parametrize(
    ("channels", "groups", "direction", "merged"),
    [
        # Chunks of several groups would let a NaN spread too far, but not in weight gradients.
        ((6, 6), 32, "bwd_data", 1),
        ((6, 16), 32, "fwd", 1),
        ((6, 6), 32, "bwd_weight", 4),
        # All channels are no whole chunks.
        ((6, 6), 33, "bwd_weight", 1),
        ((4, 4), 33, "fwd", 1),
        # Chunks of several groups would be too wide.
        ((27, 27), 32, "bwd_weight", 1),
        # Two groups of three channels fit in a chunk, and 33 groups are no pairs.
        ((3, 3), 32, "fwd", 2),
        ((3, 3), 33, "fwd", 1),
    ],
)
def test_other_groups_are_padded(
    channels: tuple[int, int], groups: int, direction: Direction, merged: int
) -> None:
    work = work_of(direction, channels=channels, groups=groups)
    merge = merge_of(work)
    assert merge.groups == merged
    assert merge.padded == (merged * channels[0] % 8 > 0 or groups * channels[0] % 8 > 0)
    assert merge.in_channels == -(-merged * channels[0] // 8) * 8


def test_pieces_divide_groups_and_strides() -> None:
    work = work_of("fwd", channels=(20, 6), groups=4)
    assert piece_of(work.x, 20, 1) == 8
    assert piece_of(work.y, 6, 1) == 4
    assert piece_of(work.y, 6, 4) == 16
    shifted = replace(work.x, strides=(*work.x.strides[:5], work.x.strides[5] + 1))
    assert piece_of(shifted, 20, 1) == 2


def test_exact_sums_of_four_channels_meet_their_own_group_alone() -> None:
    assert merge_of(work_of("fwd", channels=(4, 4), groups=8, dtype=DType.FLOAT32)).groups == 2
    assert merge_of(work_of("fwd", channels=(4, 4), groups=7, dtype=DType.FLOAT32)).groups == 1


def test_every_meeting_is_counted_once() -> None:
    """The lattice's phases together meet what the identity says, no more and no less."""
    draw = random.Random(7)
    for _ in range(150):
        kernel, stride, dilation = draw.randint(1, 5), draw.randint(1, 4), draw.randint(1, 6)
        size, pad = draw.randint(12, 31) + dilation * kernel, draw.randint(0, 6)
        for direction in ("fwd", "bwd_data"):
            work = work_of(
                direction, size=size, kernel=kernel, stride=stride, dilation=dilation, pad=pad
            )
            axis = lattice_axis(work, 2)
            found = []
            for phase in axis.phases:
                for m, j in product(range(phase.count), range(phase.taps)):
                    source = phase.x0 + (m * axis.x_step + j * axis.x_tap) * axis.lattice
                    result = phase.y0 + m * axis.axis.y_step
                    tap = phase.r0 + j * axis.axis.r_step
                    if 0 <= source < axis.axis.x_size:
                        pair = (result, source) if direction == "fwd" else (source, result)
                        found.append((*pair, tap))
            meant = [
                (o, o * stride + r * dilation - pad, r)
                for o in range(work.output[2])
                for r in range(kernel)
                if 0 <= o * stride + r * dilation - pad < size
            ]
            assert sorted(found) == meant


def test_a_dilated_box_holds_no_position_between_taps() -> None:
    work = work_of("bwd_data", size=40, kernel=3, dilation=4, pad=4)
    axis = lattice_axis(work, 1)
    assert len(axis.phases) == 4
    assert axis.extent(8) == 10


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_reasons_are_given(direction: Direction) -> None:
    family = GroupedWeight() if direction == "bwd_weight" else GroupedGather()
    few = grouped(direction)
    reasons = [
        (work_of(direction, channels=(64, 64)), H200, "one group"),
        (few, TURING, "older than sm_80"),
        (grouped(direction, (136, 8)), H200, "more than"),
        (grouped(direction, (1, 20), 33), H200, "one channel"),
        (work_of(direction, channels=(8, 8), groups=4, layout="NCHW"), H200, "contiguous"),
        (replace(few, dtype=DType.FLOAT64), H200, "float64"),
    ]
    assert family.why_not(few, H200) is None
    for work, device, word in reasons:
        assert word in (family.why_not(work, device) or "")


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_channels_first_goes_through_channels_last(direction: Direction) -> None:
    inner = GroupedWeight() if direction == "bwd_weight" else GroupedGather()
    family = ConvThroughChannelsLast(inner, [StridedCopy()])
    work = work_of(direction, channels=(8, 8), groups=4, layout="NCHW")
    assert family.why_not(work, H200) is None
    fragment = family.launches(work, H200)
    assert fragment.kernel.endswith("_through_channels_last")
    sizes = {buffer.name: buffer.size_bytes for buffer in fragment.workspace}
    assert sizes[f"{direction}.last_x"] == 2 * 14 * 14 * 32 * 2
    assert family.why_not(grouped(direction), H200) is not None


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("channels", [(2, 2), (8, 8), (16, 32), (24, 24), (40, 64)])
def test_launches_fit_the_device(direction: Direction, channels: tuple[int, int]) -> None:
    family = GroupedWeight() if direction == "bwd_weight" else GroupedGather()
    for size, stride in ((56, 1), (7, 1), (57, 2)):
        work = work_of(direction, batch=64, channels=channels, groups=8, size=size, stride=stride)
        fragment = family.launches(work, H200)
        for step in fragment.steps:
            assert isinstance(step, Launch)
            assert step.shared_bytes <= H200.shared_bytes_per_block
            assert step.instance in list(family.instances())
            assert step.grid[0] >= 1


def test_splits_are_what_was_asked_for_or_fill_the_device() -> None:
    work = replace(grouped("bwd_weight"), split_k=3)
    assert GroupedWeight().launches(work, H200).kernel == "grouped_weight/3"
    large = work_of("bwd_weight", batch=64, channels=(4, 4), groups=32, size=56)
    launch = GroupedWeight().launches(large, H200).steps[0]
    assert isinstance(launch, Launch)
    # A block per multiprocessor, but for those that would not make any block's part smaller.
    assert 0.9 * H200.multiprocessors < prod(launch.grid) <= 2 * H200.multiprocessors


def test_grouped_weights_are_compared_by_expected_time() -> None:
    """Rows of 3x3 taps, strided layers, and wide groups."""
    compared = FAMILIES.bwd_weight
    chosen = {}
    for name, channels, options in (
        ("rows", 32, {"batch": 128, "size": 14}),
        ("strided", 32, {"batch": 128, "size": 28, "stride": 2}),
        ("merges", 24, {"batch": 128, "size": 14}),
        ("wide", 48, {"batch": 128, "size": 28, "stride": 2}),
    ):
        work = work_of("bwd_weight", channels=(channels, channels), groups=16, **options)
        chosen[name] = choose(compared, work, H200).family
    assert chosen == {
        "rows": "hopper_grouped_weight",
        "strided": "grouped_weight",
        "merges": "grouped_weight",
        "wide": "grouped_weight",
    }


def test_random_layers_are_of_their_seed() -> None:
    first, again, other = (list(random_grouped_layers(seed, 20)) for seed in (3, 3, 4))
    assert first == again
    assert first != other
    assert len({layer["name"] for layer in first}) == 20
