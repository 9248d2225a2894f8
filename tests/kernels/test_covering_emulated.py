"""Random dense layers on the kernels that plans choose, in the emulator.

gpu_sanitize.py runs such layers under compute-sanitizer on a GPU; these tests need none, and also
check the results.
"""

from __future__ import annotations

import pytest

from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.plans.cuda.device import H200
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.covering import covering
from tests.support.kernels.harness import answers, check
from tests.support.numerics.arrays import DTYPES, draw, integers, rng_for
from tests.support.numerics.oracle import expected

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64"),
]

DRAWS = 80


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
