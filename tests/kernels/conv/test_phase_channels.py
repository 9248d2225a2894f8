"""Gradients of inputs with few channels, as a convolution with stride phases as channels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from convgrad_service.backends.cuda.families import COPIES, FAMILIES
from convgrad_service.backends.cuda.kernels.conv.phase_channels import PhaseChannels
from convgrad_service.backends.cuda.kernels.fallback.gather_direct import GatherDirect
from convgrad_service.plans.cuda.device import H200
from convgrad_service.plans.cuda.planner import plan_for
from convgrad_service.plans.cuda.program import CudaPlan
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.harness import answers, check, drawn, with_layouts
from tests.support.kernels.plans import problem_of
from tests.support.numerics.cases import Case, conv_bwd_data, conv_transpose_fwd
from tests.support.numerics.geometries import Conv
from tests.support.numerics.nonfinite import check_rule

GEOMETRIES = {
    "dcgan": Conv(2, 3, 8, (8, 10), (4, 4), 2, 1),
    "rows_left_over": Conv(1, 3, 5, (11, 9), (4, 3), (2, 3), 1),
    "first_layer": Conv(1, 3, 8, (13, 12), (7, 7), 2, 3),
    "taps_for_some_phases": Conv(1, 2, 5, (10, 13), (1, 2), (2, 3)),
    "uneven_padding": Conv(1, 2, 4, (9, 8), (3, 4), 2, ((0, 2), (3, 1))),
    "padding_beyond": Conv(1, 2, 4, (6, 5), (3, 3), 2, (4, 5)),
    "1d": Conv(2, 2, 6, (17,), (5,), 3, 2),
    "3d": Conv(1, 1, 5, (4, 6, 5), (3, 2, 3), 2, 1),
}
CASES = [conv_transpose_fwd(name, conv) for name, conv in GEOMETRIES.items()]

pytestmark = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")


@pytest.fixture(scope="module")
def emulated() -> EmulatedBackend:
    family = PhaseChannels((GatherDirect(),), COPIES)
    return EmulatedBackend(replace(FAMILIES, bwd_data=[family]))


@pytest.mark.parametrize("gate", ["exact", "bounded"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_both_gates(emulated: EmulatedBackend, seed: int, case: Case, gate: str) -> None:
    """With a bias, channels first and channels last."""
    tensors, wanted = drawn(seed, case, "bfloat16", gate)
    for layout in with_layouts(case.ndim, grouped=False)[1:]:
        found = answers(emulated, case, tensors, layout)
        check(found, wanted, gate, f"seed {seed}, {case.id} {layout}")


@pytest.mark.parametrize("case", CASES[:3], ids=lambda case: case.name)
def test_nonfinite(emulated: EmulatedBackend, seed: int, case: Case) -> None:
    check_rule(emulated, seed, case, "bfloat16", None)


def planned(conv: Conv, dtype: str, **params: Any) -> CudaPlan:
    case = conv_bwd_data("planned", conv).with_params("", precision="high", **params)
    return plan_for(
        problem_of(case, dtype, with_layouts(conv.ndim, grouped=False)[2]), H200, FAMILIES
    )


def test_it_takes_what_it_was_faster_at() -> None:
    dcgan = Conv(128, 3, 128, (64, 64), (4, 4), 2, 1)
    r3d = Conv(8, 3, 64, (16, 112, 112), (3, 7, 7), (1, 2, 2), (1, 3, 3))
    one_row = Conv(4, 1, 512, (160000,), (10,), 5)
    assert planned(dcgan, "float32").kernel.startswith("phase_channels")
    assert planned(dcgan, "bfloat16").kernel == "first_data"
    for dtype in ("bfloat16", "float32"):
        assert planned(r3d, dtype).kernel == "first_data"
        assert planned(one_row, dtype).kernel.startswith("phase_channels")
    with_epilogue = planned(one_row, "bfloat16", alpha=0.5)
    assert "an epilogue" in dict(with_epilogue.passed_over)["phase_channels"]
