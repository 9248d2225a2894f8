"""Float32 weight gradients of ``precision: high`` by copies with the batch last."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.conv.batch_last_weight import BatchLastWeight
from convgrad_service.backends.cuda.kernels.conv.hopper_weight import HopperWeight
from convgrad_service.plans.cuda.device import H200
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.conv_work import work_of
from tests.support.kernels.harness import ROUNDED, gates, with_layouts
from tests.support.numerics.cases import EPILOGUES, FROM_CONV, Case
from tests.support.numerics.geometries import Conv
from tests.support.numerics.nonfinite import check_rule

OPERATION = "grouped_conv_bwd_weight"
GEOMETRIES = {
    "3x3": Conv(8, 32, 40, (5, 9), (3, 3), 1, 1),
    "strided": Conv(32, 16, 24, (6, 8), (4, 4), 2, 1),
    "wide_strides": Conv(12, 16, 24, (9, 12), (2, 5), 3, 2),
    "dilated": Conv(8, 16, 16, (9, 12), (3, 3), 2, 3, 2),
    "1d": Conv(40, 24, 32, (14,), (3,), 2, 1),
    "3d": Conv(8, 16, 24, (3, 4, 4), (2, 3, 2), 2, 1),
}
CASES = {
    name: FROM_CONV[OPERATION](name, conv).with_params("high", precision="high")
    for name, conv in GEOMETRIES.items()
}

emulation = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")


@pytest.fixture(scope="module")
def batch_last() -> EmulatedBackend:
    return EmulatedBackend(
        replace(FAMILIES, bwd_weight=(BatchLastWeight(HopperWeight(1), everywhere=True),))
    )


@emulation
@pytest.mark.parametrize("last", [False, True], ids=["channels_first", "channels_last"])
@pytest.mark.parametrize("name", CASES)
def test_emulated(batch_last: EmulatedBackend, seed: int, name: str, last: bool) -> None:
    case = CASES[name]
    gates(batch_last, seed, case, "tf32", [with_layouts(case.ndim, grouped=False)[-last]])
