"""Plans of the CPU: they hold every problem, stay within memory, and say why not."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convgrad.dtypes import DType
from convgrad.errors import ProblemTooLarge
from convgrad_service.plans.cpu import CpuDevice, choose
from convgrad_service.plans.cpu_dense import dense_of, weight_chunks
from convgrad_service.plans.cpu_dense_parts import DensePlan, gather_plan, weight_plan
from convgrad_service.problems.geometry import ConvShape

MIB = 1024 * 1024
LEVELS = ("x86_64", "x86_64_v3", "x86_64_v4", "aarch64")


def conv(
    batch: int = 2,
    groups: int = 1,
    channels: int = 64,
    out_channels: int = 64,
    size: tuple[int, ...] = (56, 56),
    kernel: int = 3,
    stride: int = 1,
    padding: int = 1,
    dilation: int = 1,
) -> ConvShape:
    output = tuple(
        max(1, (i + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1) for i in size
    )
    ndim = len(size)
    return ConvShape(
        batch=batch,
        groups=groups,
        in_channels=channels * groups,
        out_channels=out_channels * groups,
        input_size=size,
        kernel_size=(kernel,) * ndim,
        output_size=output,
        stride=(stride,) * ndim,
        padding=((padding, padding),) * ndim,
        dilation=(dilation,) * ndim,
    )


SHAPES = st.builds(
    conv,
    batch=st.integers(1, 5),
    groups=st.integers(1, 3),
    channels=st.integers(1, 600),
    out_channels=st.integers(1, 600),
    size=st.lists(st.integers(1, 300), min_size=1, max_size=3).map(tuple),
    kernel=st.integers(1, 9),
    stride=st.integers(1, 5),
    padding=st.integers(0, 9),
    dilation=st.integers(1, 70),
)


def plans(shape: ConvShape, device: CpuDevice) -> list[tuple[DensePlan | None, int]]:
    """The plan and the result's channels, for each direction."""
    dense = dense_of(shape)
    return [
        (gather_plan(dense, backward=False, sum_bytes=4, device=device), dense.out_channels),
        (gather_plan(dense, backward=True, sum_bytes=8, device=device), dense.in_channels),
        (weight_plan(dense, sum_bytes=4, device=device), dense.out_channels),
    ]


@given(SHAPES, st.sampled_from(LEVELS), st.integers(1, 96), st.sampled_from([1, 8, 256]))
def test_dense_plans_cover_the_result_within_the_limit(
    shape: ConvShape, level: str, threads: int, limit_mib: int
) -> None:
    device = CpuDevice(level, threads, limit_mib * MIB)
    try:
        found = plans(shape, device)
    except ProblemTooLarge as refused:
        assert limit_mib < 128
        assert f"allowed {limit_mib * MIB}" in str(refused)  # noqa: PT017
        return
    groups = dense_of(shape).groups
    for plan, channels in found:
        if plan is None:
            continue
        assert plan.workspace_bytes <= device.workspace_limit_bytes
        assert 1 <= plan.threads <= threads
        covered = [
            pair
            for part in plan.parts
            for pair in itertools.product(range(*part.groups), range(*part.channels))
        ]
        assert sorted(covered) == list(itertools.product(range(groups), range(channels)))
        assert all(size > 0 for part in plan.parts for size in part.tiles.block)


@given(SHAPES, st.integers(1, 96), st.sampled_from([1, 8, 64, 1024]))
def test_the_order_of_sums_depends_on_neither_threads_nor_memory(
    shape: ConvShape, threads: int, limit_mib: int
) -> None:
    """Which engine runs, and the chunks, rows and columns of a tile and rows of a group."""
    usual = CpuDevice("x86_64_v4", 1, 256 * MIB)
    other = CpuDevice("x86_64_v4", threads, limit_mib * MIB)
    try:
        found = plans(shape, other)
    except ProblemTooLarge:
        return
    expected = plans(shape, usual)
    assert [plan is None for plan, _ in found] == [plan is None for plan, _ in expected]
    weight, usual_weight = found[-1][0], expected[-1][0]
    if weight is not None and usual_weight is not None:
        orders = {part.tiles.block[:4] for part in (*weight.parts, *usual_weight.parts)}
        assert len(orders) == 1


def test_chunks_are_few_where_the_weight_is_large() -> None:
    assert weight_chunks(dense_of(conv()), 4) == 8
    assert weight_chunks(dense_of(conv(channels=1024, out_channels=1024)), 4) == 1


