"""Plans at the limits of what kernels count in 32 bits, and of what a grid holds; no GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.conv.dense_weight import DenseWeight
from convgrad_service.backends.cuda.kernels.conv.first_forward import FirstForward
from convgrad_service.backends.cuda.kernels.conv.first_weight import FirstWeight
from convgrad_service.backends.cuda.kernels.conv.hopper_first_data import HopperFirstData
from convgrad_service.backends.cuda.kernels.conv.hopper_first_taps import HopperFirstTaps
from convgrad_service.backends.cuda.kernels.conv.hopper_gather import HopperGather
from convgrad_service.backends.cuda.kernels.conv.hopper_gather_plan import Schedule, may_pingpong
from convgrad_service.backends.cuda.kernels.conv.hopper_gather_tiles import HopperTile
from convgrad_service.backends.cuda.kernels.conv.pointwise_gemm import PointwiseGemm
from convgrad_service.backends.cuda.kernels.core.gather_axes import gather_axes
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_tiles import chunk_counts
from convgrad_service.inprocess.base import problem_of
from convgrad_service.plans.cuda.device import H200
from convgrad_service.plans.cuda.families import Family, choose
from convgrad_service.plans.cuda.planner import plan_for
from convgrad_service.plans.cuda.program import Launch, ceil_div
from convgrad_service.plans.cuda.works import (
    ConvWork,
    Direction,
    activation_operand,
    weight_operand,
)
from convgrad_service.problems.geometry import ConvShape
from convgrad_service.problems.layouts import LAYOUTS, activation_shape, weight_shape
from tests.support.kernels.conv_work import ADA
from tests.support.kernels.plans import check_plan
from tests.support.numerics.large_tensors import LARGE, MORE_THAN

MOST = 2**31 - 1
DIRECTIONS: dict[str, Direction] = {"fwd": "fwd", "data": "bwd_data", "weight": "bwd_weight"}
Size = tuple[int, ...]


def work_of(
    direction: str,
    channels: tuple[int, int],
    size: Size,
    kernel: Size,
    stride: Size,
    *,
    before: Size = (),
    batch: int = 1,
    dtype: DType = DType.BFLOAT16,
) -> ConvWork:
    """Channels last, padded before each dimension alone."""
    layout = LAYOUTS[f"N{'DHW'[-len(size) :]}C"]
    before = before or (0,) * len(size)
    output = tuple(
        (extent + pad - taps) // step + 1
        for extent, pad, taps, step in zip(size, before, kernel, stride, strict=True)
    )
    conv = ConvShape(
        batch=batch,
        groups=1,
        in_channels=channels[0],
        out_channels=channels[1],
        input_size=size,
        kernel_size=kernel,
        output_size=output,
        stride=stride,
        padding=tuple((pad, 0) for pad in before),
        dilation=(1,) * len(size),
    )
    x, y = (
        activation_operand(name, dtype, layout, activation_shape(layout, batch, 1, c, extent), 1)
        for name, c, extent in (("x", channels[0], size), ("y", channels[1], output))
    )
    shape = weight_shape(layout, 1, *channels, kernel)
    w = weight_operand("w", dtype, layout, shape, 1)
    return ConvWork(
        direction=DIRECTIONS[direction],
        conv=conv,
        dtype=dtype,
        result_dtype=dtype,
        x=x,
        w=w,
        y=y,
    )


@pytest.mark.parametrize("name", LARGE)
def test_large_tensors_go_by_the_kernels_that_they_are_to_check(name: str) -> None:
    """See tests/kernels/test_cuda_backend.py, which computes them."""
    large = LARGE[name]
    problem = large.problem()
    plan = plan_for(problem, H200, FAMILIES)
    assert large.kernel in plan.kernel
    assert large.elements > MORE_THAN
    assert large.tensor_bytes + plan.workspace_bytes < 100 * 10**9
    check_plan(plan, problem, H200)


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT32])
def test_warpgroups_do_not_take_turns_where_results_are_more_chunks_than_32_bits_count(
    dtype: DType,
) -> None:
    """Of 16 bytes: 64 GiB, of which an H200 holds some."""
    bytes_of_pixel = 8192 * dtype.itemsize
    most = 2**36 // bytes_of_pixel

    def of(pixels: int) -> ConvWork:
        return work_of("fwd", (64, 8192), (pixels,), (1,), (1,), dtype=dtype)

    axes = gather_axes(of(most))
    assert may_pingpong(of(most), axes)
    assert not may_pingpong(of(most + 1), axes)
    turns = Schedule(HopperTile(128, 128, pingpong=True))
    family = HopperGather()
    assert "128x128a" in family.launches(of(most), H200, turns).kernel
    found = family.launches(of(most + 1), H200, turns)
    assert "128x128a" not in found.kernel
    (launch,) = found.steps
    assert isinstance(launch, Launch)
    assert dict(launch.instance.defines)["PINGPONG"] == "0"
    assert "a" not in family.launches(of(most + 1), H200).kernel.rsplit("_", 1)[1]


# And channels, and the stride along W.
FIRST: list[tuple[Family[ConvWork], str, DType, int, int]] = [
    (HopperFirstTaps(), "weight", DType.BFLOAT16, 4, 64),
    (FirstWeight(), "weight", DType.FLOAT32, 4, 16),
    (FirstForward(), "fwd", DType.BFLOAT16, 4, 64),
    (HopperFirstData(), "data", DType.BFLOAT16, 1, 16),
]


@pytest.mark.parametrize(("family", "direction", "dtype", "channels", "stride"), FIRST)
def test_first_layers_do_not_count_in_32_bits_what_lies_far_before_the_input(
    family: Family[ConvWork], direction: str, dtype: DType, channels: int, stride: int
) -> None:
    """Tensors are small, and the padding enormous. (Wrong sums, and reads outside the input.)"""

    def reason(before: int) -> str | None:
        size, kernel, strides = (3, 64), (3, 3), (1, stride)
        of = (channels, 16)
        # Weight gradients of one image would be sums too short for first_weight.
        batch = 8 if direction == "weight" else 1
        pad = (0, before)
        work = work_of(direction, of, size, kernel, strides, before=pad, dtype=dtype, batch=batch)
        return family.why_not(work, H200)

    assert reason(2**16) is None
    assert reason(2**30) == "positions reach beyond 268435456"


def test_more_planes_than_a_grid_holds_are_left_to_others() -> None:
    family = HopperFirstData()

    def of(batch: int) -> ConvWork:
        size, kernel, stride = (2**12, 1, 1), (1, 2, 1), (2**12, 1, 1)
        return work_of("data", (1, 16), size, kernel, stride, before=(0, 1, 0), batch=batch)

    assert family.why_not(of(2**18), H200) is None
    assert "grid" in str(family.why_not(of(2**20), H200))
    launch = choose(FAMILIES.bwd_data, of(2**20), H200).fragment.steps[-1]
    assert isinstance(launch, Launch)
    assert 0 < launch.grid[0] <= MOST


def test_more_tiles_than_a_grid_holds_are_not_computed_by_clusters() -> None:
    """Blocks that store such results have a tile each, or else are persistent."""
    family = PointwiseGemm()
    for pixels in (2**20, 2**25):
        plain = work_of("fwd", (64, 64), (pixels,), (1,), (1,))
        assert family.why_not(plain, H200) is None
        for work in (plain, replace(plain, activation="relu")):
            launch = choose(FAMILIES.fwd, work, H200).fragment.steps[-1]
            assert isinstance(launch, Launch)
            assert max(launch.grid[1:]) < 2**16
    assert family.why_not(replace(plain, activation="relu"), H200) == "no tile fits"


def test_offsets_that_do_not_fit_into_shared_memory_are_left_to_others() -> None:
    """Those of 125 taps in 64 bits, where a block has 99 KiB."""
    family = DenseWeight()
    small, large = (
        work_of("weight", (8, 128), (size,) * 3, (5, 5, 5), (4, 4, 4), batch=256)
        for size in (28, 112)
    )
    assert family.why_not(small, ADA) is family.why_not(large, H200) is None
    assert "do not fit" in str(family.why_not(large, ADA))
    assert choose(FAMILIES.bwd_weight, large, ADA).family == "implicit_gemm"


def test_kernel_rows_are_shared_by_no_more_blocks_than_a_grid_holds() -> None:
    def of(stride: int) -> ConvWork:
        return work_of("data", (1, 16), (2 * stride, 1), (stride + 1, 1), (stride, 1))

    family = HopperFirstData()
    assert family.why_not(of(2**16 - 1), H200) is None
    assert "no instance has the room" in str(family.why_not(of(2**16), H200))


SUMMED: list[tuple[Callable[[], Family[ConvWork]], DType]] = [
    (HopperFirstTaps, DType.BFLOAT16),
    (FirstWeight, DType.FLOAT32),
]


@pytest.mark.parametrize(("family", "dtype"), SUMMED)
def test_results_of_first_layers_are_fewer_than_32_bits_count(
    family: Callable[[], Family[ConvWork]], dtype: DType
) -> None:
    def reason(out_channels: int) -> str | None:
        work = work_of("weight", (4, out_channels), (9, 16), (4, 4), (1, 1), dtype=dtype)
        return family().why_not(work, H200)

    assert reason(2**25 - 8) is None
    assert "results" in str(reason(2**25))


def test_numbers_of_chunks_are_the_fewest_of_each_length() -> None:
    for rows in (1, 2, 3, 7, 12, 97, 1000):
        found = list(chunk_counts(rows))
        fewest: dict[int, int] = {}
        for chunks in range(1, rows + 1):
            fewest.setdefault(ceil_div(rows, chunks), chunks)
        assert found == list(fewest.values()), rows
    assert len(list(chunk_counts(2**26))) < 2**15


def test_long_rows_have_a_plan() -> None:
    """What a plan looks at does not grow with them, or this would take minutes."""
    work = work_of("weight", (1, 16), (1, 2**27), (1, 10), (1, 4))
    family = HopperFirstTaps()
    assert family.why_not(work, H200) is None
    launch = family.launches(work, H200).steps[0]
    assert isinstance(launch, Launch)
    assert launch.grid == (1, H200.multiprocessors, 1)


@pytest.mark.parametrize("operation", ["adaptive_avg_pool_bwd", "adaptive_max_pool_bwd"])
def test_a_plane_of_a_million_positions_is_not_more_blocks_than_a_grid_has(operation: str) -> None:
    """One window, channels last: a block has 16 positions."""
    tensors = {"grad_output": ((1, 1, 1, 8), "float32")}
    if operation == "adaptive_max_pool_bwd":
        tensors["indices"] = ((1, 1, 1, 8), "int64")
    problem = problem_of(operation, tensors, {"input_size": [1200, 1200], "layout": "NHWC"})
    plan = plan_for(problem, H200, FAMILIES)
    assert dict(plan.passed_over)["window_tiles"] == "more blocks than a grid can have"
    check_plan(plan, problem, H200)
