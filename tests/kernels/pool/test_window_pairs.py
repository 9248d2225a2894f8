"""Averages of 3x3 windows in 16-bit types, channels first: emulated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.pool import window_pairs
from convgrad_service.plans.cuda.device import H200
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.harness import answers, check, problem_and_tensors
from tests.support.numerics.arrays import DTYPES, draw, normals, rng_for
from tests.support.numerics.bounds import assert_same_bits
from tests.support.numerics.oracle import expected
from tests.support.numerics.pool_inputs import with_nans
from tests.support.numerics.window_cases import avg_pool

pytestmark = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")

SLIDING: dict[str, Any] = {"kernel_size": 3, "stride": 1, "padding": 1}
LAYERS: dict[str, tuple[tuple[int, int], tuple[int, int], dict[str, Any]]] = {
    "odd": ((3, 13), (17, 17), SLIDING),
    "even": ((2, 9), (8, 8), SLIDING),
    "small": ((5, 7), (3, 5), SLIDING),
    "no_padding": ((1, 11), (9, 30), {**SLIDING, "padding": 0}),
    "without_the_padding": ((2, 5), (13, 12), {**SLIDING, "count_include_pad": False}),
    "uneven_padding": ((1, 5), (6, 19), {**SLIDING, "padding": [[1, 0], [0, 1]]}),
    "long_lines": ((1, 3), (5, 150), SLIDING),
}
# Constants and devices that decide how planes are cut.
FEW = replace(H200, multiprocessors=1, shared_bytes_per_multiprocessor=9000)
CUTS = {"one block": 48 * 1024, "parts of planes": 1400}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("way", ["fwd", "bwd"])
@pytest.mark.parametrize("name", LAYERS)
def test_emulated(
    seed: int, monkeypatch: pytest.MonkeyPatch, name: str, way: str, dtype: str
) -> None:
    case = avg_pool(name, *LAYERS[name], way)
    for inputs in (normals, with_nans):
        tensors = draw(case, rng_for(seed, name, inputs.__name__), DTYPES[dtype], inputs)
        wanted = expected(case.operation, tensors, case.params)
        problem, arrays = problem_and_tensors(case, tensors, "NCHW")
        assert EmulatedBackend(FAMILIES).run(problem, arrays).kernel == "window_pairs"
        whole = answers(EmulatedBackend(FAMILIES), case, tensors, "NCHW")
        check(whole, wanted, "bounded", f"seed {seed}")
        for cut, most in CUTS.items():
            monkeypatch.setattr(window_pairs, "MOST_BYTES", most)
            found = answers(EmulatedBackend(FAMILIES, FEW), case, tensors, "NCHW")
            for array, like in zip(found.values(), whole.values(), strict=True):
                assert_same_bits(array, like, f"seed {seed}, {cut}")
