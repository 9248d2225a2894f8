"""All instruction-set levels that this CPU supports, not only the best, which is tested anyway."""

from __future__ import annotations

import pytest

from convgrad_service.backends.cpu import CpuBackend
from tests.support.kernels.cpu_levels import LEVELS
from tests.support.kernels.harness import answers, check, drawn, with_layouts
from tests.support.numerics.arrays import DTYPES
from tests.support.numerics.cases import FROM_CONV, FUSED, Case, conv_cases, pool_cases

CASES = [
    *(case for operation in FROM_CONV for case in conv_cases(operation)),
    *(
        case
        for n in (1, 2, 3)
        for way in ("fwd", "bwd")
        for case in pool_cases(f"maxpool{n}d_{way}")
    ),
    *FUSED,
]


@pytest.fixture(scope="module", params=LEVELS)
def lesser(request: pytest.FixtureRequest) -> CpuBackend:
    """A CPU backend for each level below the best."""
    return CpuBackend(threads=2, level=request.param)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_lesser_levels(lesser: CpuBackend, seed: int, case: Case, dtype: str) -> None:
    tensors, wanted = drawn(seed, case, dtype, "bounded")
    for layout in with_layouts(case.ndim, grouped=False)[1:]:
        found = answers(lesser, case, tensors, layout)
        check(found, wanted, "bounded", f"seed {seed}, {case.id} {dtype} {layout}")
