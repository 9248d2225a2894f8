"""The grouped Hopper kernel's plans: what it takes, how images are cut into units; no GPU."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.grouped.hopper_grouped import HopperGrouped, cuts_of
from convgrad_service.plans.cuda.device import H200
from convgrad_service.plans.cuda.families import choose
from convgrad_service.plans.cuda.program import Launch
from convgrad_service.plans.cuda.works import ConvWork, Direction
from tests.support.kernels.conv_work import work_of

CHANNELS = (4, 8, 16, 32)


@pytest.mark.parametrize("direction", ["fwd", "bwd_data"])
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("size", [14, 56])
def test_it_is_chosen_where_it_is_expected_to_be_fastest(
    direction: Direction, channels: int, size: int
) -> None:
    work = work_of(
        direction, batch=64, channels=(channels, channels), groups=32, size=size, layout="NHWC"
    )
    chosen = choose(FAMILIES.fwd if direction == "fwd" else FAMILIES.bwd_data, work, H200)
    assert chosen.fragment.kernel == f"hopper_grouped_{direction}"
    (launch,) = chosen.fragment.steps
    assert isinstance(launch, Launch)
    assert launch.instance in HopperGrouped().instances()
    assert launch.shared_bytes <= H200.shared_bytes_per_block


@pytest.mark.parametrize(
    "work",
    [
        work_of("bwd_data", channels=(8, 16), groups=32),
        work_of("bwd_data", channels=(12, 12), groups=32),
        work_of("bwd_data", channels=(64, 64), groups=1),
        work_of("bwd_data", channels=(8, 8), groups=32, stride=2),
        work_of("bwd_data", channels=(8, 8), groups=32, dilation=2),
        work_of("bwd_data", channels=(8, 8), groups=32, kernel=5, pad=2),
        work_of("bwd_data", channels=(4, 4), groups=7),
        work_of("bwd_data", channels=(8, 8), groups=32, dtype=DType.FLOAT32),
        work_of("bwd_data", channels=(8, 8), groups=32, layout="NCHW"),
        replace(work_of("fwd", channels=(8, 8), groups=32), bias="bias"),
    ],
)
def test_what_it_leaves_to_others(work: ConvWork) -> None:
    assert HopperGrouped().why_not(work, H200) is not None


def test_it_needs_hopper() -> None:
    work = work_of("bwd_data", channels=(8, 8), groups=32)
    assert HopperGrouped().why_not(work, replace(H200, capability=(10, 0))) is not None


def test_every_result_is_in_one_unit_and_its_boxes_fit() -> None:
    draw = random.Random(3)
    for _ in range(200):
        channels = draw.choice(CHANNELS)
        work = work_of(
            draw.choice(("fwd", "bwd_data")),
            batch=draw.choice((1, 3, 64)),
            channels=(channels, channels),
            groups=draw.choice((2, 16, 64)),
            size=draw.randint(2, 130),
            pad=draw.randint(1, 2),
        )
        height, width = work.input[1:] if work.direction == "bwd_data" else work.output[1:]
        cuts = list(cuts_of(work, H200))
        assert cuts
        for cut in cuts:
            down, across = cut.pieces
            assert (down - 1) * cut.rows < height <= down * cut.rows
            assert (across - 1) * cut.columns < width <= across * cut.columns
            assert down == 1 or cut.rows % cut.slot_rows == 0
            # Two more columns than results, unless a row's first pixel is the last one's neighbour.
            assert cut.row_pixels >= min(width, cut.columns) + (1 if across == 1 else 2)
            assert cut.row_pixels <= 256
            assert cut.row_pixels % 8 == 0
            assert cut.box_bytes % 1024 == 0
            assert cut.slot_bytes % 1024 == 0
            assert cut.boxes * cut.box_rows >= cut.source_rows
            launch = HopperGrouped().fragment(work, H200, cut).steps[-1]
            assert isinstance(launch, Launch)
            assert launch.shared_bytes <= H200.shared_bytes_per_block
            assert cut.blocks * (launch.shared_bytes + 1024) <= H200.shared_bytes_per_multiprocessor
