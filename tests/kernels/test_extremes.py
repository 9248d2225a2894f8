"""Extreme geometries are cheap to compute, but a kernel that pads in memory or overflows 32 bits
fails."""

from __future__ import annotations

import pytest

from convgrad_service.backends.base import Backend
from tests.support.kernels.harness import answers, check, drawn, with_layouts
from tests.support.numerics.cases import Case
from tests.support.numerics.extreme_cases import extreme_cases


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", extreme_cases(), ids=lambda case: case.id)
def test_extreme_geometry(backend: Backend, seed: int, case: Case, dtype: str) -> None:
    tensors, wanted = drawn(seed, case, dtype, "bounded")
    layouts = [None] if "backprop" in case.operation else with_layouts(case.ndim, grouped=False)
    for layout in layouts:
        found = answers(backend, case, tensors, layout)
        check(found, wanted, "bounded", f"seed {seed}, {case.id} {dtype} {layout}")
