"""Plans at the limits of what kernels count in 32 bits, and of what a grid holds; no GPU."""

from __future__ import annotations

import pytest

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.hopper_gather import HopperGather
from convgrad_service.backends.cuda.kernels.hopper_plan import Schedule, may_alternate
from convgrad_service.backends.cuda.kernels.hopper_tiles import HopperTile
from convgrad_service.plans.cuda import plan_for
from convgrad_service.plans.cuda_device import H200
from convgrad_service.plans.cuda_program import Launch
from convgrad_service.plans.cuda_works import (
    ConvWork,
    Direction,
    activation_operand,
    weight_operand,
)
from convgrad_service.problems.geometry import ConvShape
from convgrad_service.problems.layouts import LAYOUTS, activation_shape, weight_shape
from tests.large_tensors import LARGE, MORE_THAN
from tests.unit.test_plans_cuda import check_plan

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

    assert may_alternate(of(most))
    assert not may_alternate(of(most + 1))
    turns = Schedule(HopperTile(128, 128, alternate=True))
    family = HopperGather()
    assert "128x128a" in family.launches(of(most), H200, turns).kernel
    found = family.launches(of(most + 1), H200, turns)
    assert "128x128a" not in found.kernel
    (launch,) = found.steps
    assert isinstance(launch, Launch)
    assert dict(launch.instance.defines)["ALTERNATE"] == "0"
    assert "a" not in family.launches(of(most + 1), H200).kernel.rsplit("_", 1)[1]
