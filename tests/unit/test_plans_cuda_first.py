"""Plans of first layers: what they launch exists, fits the device and covers the result; no GPU."""

from __future__ import annotations

from math import prod

import pytest

from convgrad.contract import OPERATIONS
from convgrad.contract.base import validate
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.plans.cuda import plan_for
from convgrad_service.plans.cuda_device import H200, CudaDevice
from convgrad_service.plans.cuda_program import Launch
from convgrad_service.problems import problem_from
from tests.arrays import DTYPES, draw, integers, request_arrays, rng_for
from tests.cases import Case
from tests.first_layers import first_cases

ADA = CudaDevice("L40S", (8, 9), 142, 101376, 102400, 96 * 2**20, 48 * 10**9)
B200 = CudaDevice("B200", (10, 0), 148, 232448, 233472, 126 * 2**20, 180 * 10**9)
INSTANCES = set(FAMILIES.instances())
LAYOUTS = {1: ("NCW", "NWC"), 2: ("NCHW", "NHWC"), 3: ("NCDHW", "NDHWC")}


@pytest.mark.parametrize("device", [H200, ADA, B200], ids=lambda device: device.name)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", first_cases(), ids=lambda case: case.id)
def test_launches_fit(case: Case, dtype: str, device: CudaDevice) -> None:
    tensors = draw(case, rng_for(0), DTYPES[dtype], integers)
    for layout in LAYOUTS[case.ndim]:
        arrays = request_arrays(case, tensors, layout)
        params = {**case.params, "layout": layout, "precision": "high"}
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