def test_a_weight_too_large_for_the_workspace_goes_in_pieces() -> None:
    device = CpuDevice("x86_64_v4", 2, 8 * MIB)
    plan = choose("bwd_data", conv(channels=512, out_channels=512), DType.FLOAT32, device).plan
    assert plan.kernel == "dense_bwd_data/x86_64_v4"
    assert plan.pieces > 1
    assert plan.workspace_bytes <= 8 * MIB


@pytest.mark.parametrize("direction", ["fwd", "bwd_data", "bwd_weight"])
def test_what_fits_nowhere_is_computed_directly_and_the_reasons_are_told(direction: str) -> None:
    wide = conv(channels=256, size=(400_000,), kernel=3, padding=0, dilation=150_000)
    plan = choose(direction, wide, DType.FLOAT32, CpuDevice("x86_64_v4", 2, 64 * MIB)).plan  # type: ignore[arg-type]
    assert plan.kernel == f"direct_{direction}/x86_64_v4"
    assert plan.workspace_bytes == 0
    assert [name for name, _ in plan.passed_over] == ["grouped", "dense"]
    assert "for its pixels" in dict(plan.passed_over)["dense"]


def test_a_step_that_the_limit_does_not_hold_is_refused_and_computed_no_other_way() -> None:
    """Another kernel would give other bits, and a setting must not."""
    expected = r"needs \d+ bytes of work memory; the CPU is allowed 65536$"
    with pytest.raises(ProblemTooLarge, match=expected):
        choose("fwd", conv(), DType.FLOAT32, CpuDevice("x86_64_v4", 2, 64 * 1024))


def test_few_channels_a_group_go_to_the_grouped_kernels() -> None:
    device = CpuDevice("x86_64_v4", 2, 256 * MIB)
    few = choose("fwd", conv(groups=32, channels=8, out_channels=8), DType.FLOAT32, device)
    many = choose("fwd", conv(groups=2, channels=64), DType.FLOAT32, device)
    assert few.engine == "grouped"
    assert many.engine == "dense"
    assert many.passed_over == (("grouped", "64 channels per group are more than 32"),)


@pytest.mark.parametrize(
    ("direction", "channels", "out_channels", "last", "engine"),
    [
        # Lanes of channels would be mostly empty, those of positions are full.
        ("bwd_data", 3, 64, False, "grouped"),
        ("fwd", 64, 2, False, "grouped"),
        ("bwd_weight", 3, 64, True, "first"),
        ("bwd_weight", 64, 3, True, "dense"),
        ("fwd", 64, 64, False, "dense"),
        ("bwd_data", 256, 256, True, "dense"),
    ],
)
@pytest.mark.parametrize("level", ["x86_64_v3", "x86_64_v4"])
def test_vectors_are_filled(
    level: str, direction: str, channels: int, out_channels: int, last: bool, engine: str
) -> None:
    device = CpuDevice(level, 2, 256 * MIB)
    shape = conv(channels=channels, out_channels=out_channels, size=(56, 56), kernel=3, padding=1)
    choice = choose(direction, shape, DType.FLOAT32, device, last)  # type: ignore[arg-type]
    assert choice.engine == engine
    assert all(name != engine and reason for name, reason in choice.passed_over)


@given(
    st.builds(
        conv,
        batch=st.sampled_from([1, 2, 8]),
        groups=st.integers(1, 2),
        channels=st.sampled_from([1, 3, 4, 8, 12, 32, 100]),
        out_channels=st.sampled_from([1, 2, 6, 8, 16, 24, 64]),
        size=st.sampled_from(
            [(40,), (3000,), (9, 9), (28, 28), (112, 112), (30, 70), (12, 12, 12)]
        ),
        kernel=st.integers(1, 5),
        stride=st.integers(1, 2),
        padding=st.integers(0, 2),
    ),
    st.sampled_from(["x86_64_v3", "x86_64_v4"]),
    st.booleans(),
    st.integers(2, 4),
)
def test_one_engine_computes_a_layer_and_its_pieces(
    shape: ConvShape, level: str, last: bool, parts: int
) -> None:
    device = CpuDevice(level, 1, 256 * MIB)
    rows = -(-shape.output_size[0] // parts)
    for first in range(0, shape.output_size[0], rows):
        outputs = first, min(first + rows, shape.output_size[0])
        piece = shape.window(0, shape.inputs_for(0, outputs), outputs).with_batch(1)
        engines = {choose("fwd", one, DType.FLOAT32, device, last).engine for one in (shape, piece)}
        assert len(engines) == 1
