"""The gradient of max pooling from indices, channels last, by strips: emulated."""

from __future__ import annotations

import numpy as np
import pytest

from convgrad.errors import InvalidProblem
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.pool import route_strips
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.harness import (
    answers,
    check,
    problem_and_tensors,
    run,
    with_layouts,
)
from tests.support.numerics.arrays import DTYPES, draw, integers, normals, request_arrays, rng_for
from tests.support.numerics.bounds import assert_same_bits
from tests.support.numerics.cases import maxpool_bwd
from tests.support.numerics.geometries import Pool
from tests.support.numerics.oracle import expected
from tests.support.numerics.pool_inputs import bad_indices, sources

pytestmark = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")

POOLS = {
    "stride_2": Pool(2, 16, (13, 41), 3, 2, 1),
    "stride_2_no_padding": Pool(1, 12, (10, 23), 3, 2, 0),
    "stride_2_ceil": Pool(1, 8, (12, 20), 3, 2, 0, ceil_mode=True),
    "uneven_padding": Pool(1, 4, (6, 19), 3, 2, ((0, 1), (1, 0))),
    "stride_2_one_channel": Pool(3, 1, (7, 6), 3, 2, 1),
    "planes_of_their_own": Pool(1, 8, (3, 8, 9), (1, 3, 3), (1, 2, 2), (0, 1, 1)),
    "few_rows": Pool(2, 8, (3, 4), 3, 2, 1),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", POOLS)
def test_emulated(seed: int, monkeypatch: pytest.MonkeyPatch, name: str, dtype: str) -> None:
    monkeypatch.setattr(route_strips, "LEAST_STRIP", 3)
    backend, case = EmulatedBackend(FAMILIES), maxpool_bwd(name, POOLS[name])
    rng = rng_for(seed, name, dtype)
    layout = with_layouts(case.ndim, grouped=False)[-1]
    tensors = draw(case, rng, DTYPES[dtype], integers)
    wanted = expected(case.operation, tensors, case.params)
    for width in ("int32", "int64"):
        asked, given = sources(case, tensors)[width]
        problem, arrays = problem_and_tensors(asked, given, layout)
        outcome = backend.run(problem, arrays)
        assert outcome.kernel == "route_strips"
        check(answers(backend, asked, given, layout), wanted, "exact", f"seed {seed}, {width}")


@pytest.mark.parametrize(
    "name",
    [
        "stride_2",
        "stride_2_ceil",
        "planes_of_their_own",
    ],
)
def test_indices_outside_their_windows_are_refused(seed: int, name: str) -> None:
    backend, case = EmulatedBackend(FAMILIES), maxpool_bwd(name, POOLS[name])
    rng = rng_for(seed, name)
    layout = with_layouts(case.ndim, grouped=False)[-1]
    tensors = draw(case, rng, DTYPES["float32"], integers)
    for width in ("int32", "int64"):
        asked, given = sources(case, tensors)[width]
        for indices in bad_indices(rng, case, given["indices"]).values():
            arrays = request_arrays(asked, {**given, "indices": indices}, layout)
            with pytest.raises(InvalidProblem, match="outside its window"):
                run(backend, case.operation, arrays, {**asked.params, "layout": layout})


@pytest.mark.parametrize("name", ["stride_2", "planes_of_their_own"])
def test_bits_do_not_depend_on_strips_and_channels(
    seed: int, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    backend, case = EmulatedBackend(FAMILIES), maxpool_bwd(name, POOLS[name])
    layout = with_layouts(case.ndim, grouped=False)[-1]
    tensors = draw(case, rng_for(seed, name), DTYPES["bfloat16"], normals)
    tensors["input"] = np.sign(tensors["input"])  # many windows have the same maximum
    asked, given = sources(case, tensors)["int32"]
    (whole,) = answers(backend, asked, given, layout).values()
    monkeypatch.setattr(route_strips, "LEAST_STRIP", 2)
    (strips,) = answers(backend, asked, given, layout).values()
    assert_same_bits(strips, whole, "strips")
    singles = dict.fromkeys((2, 4, 8), (1,))
    monkeypatch.setattr(route_strips, "WIDTHS", singles)
    (single,) = answers(backend, asked, given, layout).values()
    assert_same_bits(single, whole, "channels one by one")
