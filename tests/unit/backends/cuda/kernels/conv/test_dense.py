"""The dense tensor-core kernels' plans: phases, tiles, splits and prepared operands; no GPU."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from math import prod

import pytest

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.conv.dense_gather import DenseGather
from convgrad_service.backends.cuda.kernels.conv.dense_tiles import least_terms
from convgrad_service.backends.cuda.kernels.conv.dense_weight import DenseWeight
from convgrad_service.backends.cuda.kernels.core.gather_axes import gather_axis
from convgrad_service.backends.cuda.kernels.layout.channels_last import prepare_activation
from convgrad_service.plans.cuda.device import H200, CudaDevice
from convgrad_service.plans.cuda.program import Fragment, Launch, Workspace
from convgrad_service.plans.cuda.works import (
    ConvWork,
    Direction,
    Operand,
    activation_operand,
)
from convgrad_service.problems.geometry import ConvShape
from convgrad_service.problems.layouts import LAYOUTS
from tests.support.kernels.conv_work import ADA, work_of

DIRECTIONS: tuple[Direction, ...] = ("fwd", "bwd_data", "bwd_weight")


def fragment_of(work: ConvWork, device: CudaDevice = H200) -> Fragment:
    family = DenseWeight() if work.direction == "bwd_weight" else DenseGather()
    assert family.why_not(work, device) is None
    return family.launches(work, device)


def launches(fragment: Fragment) -> list[Launch]:
    assert all(isinstance(step, Launch) for step in fragment.steps)
    return [step for step in fragment.steps if isinstance(step, Launch)]


@pytest.mark.parametrize("seed", range(200))
def test_phases_meet_exactly_the_pairs_of_the_definition(seed: int) -> None:
    rng = random.Random(seed)
    stride, dilation, kernel = rng.randint(1, 7), rng.randint(1, 7), rng.randint(1, 6)
    pad, size = rng.randint(0, 9), rng.randint(1, 25)
    out = rng.randint(1, 12)
    conv = ConvShape(
        batch=1,
        groups=1,
        in_channels=64,
        out_channels=64,
        input_size=(size,),
        kernel_size=(kernel,),
        output_size=(out,),
        stride=(stride,),
        padding=((pad, 0),),
        dilation=(dilation,),
    )
    operand = Operand("any", DType.BFLOAT16, (0, 0, 1, 0, 0, 64))
    wanted = {
        (i, o, r)
        for i, o, r in product(range(size), range(out), range(kernel))
        if i == o * stride + r * dilation - pad
    }
    for direction in ("fwd", "bwd_data"):
        work = ConvWork(
            direction="fwd" if direction == "fwd" else "bwd_data",
            conv=conv,
            dtype=DType.BFLOAT16,
            result_dtype=DType.BFLOAT16,
            x=operand,
            w=operand,
            y=operand,
        )
        axis = gather_axis(work, 2)
        results: list[int] = []
        pairs = set()
        for phase in axis.phases:
            for m in range(phase.count):
                result = phase.y0 + m * axis.y_step
                results.append(result)
                for j in range(phase.taps):
                    source = phase.x0 + m * axis.x_step + j * axis.x_tap
                    r = phase.r0 + j * axis.r_step
                    if 0 <= source < axis.x_size:
                        pairs.add(
                            (source, result, r) if direction == "fwd" else (result, source, r)
                        )
        assert pairs == wanted
        assert sorted(results) == list(range(out if direction == "fwd" else size))
        taps = [phase.taps for phase in axis.phases]
        assert taps == sorted(taps, reverse=True)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("device", [H200, ADA], ids=lambda device: device.name)
@pytest.mark.parametrize("channels", [(8, 8), (32, 32), (64, 256), (512, 512), (67, 131)])
def test_blocks_fit_the_device(
    direction: Direction, device: CudaDevice, channels: tuple[int, int]
) -> None:
    for size, kernel, dtype in product((7, 56), (1, 3, 7), (DType.BFLOAT16, DType.FLOAT32)):
        work = work_of(
            direction,
            channels=channels,
            size=size,
            kernel=kernel,
            pad=kernel // 2,
            dtype=dtype,
            precision="high",
        )
        for launch in launches(fragment_of(work, device)):
            assert launch.shared_bytes <= device.shared_bytes_per_block
            assert prod(launch.block) <= 1024
            assert launch.grid[1] <= 65535
            assert launch.grid[2] <= 65535


def test_channels_last_are_read_where_they_are() -> None:
    for direction in DIRECTIONS:
        fragment = fragment_of(work_of(direction))
        assert not [w for w in fragment.workspace if "channels_last" in w.name]


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_other_operands_are_copied_to_whole_chunks(layout: str, direction: Direction) -> None:
    work = work_of(direction, channels=(67, 131), layout=layout)
    fragment = fragment_of(work)
    sizes = {w.name: w.size_bytes for w in fragment.workspace if "channels_last" in w.name}
    x, y, w = 2 * 14 * 14 * 72 * 2, 2 * 14 * 14 * 136 * 2, 131 * 9 * 72 * 2
    wanted = {"fwd": {x, w}, "bwd_data": {y, w}, "bwd_weight": {x, y}}[direction]
    assert set(sizes.values()) == wanted
    assert not set(sizes) & {"x", "y", "w"}


def test_padding_starts_where_the_channels_end() -> None:
    operand = activation_operand("x", DType.FLOAT16, LAYOUTS["NHWC"], (2, 5, 5, 6 * 3), 3)
    prepared = prepare_activation(operand, 2, 3, 6, (1, 5, 5), "copy", H200)
    assert prepared.operand.strides == (5 * 5 * 24, 8, 1, 5 * 5 * 24, 5 * 24, 24)
    assert prepared.workspace == (Workspace("copy", 2 * 5 * 5 * 24 * 2),)


def test_true_float32_splits_its_factors_where_sums_are_long_enough() -> None:
    for direction in DIRECTIONS:
        family = DenseWeight() if direction == "bwd_weight" else DenseGather()
        exact = work_of(direction, dtype=DType.FLOAT32)
        assert family.why_not(exact, H200) is None
        for work, split in ((exact, "1"), (work_of(direction, dtype=DType.BFLOAT16), "0")):
            (launch,) = (
                step
                for step in family.launches(work, H200).steps
                if isinstance(step, Launch) and step.instance.entry.startswith("dense")
            )
            assert dict(launch.instance.defines)["SPLIT"] == split
        few = work_of(
            direction, batch=1, size=3, kernel=1, pad=0, channels=(15, 15), dtype=DType.FLOAT32
        )
        assert "more accurate" in (family.why_not(few, H200) or "")
        assert family.why_not(replace(few, precision="high"), H200) is None


@pytest.mark.parametrize("direction", ["fwd", "bwd_data"])
def test_sums_at_borders_are_the_shortest(direction: Direction) -> None:
    """Corners have 4 of 9 taps, and some positions one if the dilation is large."""
    work = work_of(direction, size=9, channels=(12, 12), dtype=DType.FLOAT32)
    assert least_terms(work) == 4 * 12
    work = replace(work, conv=replace(work.conv, dilation=(3, 3), padding=((3, 3),) * 2))
    assert least_terms(work) == 4 * 12
    work = work_of(direction, size=5, channels=(7, 7), pad=3, dilation=3, dtype=DType.FLOAT32)
    assert least_terms(work) == 7


@pytest.mark.parametrize(("pad", "taps"), [(0, 3), (1, 2), (2, 1)])
def test_padding_shortens_sums(pad: int, taps: int) -> None:
    work = work_of("fwd", size=9, channels=(12, 12), pad=pad, dtype=DType.FLOAT32)
    assert least_terms(work) == taps**2 * 12


def test_what_tensor_cores_would_round_goes_elsewhere() -> None:
    for direction in DIRECTIONS:
        family = DenseWeight() if direction == "bwd_weight" else DenseGather()
        double = work_of(direction, dtype=DType.FLOAT64)
        assert "float64" in (family.why_not(double, H200) or "")


def test_the_choice_of_a_family_ignores_how_many_samples_there_are() -> None:
    for direction in DIRECTIONS:
        family = DenseWeight() if direction == "bwd_weight" else DenseGather()
        reasons = {
            family.why_not(work_of(direction, batch=batch, size=size), H200)
            for batch, size in product((1, 64), (7, 56))
        }
        assert len(reasons) == 1


def test_splits_are_as_asked_for() -> None:
    work = work_of("bwd_weight", size=56)
    family = DenseWeight()
    for splits in (1, 3, 7):
        fragment = family.launches(work, H200, splits=splits)
        first = launches(fragment)[0]
        assert first.grid[2] == splits
        assert len(fragment.steps) == (1 if splits == 1 else 2)
