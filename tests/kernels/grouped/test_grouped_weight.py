"""Grouped weight gradients on Hopper, in all kinds of boxes, on every backend and emulated."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from convgrad.dtypes import DType
from convgrad_service.backends.base import Backend
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.fallback.weight_direct import WeightDirect
from convgrad_service.backends.cuda.kernels.grouped.grouped_weight import GroupedWeight
from convgrad_service.backends.cuda.kernels.grouped.grouped_weight_blocks import Share
from convgrad_service.backends.cuda.kernels.grouped.grouped_weight_shares import shares_of
from convgrad_service.plans.cuda.device import H200, CudaDevice
from convgrad_service.plans.cuda.planner import plan_for
from convgrad_service.plans.cuda.program import Fragment, Launch
from convgrad_service.plans.cuda.works import ConvWork
from convgrad_service.problems import GroupedConvBwdWeight
from convgrad_service.problems.geometry import ConvShape
from convgrad_service.problems.layouts import LAYOUTS
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.harness import gates, with_layouts
from tests.support.numerics.cases import EPILOGUES, FROM_CONV, Case
from tests.support.numerics.geometries import Conv
from tests.support.numerics.nonfinite import check_rule

OPERATION = "grouped_conv_bwd_weight"
GEOMETRIES = {
    "c4": Conv(2, 32, 32, (7, 9), (3, 3), padding=1, groups=8),
    "c8": Conv(3, 32, 32, (8, 7), (3, 3), padding=1, groups=4),
    # Partial slices of channels.
    "c8_24": Conv(2, 24, 24, (5, 6), (3, 3), padding=1, groups=3),
    "c16": Conv(3, 48, 48, (14, 14), (3, 3), padding=1, groups=3),
    "c32": Conv(2, 64, 64, (7, 7), (3, 3), padding=1, groups=2),
    # Several slices of a group.
    "c64": Conv(2, 128, 128, (7, 9), (3, 3), padding=1, groups=2),
    "c96": Conv(1, 192, 192, (6, 5), (3, 3), padding=1, groups=2),
    "c32_wide": Conv(1, 64, 64, (9, 16), (3, 3), padding=1, groups=2),
    "rows_left_over": Conv(2, 16, 16, (28, 28), (3, 3), padding=1, groups=2),
    # Rows that end within eight columns.
    "rows_end_early": Conv(1, 16, 16, (6, 17), (3, 3), padding=((1, 1), (2, 2)), groups=2),
    "images_left_over": Conv(5, 32, 32, (7, 7), (3, 3), padding=1, groups=2),
    "columns_in_turn": Conv(1, 16, 16, (5, 150), (3, 3), padding=1, groups=2),
    "asymmetric_padding": Conv(1, 16, 16, (12, 28), (3, 3), padding=((0, 1), (2, 1)), groups=2),
    "padding_beyond": Conv(1, 16, 16, (5, 4), (3, 3), padding=((4, 0), (1, 5)), groups=2),
    "no_padding": Conv(2, 32, 32, (3, 4), (3, 3), groups=2),
    # Columns of one remainder in a box, phases of dilated taps, and both.
    "strided": Conv(2, 64, 64, (14, 14), (3, 3), 2, 1, groups=2),
    "strided_c64": Conv(2, 128, 128, (14, 9), (3, 3), 2, 1, groups=2),
    "strided_odd": Conv(1, 32, 32, (9, 35), (3, 3), 2, 1, groups=2),
    "stride_3": Conv(1, 32, 32, (19, 35), (3, 3), 3, 1, groups=2),
    "dilated": Conv(2, 32, 32, (12, 17), (3, 3), 1, 2, dilation=2, groups=2),
    "dilated_strided": Conv(1, 32, 32, (22, 27), (3, 3), 2, 3, dilation=3, groups=2),
    # Taps of several blocks, an odd number of taps, one tap.
    "5x5": Conv(2, 32, 32, (9, 18), (5, 5), 1, 2, groups=4),
    "1x1": Conv(2, 32, 32, (5, 18), (1, 1), groups=4),
    "1d": Conv(2, 32, 32, (33,), (9,), 1, 4, groups=4),
    "3d": Conv(1, 32, 32, (4, 5, 9), (3, 3, 3), (1, 2, 2), 1, groups=4),
    "3d_near": Conv(1, 32, 32, (3, 5, 9), (3, 3, 3), 1, 1, groups=4),
    "3d_strided": Conv(2, 32, 32, (5, 6, 7), (3, 3, 3), 2, 1, groups=2),
}
CASES = {name: FROM_CONV[OPERATION](name, conv) for name, conv in GEOMETRIES.items()}
NOT_FINITE = ("c4", "c16", "c32", "c64", "padding_beyond", "strided", "dilated", "3d")
EPILOGUE = [case for case in EPILOGUES if case.operation == OPERATION and "groups_4" in case.name]
emulation = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")


class Drawn(GroupedWeight):
    """The family with a share drawn at random, for few multiprocessors: many boxes per block."""

    def __init__(self, seed: int, multiprocessors: int) -> None:
        super().__init__()
        self._seed, self._multiprocessors = seed, multiprocessors

    def fragment(self, work: ConvWork, device: CudaDevice, share: Share) -> Fragment:
        few = replace(device, multiprocessors=self._multiprocessors)
        # The same for equal works.
        draw = random.Random(f"{self._seed} {work.conv}")
        return super().fragment(
            work, few, draw.choice([one for _, one in shares_of(work, few, True)])
        )


def emulated(family: GroupedWeight) -> EmulatedBackend:
    return EmulatedBackend(replace(FAMILIES, bwd_weight=(family, WeightDirect())))


def last_layout(case: Case) -> list[str]:
    return with_layouts(case.ndim, grouped=False)[-1:]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_gates(backend: Backend, seed: int, name: str, dtype: str) -> None:
    case = CASES[name]
    gates(backend, seed, case, dtype, with_layouts(case.ndim, grouped=True))


@pytest.mark.parametrize("name", NOT_FINITE)
def test_not_finite(backend: Backend, seed: int, name: str) -> None:
    check_rule(backend, seed, CASES[name], "bfloat16", last_layout(CASES[name])[0])


@emulation
@pytest.mark.parametrize("name", CASES)
def test_emulated(seed: int, name: str) -> None:
    case = CASES[name]
    families = [Drawn(seed + draw, count) for draw in range(2) for count in (2, 9, 132)]
    for family in (GroupedWeight(), *families):
        gates(emulated(family), seed, case, "bfloat16", last_layout(case))


@emulation
@pytest.mark.parametrize("name", ["c4", "c32", "strided"])
def test_emulated_float16(seed: int, name: str) -> None:
    gates(emulated(GroupedWeight()), seed, CASES[name], "float16", last_layout(CASES[name]))


@emulation
@pytest.mark.parametrize("name", NOT_FINITE)
def test_emulated_not_finite(seed: int, name: str) -> None:
    for family in (GroupedWeight(), Drawn(seed, 2)):
        check_rule(emulated(family), seed, CASES[name], "bfloat16", last_layout(CASES[name])[0])


@emulation
@pytest.mark.parametrize("split_k", [1, 2, 5, 1000])
@pytest.mark.parametrize("name", ["c4", "c16", "strided"])
def test_emulated_splits(seed: int, name: str, split_k: int) -> None:
    case = CASES[name].with_params("split", split_k=split_k)
    gates(emulated(Drawn(seed, 2)), seed, case, "bfloat16", last_layout(case))


def test_splits_are_counted() -> None:
    """The number of splits fits eight bits."""
    conv = ConvShape(
        batch=20000,
        groups=2,
        in_channels=32,
        out_channels=32,
        input_size=(7, 7),
        kernel_size=(3, 3),
        output_size=(7, 7),
        stride=(1, 1),
        padding=((1, 1), (1, 1)),
        dilation=(1, 1),
    )
    for split_k in (None, 1, 300):
        problem = GroupedConvBwdWeight(
            conv=conv,
            dtype=DType.BFLOAT16,
            layout=LAYOUTS["NHWC"],
            weight_dtype=DType.BFLOAT16,
            split_k=split_k,
        )
        plan = plan_for(problem, H200, replace(FAMILIES, bwd_weight=(GroupedWeight(),)))
        (launch,) = plan.steps
        assert isinstance(launch, Launch)
        splits, slices, _ = launch.grid
        assert slices == 1
        assert splits == {1: 1, 300: 255}.get(split_k or 0, splits)
        assert launch.shared_bytes <= H200.shared_bytes_per_block


@emulation
@pytest.mark.parametrize("case", EPILOGUE, ids=lambda case: case.id)
def test_emulated_epilogues(seed: int, case: Case) -> None:
    gates(emulated(GroupedWeight()), seed, case, "bfloat16", last_layout(case))
