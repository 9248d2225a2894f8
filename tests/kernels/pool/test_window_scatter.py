"""The gradient of max pooling from indices, through cells in shared memory: emulated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from convgrad.errors import InvalidProblem
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.pool import window_scatter
from convgrad_service.plans.cuda.device import H200
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

SCATTER = replace(FAMILIES, windows=(window_scatter.WindowScatter(),))
POOLS = {
    "stride_2": Pool(2, 16, (13, 41), 3, 2, 1),
    "stride_2_no_padding": Pool(1, 12, (10, 23), 3, 2, 0),
    "stride_2_ceil": Pool(1, 8, (12, 20), 3, 2, 0, ceil_mode=True),
    "uneven_padding": Pool(1, 4, (6, 19), 3, 2, ((0, 1), (1, 0))),
    "stride_2_one_channel": Pool(3, 1, (7, 6), 3, 2, 1),
    "stride_1": Pool(2, 40, (9, 11), 3, 1, 1),
    "gaps": Pool(1, 18, (11, 14), 2, 3, 0),
    "large": Pool(1, 4, (17, 19), (7, 5), 1, (3, 2)),
    "signal": Pool(2, 6, (67,), 3, 2, 1),
    "planes": Pool(2, 8, (5, 8, 13), 3, 2, 1),
    "planes_of_their_own": Pool(1, 8, (3, 8, 9), (1, 3, 3), (1, 2, 2), (0, 1, 1)),
    "planes_with_gaps": Pool(1, 2, (7, 8, 9), (2, 3, 3), (3, 2, 2), (0, 1, 1)),
    "few_rows": Pool(2, 8, (3, 4), 3, 2, 1),
}
# Constants that decide how a plane is cut.
TILES = {
    "small tiles": {"MOST_BYTES": 1500},
    "few threads": {"MOST_THREADS": 32},
    "few channels": {"CHANNELS": 4},
    "many channels": {"CHANNELS": 32, "MOST_BYTES": 3000},
}


@pytest.fixture(autouse=True)
def of_any_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another kernel is faster."""
    monkeypatch.setattr(window_scatter, "few_windows", lambda form: False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", POOLS)
def test_emulated(seed: int, name: str, dtype: str) -> None:
    backend, case = EmulatedBackend(SCATTER), maxpool_bwd(name, POOLS[name])
    tensors = draw(case, rng_for(seed, name, dtype), DTYPES[dtype], integers)
    wanted = expected(case.operation, tensors, case.params)
    for layout in with_layouts(case.ndim, grouped=False)[-2:]:
        for width in ("int32", "int64"):
            asked, given = sources(case, tensors)[width]
            problem, arrays = problem_and_tensors(asked, given, layout)
            assert backend.run(problem, arrays).kernel == "window_scatter"
            found = answers(backend, asked, given, layout)
            check(found, wanted, "exact", f"seed {seed}, {width}, {layout}")


@pytest.mark.parametrize("name", ["stride_2", "stride_2_ceil", "stride_1", "signal", "planes"])
def test_indices_outside_their_windows_are_refused(seed: int, name: str) -> None:
    backend, case = EmulatedBackend(SCATTER), maxpool_bwd(name, POOLS[name])
    rng = rng_for(seed, name)
    tensors = draw(case, rng, DTYPES["float32"], integers)
    for layout in with_layouts(case.ndim, grouped=False)[-2:]:
        for width in ("int32", "int64"):
            asked, given = sources(case, tensors)[width]
            for indices in bad_indices(rng, case, given["indices"]).values():
                arrays = request_arrays(asked, {**given, "indices": indices}, layout)
                with pytest.raises(InvalidProblem, match="outside its window"):
                    run(backend, case.operation, arrays, {**asked.params, "layout": layout})


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("name", ["stride_2", "stride_1", "large", "planes", "signal"])
def test_bits_do_not_depend_on_the_tile(
    seed: int, monkeypatch: pytest.MonkeyPatch, name: str, tile: str
) -> None:
    backend, case = EmulatedBackend(SCATTER), maxpool_bwd(name, POOLS[name])
    tensors = draw(case, rng_for(seed, name), DTYPES["float32"], normals)
    tensors["input"] = np.sign(tensors["input"])  # many windows have the same maximum
    asked, given = sources(case, tensors)["int32"]
    layouts = with_layouts(case.ndim, grouped=False)[-2:]
    whole = [answers(backend, asked, given, layout) for layout in layouts]
    for constant, value in TILES[tile].items():
        monkeypatch.setattr(window_scatter, constant, value)
    for layout, wanted in zip(layouts, whole, strict=True):
        (found,) = answers(backend, asked, given, layout).values()
        assert_same_bits(found, *wanted.values(), f"{tile}, {layout}")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["stride_2", "stride_1", "signal", "planes", "large"])
def test_blocks_of_several_groups_of_planes(
    seed: int, monkeypatch: pytest.MonkeyPatch, name: str, dtype: str
) -> None:
    backend = EmulatedBackend(SCATTER, replace(H200, multiprocessors=1))
    monkeypatch.setattr(window_scatter, "RESIDENT", 128)
    monkeypatch.setattr(window_scatter, "MOST_BYTES", 3000)
    pool = replace(POOLS[name], n=5)
    case, rng = maxpool_bwd(name, pool), rng_for(seed, name, dtype)
    tensors = draw(case, rng, DTYPES[dtype], integers)
    wanted = expected(case.operation, tensors, case.params)
    asked, given = sources(case, tensors)["int64"]
    for layout in with_layouts(case.ndim, grouped=False)[-2:]:
        check(answers(backend, asked, given, layout), wanted, "exact", f"seed {seed}, {layout}")
        for indices in bad_indices(rng, case, given["indices"]).values():
            arrays = request_arrays(asked, {**given, "indices": indices}, layout)
            with pytest.raises(InvalidProblem, match="outside its window"):
                run(backend, case.operation, arrays, {**asked.params, "layout": layout})
