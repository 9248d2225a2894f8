"""Gradients of inputs of few channels as a convolution whose channels are the stride's phases."""

from __future__ import annotations

from dataclasses import replace

import pytest

from convgrad_service.backends.cuda.families import COPIES, FAMILIES
from convgrad_service.backends.cuda.kernels.conv.phase_channels import PhaseChannels
from convgrad_service.backends.cuda.kernels.fallback.gather_direct import GatherDirect
from convgrad_service.plans.cuda.device import H200
from convgrad_service.plans.cuda.planner import plan_for
from tests.cases import Case, conv_bwd_data, conv_transpose_fwd
from tests.emulator.backend import EmulatedBackend, works_here
from tests.geometries import Conv
from tests.kernels.harness import answers, check, drawn, with_layouts
from tests.kernels.nonfinite import check_rule
from tests.unit.test_plans_cuda import problem_of

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
    """With a bias, in either order of dimensions."""
    tensors, wanted = drawn(seed, case, "bfloat16", gate)
    for layout in with_layouts(case.ndim, grouped=False)[1:]:
        found = answers(emulated, case, tensors, layout)
        check(found, wanted, gate, f"seed {seed}, {case.id} {layout}")


@pytest.mark.parametrize("case", CASES[:3], ids=lambda case: case.name)
def test_nonfinite(emulated: EmulatedBackend, seed: int, case: Case) -> None:
    check_rule(emulated, seed, case, "bfloat16", None)


def test_it_takes_strided_first_layers_that_no_kernel_of_their_own_does() -> None:
    dcgan = conv_bwd_data("dcgan", Conv(128, 3, 128, (64, 64), (4, 4), 2, 1))
    for dtype in ("bfloat16", "float32"):
        high = dcgan.with_params("high", precision="high")
        plan = plan_for(problem_of(high, dtype, "NHWC"), H200, FAMILIES)
        assert plan.kernel.startswith("phase_channels"), plan.kernel
    alpha = dcgan.with_params("alpha", alpha=0.5)
    plan = plan_for(problem_of(alpha, "bfloat16", "NHWC"), H200, FAMILIES)
    assert "an epilogue" in dict(plan.passed_over)["phase_channels"]
