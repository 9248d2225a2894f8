"""The gradient of max pooling of 3x3 windows with stride 1, by chunks of results: emulated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from convgrad.errors import InvalidProblem
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.pool import window_chunks
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.harness import answers, check, problem_and_tensors, run
from tests.support.numerics.arrays import DTYPES, draw, integers, normals, request_arrays, rng_for
from tests.support.numerics.bounds import assert_same_bits
from tests.support.numerics.cases import maxpool_bwd
from tests.support.numerics.geometries import Pool
from tests.support.numerics.oracle import expected
from tests.support.numerics.pool_inputs import bad_indices, sources

pytestmark = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")

ROUTES = EmulatedBackend(replace(FAMILIES, windows=(window_chunks.RouteChunks(),)))
# Lines of every remainder of chunks, that end within chunks twice, and tiles within a plane.
SIZES = [(5, 7), (3, 8), (4, 9), (7, 10), (9, 11), (14, 12), (6, 13), (14, 14), (35, 15), (90, 67)]


def pool_of(size: tuple[int, int], n: int = 3, channels: int = 5) -> Pool:
    return Pool(n, channels, size, 3, 1, 1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_emulated(seed: int, size: tuple[int, int], dtype: str) -> None:
    case = maxpool_bwd(str(size), pool_of(size))
    tensors = draw(case, rng_for(seed, case.id, dtype), DTYPES[dtype], integers)
    wanted = expected(case.operation, tensors, case.params)
    for width in ("int32", "int64"):
        asked, given = sources(case, tensors)[width]
        problem, arrays = problem_and_tensors(asked, given, "NCHW")
        assert ROUTES.run(problem, arrays).kernel == "route_chunks"
        check(answers(ROUTES, asked, given, "NCHW"), wanted, "exact", f"seed {seed}, {width}")


@pytest.mark.parametrize("size", [(5, 7), (14, 14), (9, 11)], ids=str)
def test_indices_outside_their_windows_are_refused(seed: int, size: tuple[int, int]) -> None:
    case = maxpool_bwd(str(size), pool_of(size))
    rng = rng_for(seed, case.id)
    tensors = draw(case, rng, DTYPES["bfloat16"], integers)
    for width in ("int32", "int64"):
        asked, given = sources(case, tensors)[width]
        wrong = dict(bad_indices(rng, case, given["indices"]))
        # The ends of lines and planes: a position that is next to the window in memory alone.
        flat = given["indices"].reshape(*given["indices"].shape[:2], -1).copy()
        flat[1, 2, size[1] - 1] = size[1]
        wrong["the next line"] = flat.reshape(given["indices"].shape)
        for indices in wrong.values():
            arrays = request_arrays(asked, {**given, "indices": indices}, "NCHW")
            with pytest.raises(InvalidProblem, match="outside its window"):
                run(ROUTES, case.operation, arrays, {**asked.params, "layout": "NCHW"})


def test_bits_do_not_depend_on_the_place_in_a_tile(seed: int) -> None:
    """A plane's sums do not depend on the planes before it."""
    case = maxpool_bwd("many", pool_of((9, 11), 8, 5))
    tensors = draw(case, rng_for(seed, case.id), DTYPES["bfloat16"], normals)
    tensors["input"] = np.sign(tensors["input"])  # many windows have the same maximum
    asked, given = sources(case, tensors)["int32"]
    (whole,) = answers(ROUTES, asked, given, "NCHW").values()
    last = maxpool_bwd("one", pool_of((9, 11), 1, 5))
    alone, own = sources(last, {name: array[-1:] for name, array in tensors.items()})["int32"]
    (found,) = answers(ROUTES, alone, own, "NCHW").values()
    assert_same_bits(found, whole[-1:])


def test_what_is_left_to_others() -> None:
    for pool in (
        Pool(2, 5, (14, 14), 3, 2, 1),
        Pool(2, 5, (14, 14), 3, 1, 0),
        Pool(2, 5, (14, 6), 3, 1, 1),
        Pool(2, 5, (2, 14), 3, 1, 1),
        Pool(2, 5, (14, 14), 3, 1, 2, 2),
    ):
        case = maxpool_bwd("other", pool)
        tensors = draw(case, rng_for(0, "other"), DTYPES["bfloat16"], integers)
        asked, given = sources(case, tensors)["int32"]
        problem, arrays = problem_and_tensors(asked, given, "NCHW")
        assert EmulatedBackend(FAMILIES).run(problem, arrays).kernel != "route_chunks"
