"""Plans of first layers: what they launch exists, fits the device and covers the result; no GPU."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

from convgrad.contract import OPERATIONS
from convgrad.contract.base import validate
from convgrad.dtypes import DType
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.conv.hopper_first_data import HopperFirstData
from convgrad_service.backends.cuda.kernels.conv.hopper_first_taps import HopperFirstTaps
from convgrad_service.plans.cuda.device import H200, CudaDevice
from convgrad_service.plans.cuda.planner import plan_for
from convgrad_service.plans.cuda.program import Launch
from convgrad_service.plans.cuda.works import ConvWork, Direction
from convgrad_service.problems import problem_from
from tests.support.kernels.conv_work import work_of
from tests.support.numerics.arrays import DTYPES, draw, integers, request_arrays, rng_for
from tests.support.numerics.cases import Case
from tests.support.numerics.first_layers import first_cases

ADA = CudaDevice("L40S", (8, 9), 142, 101376, 102400, 96 * 2**20, 48 * 10**9)
B200 = CudaDevice("B200", (10, 0), 148, 232448, 233472, 126 * 2**20, 180 * 10**9)
INSTANCES = set(FAMILIES.instances())
LAYOUTS = {1: ("NCW", "NWC"), 2: ("NCHW", "NHWC"), 3: ("NCDHW", "NDHWC")}


@pytest.mark.parametrize("device", [H200, ADA, B200], ids=lambda device: device.name)
@pytest.mark.parametrize(
    ("dtype", "precision"), [("bfloat16", "high"), ("float32", "high"), ("float32", "highest")]
)
@pytest.mark.parametrize("case", first_cases(), ids=lambda case: case.id)
def test_launches_fit(case: Case, dtype: str, precision: str, device: CudaDevice) -> None:
    tensors = draw(case, rng_for(0), DTYPES[dtype], integers)
    for layout in LAYOUTS[case.ndim]:
        arrays = request_arrays(case, tensors, layout)
        params = {**case.params, "layout": layout, "precision": precision}
        request = validate(OPERATIONS[case.operation].request, {**arrays, **params})
        plan = plan_for(problem_from(case.operation, request), device, FAMILIES)
        for step in plan.steps:
            if not isinstance(step, Launch):
                continue
            assert step.instance in INSTANCES
            assert step.instance.runs_on(device)
            assert device.architecture in step.instance.architectures
            assert step.shared_bytes <= device.shared_bytes_per_block
            assert 0 < prod(step.block) <= 1024
            assert all(extent > 0 for extent in step.grid)
            assert step.grid[0] < 2**31


KINDS = [(DType.BFLOAT16, "highest"), (DType.FLOAT32, "high"), (DType.FLOAT32, "highest")]


def resnet(direction: Direction, **changes: Any) -> ConvWork:
    """The first layer of a ResNet, 64 images of it."""
    of = {"channels": (3, 64), "size": 224, "kernel": 7, "stride": 2, "pad": 3, **changes}
    return work_of(direction, batch=64, **of)


@pytest.mark.parametrize(("dtype", "precision"), KINDS)
def test_hopper_takes_the_layers_that_it_has_room_for(dtype: DType, precision: str) -> None:
    family = HopperFirstData()

    def takes(**changes: Any) -> bool:
        work = resnet("bwd_data", dtype=dtype, precision=precision, **changes)
        return family.why_not(work, H200) is None

    assert takes()
    assert takes(kernel=11, stride=4, pad=2)
    assert takes(kernel=3, stride=1, pad=1)
    assert takes(kernel=5, stride=1, pad=2, channels=(1, 16))
    assert takes(kernel=3, stride=1, pad=1, channels=(3, 128))
    # Of true float32, its accumulators leave no room for four rows of two fragments.
    exact = dtype is DType.FLOAT32 and precision == "highest"
    assert takes(kernel=4, stride=4, pad=0, channels=(3, 96)) != exact
    assert not takes(channels=(3, 129))
    assert not takes(channels=(3, 8))
    assert not takes(kernel=1, stride=1, pad=0)
    assert not takes(kernel=15, stride=2, pad=7)
    assert not takes(kernel=3, pad=3, dilation=2)
    assert family.why_not(resnet("bwd_data", dtype=dtype, precision=precision), ADA) is not None


@pytest.mark.parametrize(("dtype", "precision"), KINDS)
def test_blocks_fill_the_device_in_whole_turns(dtype: DType, precision: str) -> None:
    """None is left for a turn of its own."""
    work = resnet("bwd_data", dtype=dtype, precision=precision)
    (launch,) = HopperFirstData().launches(work, H200).steps
    assert isinstance(launch, Launch)
    together = 2 if dtype is DType.BFLOAT16 else 1
    assert launch.grid[0] == 128 * together
    assert launch.shared_bytes * together <= H200.shared_bytes_per_multiprocessor


@pytest.mark.parametrize("kernel", [3, 5, 7, 11])
def test_shares_of_the_weight(kernel: int) -> None:
    """One block a multiprocessor, or nearly."""
    work = resnet("bwd_weight", kernel=kernel, pad=kernel // 2)
    family = HopperFirstTaps()
    assert family.why_not(work, H200) is None
    launch = family.launches(work, H200).steps[0]
    assert isinstance(launch, Launch)
    assert 120 <= prod(launch.grid) <= H200.multiprocessors
    assert launch.shared_bytes + 1024 <= H200.shared_bytes_per_block
    assert family.why_not(work, ADA) is not None
    copied = resnet("bwd_weight", kernel=kernel, size=223)
    copy, taps, _ = family.launches(copied, H200).steps
    assert isinstance(copy, Launch)
    assert taps.instance.source == launch.instance.source
