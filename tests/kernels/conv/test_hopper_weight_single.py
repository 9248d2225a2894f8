"""hopper_weight_single in the emulator and on a GPU: geometries, tiles and cluster sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from convgrad_service.backends.base import Backend
from convgrad_service.backends.cuda.backend import CudaBackend
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.conv.hopper_weight_single import (
    HopperWeightSingle,
    SingleTile,
)
from convgrad_service.backends.cuda.kernels.fallback.weight_direct import WeightDirect
from convgrad_service.plans.cuda.families import Families
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.harness import gates, with_layouts
from tests.support.kernels.weight_cases import CASES, EPILOGUE, NONFINITE
from tests.support.numerics.cases import Case
from tests.support.numerics.nonfinite import check_rule

emulated = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")
PLACES = [
    pytest.param(EmulatedBackend, marks=emulated, id="emulated"),
    pytest.param(partial(CudaBackend, poison=True), marks=pytest.mark.gpu, id="gpu"),
]
Place = Callable[..., Backend]

# One block, a cluster whose size is not a power of two, and one with more blocks than some sums
# have k-tiles.
CONFIGS = (
    SingleTile(64, 64, 1, single=True, blocks=2),
    SingleTile(64, 192, 1, single=True, split=3),
    SingleTile(128, 128, 2, single=True, split=8),
)


def alone(config: SingleTile) -> Families:
    return replace(FAMILIES, bwd_weight=(HopperWeightSingle(config), WeightDirect()))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_gates(place: Place, seed: int, name: str, config: SingleTile) -> None:
    layouts = with_layouts(CASES[name].ndim, grouped=False)
    gates(place(families=alone(config)), seed, CASES[name], "bfloat16", layouts[-1:])


@emulated
def test_float16(seed: int) -> None:
    case = CASES["3d_strided"]
    layouts = with_layouts(case.ndim, grouped=False)
    gates(EmulatedBackend(alone(CONFIGS[0])), seed, case, "float16", layouts)


@emulated
@pytest.mark.parametrize("name", NONFINITE)
def test_nonfinite(seed: int, name: str) -> None:
    layout = with_layouts(CASES[name].ndim, grouped=False)[-1]
    check_rule(EmulatedBackend(alone(CONFIGS[1])), seed, CASES[name], "bfloat16", layout)


@emulated
@pytest.mark.parametrize("case", EPILOGUE, ids=lambda case: case.id)
def test_epilogues(seed: int, case: Case) -> None:
    wide = (
        case.with_params("wide", weight_dtype="float32")
        if "accumulate" not in case.shapes
        else case
    )
    for asked in (case, wide):
        layouts = with_layouts(case.ndim, grouped=False)
        gates(EmulatedBackend(alone(CONFIGS[1])), seed, asked, "bfloat16", layouts[-1:])
