"""Float32 weight gradients of ``precision: high`` by planes of windows that do not overlap."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.conv.hopper_weight import HopperWeight
from convgrad_service.backends.cuda.kernels.conv.planes_weight import PlanesWeight
from convgrad_service.plans.cuda.device import H200
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.conv_work import work_of
from tests.support.kernels.harness import ROUNDED, gates, with_layouts
from tests.support.numerics.cases import EPILOGUES, FROM_CONV, Case
from tests.support.numerics.geometries import Conv
from tests.support.numerics.nonfinite import check_rule

OPERATION = "grouped_conv_bwd_weight"
GEOMETRIES = {
    "pointwise": Conv(4, 64, 72, (9, 11), (1, 1)),
    # The last row and column of the input belong to no window.
    "strided": Conv(4, 40, 24, (9, 18), (1, 1), 2),
    "windows": Conv(2, 32, 48, (8, 16), (2, 2), 2),
    "windows_apart": Conv(4, 32, 16, (10, 40), (2, 3), 5),
    "1d": Conv(3, 24, 32, (64,), (4,), 4),
    "3d": Conv(1, 16, 40, (4, 6, 16), (2, 2, 2), 2),
}
CASES = {
    name: FROM_CONV[OPERATION](name, conv).with_params("high", precision="high")
    for name, conv in GEOMETRIES.items()
}
EPILOGUE = [
    case.with_params("high", precision="high")
    for case in EPILOGUES
    if case.operation == OPERATION and "pointwise" in case.id
]

emulation = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")


@pytest.fixture(scope="module")
def by_planes() -> EmulatedBackend:
    return EmulatedBackend(
        replace(FAMILIES, bwd_weight=(PlanesWeight(HopperWeight(1), everywhere=True),))
    )


@emulation
@pytest.mark.parametrize("name", CASES)
def test_emulated(by_planes: EmulatedBackend, seed: int, name: str) -> None:
    case = CASES[name]
    gates(by_planes, seed, case, "tf32", [with_layouts(case.ndim, grouped=False)[-1]])


@emulation
@pytest.mark.parametrize("case", EPILOGUE, ids=lambda case: case.id)
def test_emulated_epilogues(by_planes: EmulatedBackend, seed: int, case: Case) -> None:
    gates(by_planes, seed, case, "tf32", [with_layouts(case.ndim, grouped=False)[-1]])


@emulation
@pytest.mark.parametrize("name", ["pointwise", "windows"])
def test_emulated_nonfinite(by_planes: EmulatedBackend, seed: int, name: str) -> None:
    case = CASES[name]
    layout = with_layouts(case.ndim, grouped=False)[-1]
    check_rule(by_planes, seed, case, "float32", layout, ROUNDED)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"dtype": DType.BFLOAT16}, "precision"),
        ({"precision": "highest"}, "precision"),
        ({"groups": 2}, "groups"),
        ({"kernel": 3, "pad": 1}, "overlap"),
        ({"kernel": 2, "pad": 1, "stride": 2}, "padding"),
        ({"size": 7}, "98 pixels"),
        ({"size": 8, "kernel": 2, "stride": 2}, "expected 8 or more"),
    ],
)
def test_refusals(given: dict[str, Any], reason: str) -> None:
    own = {"kernel": 1, "pad": 0, "dtype": DType.FLOAT32, "precision": "high", "size": 16}
    assert reason in str(
        PlanesWeight(everywhere=True).why_not(work_of("bwd_weight", **own | given), H200)
    )
