"""float32's own products with few channels of the source, forward and backward, emulated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from convgrad_service.backends.base import Backend
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.conv.few_sources import FewSources
from convgrad_service.backends.cuda.kernels.conv.first_forward import FirstForward
from convgrad_service.plans.cuda.device import H200
from convgrad_service.plans.cuda.planner import plan_for
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.harness import answers, check, drawn, problem_and_tensors
from tests.support.numerics.cases import Case, conv_bwd_data, conv_fwd
from tests.support.numerics.geometries import Conv
from tests.support.numerics.nonfinite import check_rule

HIGHEST = {"precision": "highest"}
# Predicted times would leave some of these small layers to others.
FEW = replace(FAMILIES, fwd=(FewSources(), FirstForward()), bwd_data=(FewSources(), FirstForward()))
LAYERS = {
    "segmentation": Conv(2, 40, 3, (9, 37), (3, 3), 1, 1),
    "asymmetric": Conv(1, 33, 8, (8, 11), (3, 4), 1, ((0, 2), (3, 1))),
    "no_padding": Conv(2, 20, 1, (7, 40), (5, 5), 1, 0),
    "more_padding_than_taps": Conv(1, 9, 5, (6, 5), (2, 3), 1, (3, 4)),
    "1x1": Conv(2, 64, 2, (6, 70), (1, 1), 1, 0),
    "1d": Conv(2, 24, 6, (130,), (7,), 1, 3),
    "3d": Conv(1, 16, 3, (4, 6, 5), (3, 3, 2), 1, 1),
}
STACKED = {
    "frames": Conv(2, 6, 20, (14, 19), (5, 5), 2, 2),
    "depth": Conv(1, 8, 40, (9, 33), (3, 3), 1, 1),
    "volumes": Conv(1, 5, 16, (4, 6, 7), (3, 3, 3), 2, 1),
}


def _epilogue(case: Case, conv: Conv) -> Case:
    return case.with_tensor("accumulate", conv.input_shape).with_params(
        "bilinear", alpha=2.0, beta=-0.25
    )


CASES = [
    *(conv_bwd_data(name, conv).with_params("", **HIGHEST) for name, conv in LAYERS.items()),
    *(conv_fwd(name, conv).with_params("", **HIGHEST) for name, conv in STACKED.items()),
    *(
        _epilogue(conv_bwd_data(name, LAYERS[name]), LAYERS[name]).with_params("", **HIGHEST)
        for name in ("asymmetric", "3d")
    ),
]
LAYOUTS = {1: ("NCW", "NWC"), 2: ("NCHW", "NHWC"), 3: ("NCDHW", "NDHWC")}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_plans_are_of_this_kernel(case: Case) -> None:
    for layout in LAYOUTS[case.ndim]:
        problem, _ = problem_and_tensors(case, drawn(0, case, "float32", "exact")[0], layout)
        kernel = plan_for(problem, H200, FEW).kernel
        assert kernel.startswith(("first_forward", "few_sources")), kernel


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_backend(backend: Backend, seed: int, case: Case) -> None:
    _compare(backend, seed, case)


@pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_emulated(seed: int, case: Case) -> None:
    backend = EmulatedBackend(FEW)
    _compare(backend, seed, case)
    check_rule(backend, seed, case, "float32", LAYOUTS[case.ndim][-1])


def _compare(backend: Backend, seed: int, case: Case) -> None:
    for layout in LAYOUTS[case.ndim]:
        for gate in ("exact", "bounded"):
            tensors, wanted = drawn(seed, case, "float32", gate)
            found = answers(backend, case, tensors, layout)
            check(found, wanted, gate, f"seed {seed}, {case.id} {layout}")
