"""Averages of 3x3 windows with stride 1, by chunks of results: emulated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.pool import window_chunks
from convgrad_service.plans.cuda.device import H200
from convgrad_service.plans.cuda.planner import plan_for
from convgrad_service.plans.cuda.program import Launch
from convgrad_service.problems import run_in_pieces
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.harness import answers, check, drawn, problem_and_tensors
from tests.support.numerics.arrays import DTYPES, draw, normals, rng_for
from tests.support.numerics.bounds import assert_same_bits
from tests.support.numerics.cases import Case
from tests.support.numerics.oracle import expected
from tests.support.numerics.pool_inputs import with_nans
from tests.support.numerics.window_cases import avg_pool

pytestmark = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")

# Lines of every remainder of chunks, with one or two ends in a chunk, and planes of several tiles.
SIZES = [(7, 7), (9, 14), (8, 13), (8, 8), (6, 9), (5, 10), (4, 11), (7, 12), (3, 4), (90, 103)]
PADDINGS = {"one": 1, "none": 0, "uneven": [[0, 2], [2, 0]]}


def case_of(size: tuple[int, int], padding: Any, way: str, *, counted: bool) -> Case:
    params = {"kernel_size": 3, "stride": 1, "padding": padding, "count_include_pad": counted}
    return avg_pool(f"{size} {padding}", (3, 11), size, params, way)


def fits(size: tuple[int, int], padding: Any) -> bool:
    """Whether the padded input has a window."""
    return padding != 0 or min(size) >= 3


CASES = [
    case_of(size, padding, way, counted=counted)
    for size in SIZES
    for padding in PADDINGS.values()
    for way in ("fwd", "bwd")
    for counted in (True, False)
    if fits(size, padding)
]


def source_of(case: Case, dtype: str) -> str:
    problem, _ = problem_and_tensors(case, drawn(0, case, dtype, "bounded")[0], "NCHW")
    (step,) = (one for one in plan_for(problem, H200, FAMILIES).steps if isinstance(one, Launch))
    return step.instance.source


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.id} {case.params}")
def test_emulated(seed: int, case: Case, dtype: str) -> None:
    tensors, wanted = drawn(seed, case, dtype, "bounded")
    found = answers(EmulatedBackend(FAMILIES), case, tensors, "NCHW")
    check(found, wanted, "bounded", f"seed {seed}, {case.id}")


def test_windows_that_it_computes() -> None:
    for counted in (True, False):
        for way in ("fwd", "bwd"):
            for size in ((17, 17), (40, 34), (35, 35)):
                case = case_of(size, 1, way, counted=counted)
                assert source_of(case, "bfloat16").endswith("chunks.cu")
                assert source_of(case, "float32").endswith("chunks.cu")
    # Lines that are shorter than a chunk, few lines, and planes of y of another size.
    for size, padding in (((9, 6), 1), ((2, 40), 1), ((17, 17), 0)):
        case = case_of(size, padding, "fwd", counted=True)
        assert source_of(case, "bfloat16").endswith("planes.cu")


@pytest.mark.parametrize("counted", [True, False], ids="with padding {}".format)
@pytest.mark.parametrize("size", [(7, 7), (9, 14), (8, 13), (90, 103)], ids=str)
@pytest.mark.parametrize("way", ["fwd", "bwd"])
def test_bits_do_not_depend_on_the_tile(
    seed: int, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int], way: str, counted: bool
) -> None:
    case = case_of(size, 1, way, counted=counted)
    tensors = draw(case, rng_for(seed, case.id), DTYPES["bfloat16"], normals)
    problem, arrays = problem_and_tensors(case, tensors, "NCHW")
    backend = EmulatedBackend(FAMILIES)
    whole = backend.run(problem, arrays).outputs
    pieces = run_in_pieces(problem, arrays, 100, lambda p, t: backend.run(p, t).outputs)
    monkeypatch.setattr(window_chunks, "EACH", 3)
    monkeypatch.setattr(window_chunks, "FEWER_EACH", 1)
    for other in (pieces, backend.run(problem, arrays).outputs):
        for name, array in other.items():
            assert_same_bits(array, whole[name], f"{case.id} {name}")


@pytest.mark.parametrize("way", ["fwd", "bwd"])
def test_planes_that_32_bit_numbers_do_not_hold(
    seed: int, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Several launches, with the bits of one."""
    case = case_of((7, 9), 1, way, counted=False)
    tensors = draw(case, rng_for(seed, case.id), DTYPES["bfloat16"], normals)
    problem, arrays = problem_and_tensors(case, tensors, "NCHW")
    backend = EmulatedBackend(FAMILIES)
    whole = backend.run(problem, arrays).outputs
    monkeypatch.setattr(window_chunks, "LARGEST", 8 * 63 + 4 * 256 * 8)
    assert len(backend.explain(problem).steps) == 5
    for name, array in backend.run(problem, arrays).outputs.items():
        assert_same_bits(array, whole[name])


@pytest.mark.parametrize("size", [(7, 7), (9, 14), (8, 8)], ids=str)
@pytest.mark.parametrize("way", ["fwd", "bwd"])
def test_nans_and_infinities_stay_in_their_windows(
    seed: int, size: tuple[int, int], way: str
) -> None:
    for counted in (True, False):
        case = case_of(size, 1, way, counted=counted)
        tensors = draw(case, rng_for(seed, case.id), DTYPES["bfloat16"], with_nans)
        wanted = expected(case.operation, tensors, case.params)
        one = replace(H200, multiprocessors=1)
        found = answers(EmulatedBackend(FAMILIES, one), case, tensors, "NCHW")
        check(found, wanted, "bounded", f"seed {seed}, {case.id}")


def test_sums_of_negative_zeros_are_zero() -> None:
    case = case_of((7, 7), 1, "fwd", counted=True)
    zeros = {"input": np.full((3, 11, 7, 7), -0.0, DTYPES["bfloat16"])}
    (found,) = answers(EmulatedBackend(FAMILIES), case, zeros, "NCHW").values()
    assert not np.signbit(found.astype(np.float32)).any()
