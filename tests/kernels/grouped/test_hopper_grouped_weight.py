"""Grouped weight gradients on Hopper, in all kinds of tiles, on every backend and emulated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from convgrad.dtypes import DType
from convgrad_service.backends.base import Backend
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.fallback.weight_direct import WeightDirect
from convgrad_service.backends.cuda.kernels.grouped.hopper_grouped_weight import (
    HopperGroupedWeight,
    Share,
    shares_of,
)
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
    "c32_wide": Conv(1, 64, 64, (9, 16), (3, 3), padding=1, groups=2),
    "images_left_over": Conv(5, 32, 32, (7, 7), (3, 3), padding=1, groups=2),
    "rows_left_over": Conv(2, 16, 16, (28, 28), (3, 3), padding=1, groups=2),
    "columns_in_turn": Conv(1, 16, 16, (5, 150), (3, 3), padding=1, groups=2),
    "asymmetric_padding": Conv(1, 16, 16, (12, 28), (3, 3), padding=((0, 1), (2, 1)), groups=2),
    "padding_beyond": Conv(1, 16, 16, (5, 4), (3, 3), padding=((4, 0), (1, 5)), groups=2),
    "no_padding": Conv(2, 32, 32, (3, 4), (3, 3), groups=2),
    # Rows that end within eight columns: products read the first pixels of the next row.
    "rows_end_early": Conv(1, 16, 16, (6, 17), (3, 3), padding=((1, 1), (2, 2)), groups=2),
}
CASES = {name: FROM_CONV[OPERATION](name, conv) for name, conv in GEOMETRIES.items()}
NOT_FINITE = ("c4", "c16", "c32", "padding_beyond", "rows_end_early")
EPILOGUE = [case for case in EPILOGUES if case.operation == OPERATION and "groups_4" in case.name]
emulation = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")


class InTurn(HopperGroupedWeight):
    """The family with small tiles, many per block."""

    def fragment(self, work: ConvWork, device: CudaDevice, share: Share) -> Fragment:
        few = replace(device, multiprocessors=2)
        small = min(shares_of(work, few), key=lambda one: (one.images, one.rows, one.columns))
        return super().fragment(work, few, small)


class Together(HopperGroupedWeight):
    """The family with the maximum number of images per tile."""

    def fragment(self, work: ConvWork, device: CudaDevice, share: Share) -> Fragment:
        most = max(shares_of(work, device), key=lambda one: one.images)
        return super().fragment(work, device, most)


def emulated(family: HopperGroupedWeight) -> EmulatedBackend:
    return EmulatedBackend(replace(FAMILIES, bwd_weight=(family, WeightDirect())))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_gates(backend: Backend, seed: int, name: str, dtype: str) -> None:
    gates(backend, seed, CASES[name], dtype, with_layouts(2, grouped=True))


@pytest.mark.parametrize("name", NOT_FINITE)
def test_not_finite(backend: Backend, seed: int, name: str) -> None:
    check_rule(backend, seed, CASES[name], "bfloat16", with_layouts(2, grouped=False)[-1])


@emulation
@pytest.mark.parametrize("name", CASES)
def test_emulated(seed: int, name: str) -> None:
    layouts = with_layouts(2, grouped=False)[-1:]
    for family in (HopperGroupedWeight(), InTurn(), Together()):
        gates(emulated(family), seed, CASES[name], "bfloat16", layouts)


@emulation
@pytest.mark.parametrize("name", ["c4", "c32"])
def test_emulated_float16(seed: int, name: str) -> None:
    layouts = with_layouts(2, grouped=False)[-1:]
    gates(emulated(HopperGroupedWeight()), seed, CASES[name], "float16", layouts)


@emulation
@pytest.mark.parametrize("name", NOT_FINITE)
def test_emulated_not_finite(seed: int, name: str) -> None:
    layout = with_layouts(2, grouped=False)[-1]
    check_rule(emulated(HopperGroupedWeight()), seed, CASES[name], "bfloat16", layout)


@emulation
@pytest.mark.parametrize("split_k", [1, 2, 5, 1000])
@pytest.mark.parametrize("name", ["c4", "c16", "c32"])
def test_emulated_shares(seed: int, name: str, split_k: int) -> None:
    case = CASES[name].with_params("split", split_k=split_k)
    layouts = with_layouts(2, grouped=False)[-1:]
    gates(emulated(InTurn()), seed, case, "bfloat16", layouts)


def test_shares_are_counted() -> None:
    """The number of shares fits eight bits."""
    conv = ConvShape(
        batch=2000,
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
        plan = plan_for(problem, H200, replace(FAMILIES, bwd_weight=(HopperGroupedWeight(),)))
        (launch,) = plan.steps
        assert isinstance(launch, Launch)
        slices, shares, _ = launch.grid
        assert slices == 1
        assert shares == {1: 1, 300: 255}.get(split_k or 0, shares)
        assert launch.shared_bytes <= H200.shared_bytes_per_block


@emulation
@pytest.mark.parametrize("case", EPILOGUE, ids=lambda case: case.id)
def test_emulated_epilogues(seed: int, case: Case) -> None:
    layouts = with_layouts(case.ndim, grouped=False)[-1:]
    gates(emulated(HopperGroupedWeight()), seed, case, "bfloat16", layouts)
