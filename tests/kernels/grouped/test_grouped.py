"""Convolutions with few channels per group: on every backend, and tensor-core kernels emulated."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from convgrad_service.backends.base import Backend
from convgrad_service.backends.cuda.families import COPIES, FAMILIES
from convgrad_service.backends.cuda.kernels.fallback.gather_direct import GatherDirect
from convgrad_service.backends.cuda.kernels.fallback.weight_direct import WeightDirect
from convgrad_service.backends.cuda.kernels.grouped.grouped_gather import (
    Box,
    GroupedGather,
    boxes_of,
)
from convgrad_service.backends.cuda.kernels.grouped.grouped_weight import GroupedWeight
from convgrad_service.backends.cuda.kernels.grouped.grouped_weight_blocks import Share
from convgrad_service.backends.cuda.kernels.grouped.grouped_weight_shares import shares_of
from convgrad_service.backends.cuda.kernels.layout.channels_first import ConvThroughChannelsLast
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import Fragment
from convgrad_service.plans.cuda.works import ConvWork
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.grouped_cases import NOT_FINITE, grouped_cases
from tests.support.kernels.harness import gates, with_layouts
from tests.support.numerics.cases import EPILOGUES, Case
from tests.support.numerics.nonfinite import check_rule

ONE_WAY = ("conv_fwd", "conv_bwd_data", "grouped_conv_bwd_weight")
ALONE = [case for operation in ONE_WAY for case in grouped_cases(operation)]
# In the emulator, each dtype multiplies the number of compilations.
EMULATED = {
    "bfloat16": ALONE,
    "tf32": [case for case in ALONE if "c8" in case.name],
    "float32": [case for case in ALONE if case.name in NOT_FINITE or case.name == "c4"],
}
NON_FINITE = [case for case in ALONE if case.name in NOT_FINITE]
EPILOGUE = [case for case in EPILOGUES if "groups_4" in case.name and "1d" not in case.name]

emulation = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")


def case_id(case: Case) -> str:
    return case.id


@pytest.fixture(scope="module")
def emulated() -> EmulatedBackend:
    gather = (GroupedGather(), ConvThroughChannelsLast(GroupedGather(), COPIES), GatherDirect())
    weight = (GroupedWeight(), ConvThroughChannelsLast(GroupedWeight(), COPIES), WeightDirect())
    return EmulatedBackend(replace(FAMILIES, fwd=gather, bwd_data=gather, bwd_weight=weight))


class Gather(GroupedGather):
    """The family with small boxes, several per block."""

    def fragment(self, work: ConvWork, device: CudaDevice, box: Box) -> Fragment:
        few = replace(device, multiprocessors=1)
        every = list(boxes_of(work, few))
        fitting = [one for one in every if one.stages > 1 and one.positions > 5] or every
        return super().fragment(work, few, min(fitting, key=lambda one: one.positions))


class Weight(GroupedWeight):
    """The family with shares drawn at random, for few multiprocessors: several boxes per block."""

    def __init__(self, seed: int, *, copy_engine: bool) -> None:
        super().__init__(copy_engine=copy_engine)
        self._seed = seed

    def fragment(self, work: ConvWork, device: CudaDevice, share: Share) -> Fragment:
        # The same for equal works.
        draw = random.Random(f"{self._seed} {work.conv}")
        few = replace(device, multiprocessors=draw.choice((1, 2, 9)))
        engine = self._has_engine(work, few)
        every = [one for _, one in shares_of(work, few, engine)]
        return super().fragment(work, few, draw.choice(every))


@pytest.fixture(params=[False, True], ids=["threads", "copy_engine"])
def in_turn(request: pytest.FixtureRequest, seed: int) -> EmulatedBackend:
    gather = (Gather(), GatherDirect())
    weight = (Weight(seed, copy_engine=request.param), WeightDirect())
    return EmulatedBackend(replace(FAMILIES, fwd=gather, bwd_data=gather, bwd_weight=weight))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "tf32", "float32"])
@pytest.mark.parametrize("case", ALONE, ids=case_id)
def test_gates(backend: Backend, seed: int, case: Case, dtype: str) -> None:
    gates(backend, seed, case, dtype, with_layouts(case.ndim, grouped=True))


@pytest.mark.parametrize("case", NON_FINITE, ids=case_id)
def test_not_finite(backend: Backend, seed: int, case: Case) -> None:
    for layout in with_layouts(case.ndim, grouped=True):
        check_rule(backend, seed, case, "bfloat16", layout)


# Every third case of bfloat16, and every fourth of other dtypes; the rest are marked slow.
@emulation
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(
            case, dtype, id=f"{case.id}-{dtype}", marks=[pytest.mark.slow] if i % every else []
        )
        for dtype, cases in EMULATED.items()
        for every in [3 if dtype == "bfloat16" else 4]
        for i, case in enumerate(cases)
    ],
)
def test_emulated(emulated: EmulatedBackend, seed: int, case: Case, dtype: str) -> None:
    layouts = with_layouts(case.ndim, grouped=True)
    gates(emulated, seed, case, dtype, [layouts[0], layouts[2], layouts[5]])


@emulation
@pytest.mark.parametrize("case", ALONE, ids=case_id)
def test_emulated_in_turn(in_turn: EmulatedBackend, seed: int, case: Case) -> None:
    layout = with_layouts(case.ndim, grouped=False)[-1]
    gates(in_turn, seed, case, "bfloat16", [layout])
    if case.name in NOT_FINITE:
        check_rule(in_turn, seed, case, "bfloat16", layout)


@emulation
@pytest.mark.parametrize("case", NON_FINITE, ids=case_id)
def test_emulated_not_finite(emulated: EmulatedBackend, seed: int, case: Case) -> None:
    layout = with_layouts(case.ndim, grouped=False)[-1]
    check_rule(emulated, seed, case, "bfloat16", layout)
    check_rule(emulated, seed, case, "float32", layout)


@emulation
@pytest.mark.parametrize("case", EPILOGUE, ids=case_id)
def test_emulated_epilogues(emulated: EmulatedBackend, seed: int, case: Case) -> None:
    gates(emulated, seed, case, "bfloat16", with_layouts(case.ndim, grouped=False)[-1:])
