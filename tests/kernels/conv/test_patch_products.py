"""Layers of non-overlapping patches, computed as matrix products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from convgrad_service.backends.base import Backend
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.conv.dense_gather import DenseGather
from convgrad_service.backends.cuda.kernels.conv.dense_weight import DenseWeight
from convgrad_service.backends.cuda.kernels.conv.patch_products import PatchProducts
from convgrad_service.backends.cuda.kernels.fallback.weight_tile import WeightTile
from convgrad_service.plans.cuda.device import H200
from convgrad_service.plans.cuda.planner import plan_for
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.harness import answers, check, drawn, with_layouts
from tests.support.kernels.plans import problem_of
from tests.support.numerics.cases import Case, conv_bwd_data, conv_fwd, grouped_conv_bwd_weight
from tests.support.numerics.geometries import Conv

PATCHES = {
    "of_14": Conv(2, 3, 24, (28, 42), (14, 14), 14),
    "of_16": Conv(1, 3, 40, (32, 48), (16, 16), 16),
    "rectangles": Conv(2, 4, 16, (20, 24), (10, 4), (10, 4)),
    "in_3d": Conv(1, 3, 16, (4, 14, 21), (2, 7, 7), (2, 7, 7)),
    "in_1d": Conv(2, 2, 16, (320,), (64,), 64),
}
# The remainder belongs to no patch: its gradient is zero, which another kernel writes.
LEFT_OVER = Conv(2, 3, 24, (31, 45), (14, 14), 14)
CASES = [
    *(
        make(name, conv)
        for name, conv in PATCHES.items()
        for make in (conv_fwd, conv_bwd_data, grouped_conv_bwd_weight)
    ),
    conv_fwd("of_4", Conv(2, 3, 24, (8, 12), (4, 4), 4)),
    conv_fwd("left_over", LEFT_OVER),
    grouped_conv_bwd_weight("left_over", LEFT_OVER),
]
TF32 = 2.0**-10  # error of rounding the factors

emulation = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")


@pytest.fixture(scope="module")
def emulated() -> EmulatedBackend:
    gather, weight = (
        PatchProducts((DenseGather(1, 1),)),
        PatchProducts((DenseWeight(1, 1), WeightTile())),
    )
    return EmulatedBackend(replace(FAMILIES, fwd=[gather], bwd_data=[gather], bwd_weight=[weight]))


def compare(backend: Backend, seed: int, case: Case, dtype: str) -> None:
    rounded = dtype == "tf32"
    asked = case.with_params("high", precision="high") if rounded else case
    for gate in ("exact", "bounded"):
        tensors, wanted = drawn(seed, asked, "float32" if rounded else dtype, gate)
        for layout in with_layouts(case.ndim, grouped=False)[1:]:
            found = answers(backend, asked, tensors, layout)
            what = f"seed {seed}, {case.id} {dtype} {layout}"
            check(found, wanted, gate, what, TF32 if rounded else 0.0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "tf32", "float32"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_backend(backend: Backend, seed: int, case: Case, dtype: str) -> None:
    compare(backend, seed, case, dtype)


@emulation
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_emulated(emulated: EmulatedBackend, seed: int, case: Case, dtype: str) -> None:
    compare(emulated, seed, case, dtype)


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("make", [conv_fwd, conv_bwd_data, grouped_conv_bwd_weight])
def test_a_plan_takes_them_as_products(make: Callable[[str, Conv], Case], layout: str) -> None:
    """The first layer of a ViT."""
    patches = Conv(64, 3, 768, (224, 224), (16, 16), 16, 0)
    problem = problem_of(make("vit", patches), "bfloat16", layout)
    assert plan_for(problem, H200, FAMILIES).kernel.startswith("patch_products_")
