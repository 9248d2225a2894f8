"""Convolutions of few channels a group, through every backend and, emulated, the tensor cores'."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from convgrad_service.backends.base import Backend
from convgrad_service.backends.cuda.families import COPIES, FAMILIES
from convgrad_service.backends.cuda.kernels.gather_direct import GatherDirect
from convgrad_service.backends.cuda.kernels.grouped_first import GroupedChannelsFirst
from convgrad_service.backends.cuda.kernels.grouped_gather import GroupedGather
from convgrad_service.backends.cuda.kernels.grouped_weight import GroupedWeight
from convgrad_service.backends.cuda.kernels.weight_direct import WeightDirect
from tests.arrays import DTYPES, draw, normals, rng_for
from tests.cases import EPILOGUES, Case
from tests.emulator.backend import EmulatedBackend, works_here
from tests.kernels.grouped_cases import NOT_FINITE, grouped_cases
from tests.kernels.harness import answers, check, drawn, with_layouts
from tests.oracle import expected

ONE_WAY = ("conv_fwd", "conv_bwd_data", "grouped_conv_bwd_weight")
ALONE = [case for operation in ONE_WAY for case in grouped_cases(operation)]
# With emulation each dtype takes as many compilations again.
EMULATED = {"bfloat16": ALONE, "float32": [case for case in ALONE if "c8" in case.name]}
NON_FINITE = [case for case in ALONE if case.name in NOT_FINITE]
EPILOGUE = [case for case in EPILOGUES if "groups_4" in case.name and "1d" not in case.name]
# What rounding both factors to TF32 costs.
ROUNDED = {"float32": 2.0**-10}

emulation = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")


@pytest.fixture(scope="module")
def emulated() -> EmulatedBackend:
    gather = (GroupedGather(), GroupedChannelsFirst(GroupedGather(), COPIES), GatherDirect())
    weight = (GroupedWeight(), GroupedChannelsFirst(GroupedWeight(), COPIES), WeightDirect())
    return EmulatedBackend(replace(FAMILIES, fwd=gather, bwd_data=gather, bwd_weight=weight))


def gates(backend: Backend, seed: int, case: Case, dtype: str, layouts: list[str | None]) -> None:
    """Both gates, in TF32 where the type is float32."""
    asked = case.with_params("high", precision="high") if dtype == "float32" else case
    for gate in ("exact", "bounded"):
        tensors, wanted = drawn(seed, asked, dtype, gate)
        for layout in layouts:
            found = answers(backend, asked, tensors, layout)
            what = f"seed {seed}, {case.id} {dtype} {layout}"
            check(found, wanted, gate, what, ROUNDED.get(dtype, 0.0))


def not_finite(backend: Backend, seed: int, case: Case, dtype: str, layout: str | None) -> None:
    """Infinities and NaNs reach what they meet, and never another group."""
    rng = rng_for(seed, case.id, dtype)
    tensors = draw(case, rng, DTYPES[dtype], normals)
    tensor = tensors[rng.choice(sorted(tensors))]
    for value in rng.choice([np.inf, -np.inf, np.nan], 3):
        tensor.flat[rng.integers(tensor.size)] = value
    wanted = expected(case.operation, tensors, case.params)
    found = answers(backend, case, tensors, layout)
    check(found, wanted, "bounded", f"seed {seed}, {case.id} {dtype} {layout}")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("case", ALONE, ids=lambda case: case.id)
def test_gates(backend: Backend, seed: int, case: Case, dtype: str) -> None:
    gates(backend, seed, case, dtype, with_layouts(case.ndim, grouped=True))


@pytest.mark.parametrize("case", NON_FINITE, ids=lambda case: case.id)
def test_not_finite(backend: Backend, seed: int, case: Case) -> None:
    for layout in with_layouts(case.ndim, grouped=True):
        not_finite(backend, seed, case, "bfloat16", layout)


@emulation
@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, dtype) for dtype, cases in EMULATED.items() for case in cases],
    ids=lambda value: value if isinstance(value, str) else value.id,
)
def test_emulated(emulated: EmulatedBackend, seed: int, case: Case, dtype: str) -> None:
    layouts = with_layouts(case.ndim, grouped=True)
    gates(emulated, seed, case, dtype, [layouts[0], layouts[2], layouts[5]])


@emulation
@pytest.mark.parametrize("case", NON_FINITE, ids=lambda case: case.id)
def test_emulated_not_finite(emulated: EmulatedBackend, seed: int, case: Case) -> None:
    not_finite(emulated, seed, case, "bfloat16", with_layouts(case.ndim, grouped=False)[-1])


@emulation
@pytest.mark.parametrize("case", EPILOGUE, ids=lambda case: case.id)
def test_emulated_epilogues(emulated: EmulatedBackend, seed: int, case: Case) -> None:
    gates(emulated, seed, case, "bfloat16", with_layouts(case.ndim, grouped=False)[-1:])
