"""Convolutions whose result has few channels, as a GEMM and col2im."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.conv.col2im import Col2im
from convgrad_service.backends.cuda.kernels.conv.implicit_gemm import ImplicitGemm
from convgrad_service.backends.cuda.kernels.conv.pointwise_gemm import PointwiseGemm
from convgrad_service.backends.cuda.kernels.fallback.gather_direct import GatherDirect
from convgrad_service.plans.cuda.device import H200
from convgrad_service.plans.cuda.planner import plan_for
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.harness import answers, check, drawn, with_layouts
from tests.support.kernels.plans import problem_of
from tests.support.numerics.cases import Case, conv_bwd_data, conv_fwd, conv_transpose_fwd
from tests.support.numerics.geometries import Conv
from tests.support.numerics.nonfinite import check_rule

BACKWARD = {
    "dcgan": Conv(2, 3, 8, (6, 8), (4, 4), 2, 1),
    "first_layer": Conv(1, 3, 8, (13, 12), (7, 7), 2, 3),
    "taps_for_some_phases": Conv(1, 2, 5, (10, 13), (1, 2), (2, 3)),
    "dilated": Conv(1, 2, 8, (11, 9), (3, 3), 2, 2, (2, 3)),
    "uneven_padding": Conv(1, 8, 4, (9, 8), (3, 4), 1, ((0, 2), (3, 1))),
    "padding_beyond": Conv(1, 2, 4, (6, 5), (3, 3), 2, (4, 5)),
    "1d": Conv(2, 1, 6, (17,), (5,), 3, 2),
    "3d": Conv(1, 1, 5, (4, 6, 5), (3, 2, 3), 2, 1),
}
FORWARD = {
    "last_layer": Conv(2, 8, 3, (7, 6), (3, 3), 1, 1),
    "dilated": Conv(1, 16, 2, (9, 8), (3, 2), 1, 2, (2, 3)),
    "1d": Conv(2, 5, 1, (12,), (5,), 1, 4),
}
CASES = [
    *(conv_bwd_data(name, conv) for name, conv in BACKWARD.items()),
    conv_transpose_fwd("with_bias", BACKWARD["dcgan"]),
    *(conv_fwd(name, conv) for name, conv in FORWARD.items()),
]

pytestmark = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")


@pytest.fixture(scope="module")
def emulated() -> EmulatedBackend:
    family = Col2im((PointwiseGemm(), ImplicitGemm()), (GatherDirect(),))
    return EmulatedBackend(replace(FAMILIES, bwd_data=[family], fwd=[family]))


@pytest.mark.parametrize("gate", ["exact", "bounded"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_both_gates(
    emulated: EmulatedBackend, seed: int, case: Case, gate: str, dtype: str
) -> None:
    """Channels first and channels last."""
    tensors, wanted = drawn(seed, case, dtype, gate)
    for layout in with_layouts(case.ndim, grouped=False)[1:]:
        found = answers(emulated, case, tensors, layout)
        check(found, wanted, gate, f"seed {seed}, {case.id} {layout}")


@pytest.mark.parametrize("conv", list(BACKWARD.values())[:3])
def test_without_products_of_warpgroups(seed: int, conv: Conv) -> None:
    family = Col2im((ImplicitGemm(),), (GatherDirect(),))
    backend = EmulatedBackend(replace(FAMILIES, bwd_data=[family]))
    case = conv_bwd_data("implicit_gemm", conv)
    tensors, wanted = drawn(seed, case, "bfloat16", "exact")
    check(answers(backend, case, tensors), wanted, "exact", f"seed {seed}, {case.id}")


@pytest.mark.parametrize("case", CASES[::5], ids=lambda case: case.id)
def test_nonfinite(emulated: EmulatedBackend, seed: int, case: Case) -> None:
    check_rule(emulated, seed, case, "bfloat16", None)


def planned(op: str, dtype: str, conv: Conv, **params: Any) -> str:
    make = {"conv_bwd_data": conv_bwd_data, "conv_fwd": conv_fwd}[op]
    case = make("planned", conv).with_params("", **params)
    layout = with_layouts(conv.ndim, grouped=False)[2]
    return plan_for(problem_of(case, dtype, layout), H200, FAMILIES).kernel


def test_it_takes_what_it_was_faster_at() -> None:
    last_of_gan = Conv(128, 3, 160, (64, 64), (4, 4), 2, 1)
    stem_of_3d = Conv(8, 3, 64, (8, 112, 112), (3, 7, 7), (1, 2, 2), (1, 3, 3))
    segmentation = Conv(16, 128, 4, (64, 64), (3, 3), 1, 1)
    small = Conv(1, 64, 3, (64, 64), (7, 7), 1, 3)
    for dtype, params in (("bfloat16", {}), ("float32", {"precision": "high"}), ("float32", {})):
        assert planned("conv_bwd_data", dtype, last_of_gan, **params).endswith("_col2im")
        assert planned("conv_fwd", dtype, segmentation, **params).endswith("_col2im")
    # Persistent blocks store the products as planes.
    assert planned("conv_bwd_data", "bfloat16", last_of_gan).startswith("pointwise_gemm_fwd_64x48r")
    assert planned("conv_bwd_data", "bfloat16", stem_of_3d) == "hopper_first_data"
    assert planned("conv_fwd", "bfloat16", small).startswith("implicit_gemm")
