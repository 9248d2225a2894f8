"""Plans at the limits of what kernels count in 32 bits, and of what a grid holds; no GPU."""

from __future__ import annotations

import pytest

from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.plans.cuda import plan_for
from convgrad_service.plans.cuda_device import H200
from tests.large_tensors import LARGE, MORE_THAN
from tests.unit.test_plans_cuda import check_plan


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
