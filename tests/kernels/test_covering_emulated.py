"""Random layers in the emulator, on the kernels that plans choose and on others.

gpu_sanitize.py runs such layers under compute-sanitizer on a GPU; these tests need none, and also
check the results.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.plans.cuda.device import H200
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.conv_work import ADA
from tests.support.kernels.covering import covering, drawn_layer
from tests.support.kernels.cuda_backends import shuffled
from tests.support.kernels.harness import answers, check
from tests.support.numerics.arrays import DTYPES, draw, integers, normals, rng_for
from tests.support.numerics.classes import CLASSES
from tests.support.numerics.oracle import TF32, expected

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64"),
]

DRAWS = 80
# With few multiprocessors, even small layers have several waves of tiles.
DEVICES = (H200, replace(H200, multiprocessors=5), ADA)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_dense_layers(dtype: str, seed: int) -> None:
    """Run enough layers to launch every kernel instance that the draws launch."""
    backend = EmulatedBackend(FAMILIES)
    few = covering(H200, FAMILIES, DRAWS, ("dense",), (dtype,))
    assert few
    for one in few:
        tensors = draw(one.case, rng_for(seed, one.case.id), DTYPES[dtype], integers)
        wanted = expected(one.case.operation, tensors, one.case.params)
        found = answers(backend, one.case, tensors, one.layout)
        check(found, wanted, "exact", f"seed {seed}, {one.layout}, {dtype}, {one.case}")


@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=[pytest.mark.slow] if n >= len(CLASSES) else []) for n in range(400)],
)
def test_layers_on_any_families(seed: int, number: int) -> None:
    """A layer of each class in turn, through both gates."""
    rng = Random(f"{seed} {number}")
    dtype = rng.choice(("bfloat16", "float16", "float32"))
    case, layout = drawn_layer(list(CLASSES)[number % len(CLASSES)], dtype, rng)
    backend = EmulatedBackend(shuffled(rng), rng.choice(DEVICES))
    inexact = "silu" in case.params.values() or "avg" in case.operation
    for gate, numbers in (("bounded" if inexact else "exact", integers), ("bounded", normals)):
        tensors = draw(case, rng_for(seed, number), DTYPES[dtype], numbers)
        wanted = expected(case.operation, tensors, case.params)
        found = answers(backend, case, tensors, layout)
        what = f"seed {seed}, number {number}, {layout}, {dtype}, {case}"
        check(found, wanted, gate, what, TF32 if case.params.get("precision") == "high" else 0.0)
