"""simt_gemm, emulated: every operation and type, with few slices of the terms and many."""

from __future__ import annotations

from dataclasses import replace

import pytest

from convgrad_service.backends.cuda.kernels.conv.simt_gemm import Config
from convgrad_service.plans.cuda.device import H200
from convgrad_service.plans.cuda.planner import plan_for
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.cuda_backends import simt_gemm
from tests.support.kernels.harness import answers, check, drawn, problem_and_tensors
from tests.support.numerics.cases import FROM_CONV, Case
from tests.support.numerics.geometries import Conv
from tests.support.numerics.nonfinite import check_rule

pytestmark = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")

CONVS = {
    "vectors": Conv(5, 68, 36, (1, 1), (1, 1)),
    "one_pixel": Conv(1, 40, 132, (1, 1), (1, 1)),
    "odd_channels": Conv(3, 19, 46, (1, 1), (1, 1)),
    "planes": Conv(2, 24, 12, (3, 5), (1, 1)),
    "vectors_of_pixels": Conv(3, 12, 8, (4, 5), (1, 1)),
    "one_channel": Conv(4, 1, 9, (1, 2), (1, 1)),
}


def without_bias(case: Case) -> Case:
    shapes = {name: shape for name, shape in case.shapes.items() if name != "bias"}
    return replace(case, shapes=shapes)


CASES = [
    without_bias(FROM_CONV[op](name, conv)) for op in FROM_CONV for name, conv in CONVS.items()
]
CONFIGS = {
    "one_slice": Config(128, 4, 3),
    "slices": Config(256, 2, 2),
    "groups_of_slices": Config(512, 1, 1),
    "one_thread": Config(128, 0, 0),
    "chosen": None,
}


@pytest.mark.parametrize("gate", ["exact", "bounded"])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_right(seed: int, case: Case, config: str, gate: str) -> None:
    backend = EmulatedBackend(simt_gemm(CONFIGS[config]))
    for dtype in ("float16", "bfloat16", "float32"):
        tensors, wanted = drawn(seed, case, dtype, gate)
        for layout in ("NHWC", "NCHW"):
            problem, _ = problem_and_tensors(case, tensors, layout)
            plan = plan_for(problem, H200, simt_gemm(CONFIGS[config]))
            assert "simt_gemm" in plan.kernel
            found = answers(backend, case, tensors, layout)
            check(found, wanted, gate, f"seed {seed}, {case.id} {dtype} {layout}")


@pytest.mark.parametrize("config", ["slices", "groups_of_slices"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_nonfinite(seed: int, case: Case, config: str) -> None:
    check_rule(EmulatedBackend(simt_gemm(CONFIGS[config])), seed, case, "bfloat16", "NHWC")
