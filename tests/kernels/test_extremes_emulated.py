"""Extreme geometries in the emulator, which detects accesses outside the tensors."""

from __future__ import annotations

import pytest

from convgrad_service.backends.cuda.families import FAMILIES
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.harness import answers, check, drawn, with_layouts
from tests.support.numerics.cases import Case
from tests.support.numerics.extreme_cases import extreme_cases

pytestmark = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")


@pytest.mark.parametrize("case", extreme_cases(), ids=lambda case: case.id)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_extreme_geometry(seed: int, case: Case, dtype: str) -> None:
    tensors, wanted = drawn(seed, case, dtype, "bounded")
    backend = EmulatedBackend(FAMILIES)
    layout = None if "backprop" in case.operation else with_layouts(case.ndim, grouped=False)[-1]
    found = answers(backend, case, tensors, layout)
    check(found, wanted, "bounded", f"seed {seed}, {case.id} {dtype} {layout}")
