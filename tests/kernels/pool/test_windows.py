"""Average pooling, adaptive pooling and max unpooling: both gates, and rejected requests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from convgrad.errors import InvalidProblem
from convgrad_service.backends.base import Backend
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.pool import window_box, window_scatter
from convgrad_service.plans.cuda.device import H200
from convgrad_service.problems import run_in_pieces
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.harness import (
    GATES,
    answers,
    check,
    drawn,
    problem_and_tensors,
    run,
    with_layouts,
)
from tests.support.numerics.arrays import (
    DTYPES,
    draw,
    integers,
    normals,
    request_arrays,
    rng_for,
)
from tests.support.numerics.bounds import assert_same_bits
from tests.support.numerics.cases import Case, maxpool_bwd, maxpool_fwd, pool_cases
from tests.support.numerics.geometries import POOLS, Pool
from tests.support.numerics.oracle import expected
from tests.support.numerics.pool_inputs import bad_indices, sources, with_nans
from tests.support.numerics.window_cases import (
    ADAPTIVE,
    OPERATIONS,
    UNEVEN,
    adaptive_pool,
    window_cases,
)

CASES = [case for operation in OPERATIONS for case in window_cases(operation)]
FROM_INDICES = ("overlapping", "gaps", "channels_67", "1d_overlapping", "3d_overlapping")
EMULATED = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_both_gates(backend: Backend, seed: int, case: Case, dtype: str, gate: str) -> None:
    tensors, wanted = drawn(seed, case, dtype, gate)
    for layout in with_layouts(case.ndim, grouped=False)[-2:]:
        found = answers(backend, case, tensors, layout)
        check(found, wanted, gate, f"seed {seed}, {case.id} {dtype} {layout}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", UNEVEN, ids=lambda case: case.id)
def test_windows_that_differ_in_size(backend: Backend, seed: int, case: Case, dtype: str) -> None:
    tensors, wanted = drawn(seed, case, dtype, "bounded")
    for layout in with_layouts(case.ndim, grouped=False)[-2:]:
        found = answers(backend, case, tensors, layout)
        check(found, wanted, "bounded", f"seed {seed}, {case.id} {dtype} {layout}")


@EMULATED
@pytest.mark.parametrize("case", [*CASES, *UNEVEN], ids=lambda case: case.id)
def test_emulated(seed: int, case: Case) -> None:
    gate = "bounded" if case in UNEVEN else "exact"
    tensors, wanted = drawn(seed, case, "bfloat16", gate)
    for layout in with_layouts(case.ndim, grouped=False)[-2:]:
        found = answers(EmulatedBackend(FAMILIES), case, tensors, layout)
        check(found, wanted, gate, f"seed {seed}, {case.id} {layout}")


@EMULATED
@pytest.mark.parametrize("bytes", [900, 1800], ids="shared memory {}".format)
@pytest.mark.parametrize("case", [*CASES, *UNEVEN], ids=lambda case: case.id)
def test_emulated_boxes_of_parts_of_planes(
    seed: int, monkeypatch: pytest.MonkeyPatch, case: Case, bytes: int
) -> None:
    tensors, wanted = drawn(seed, case, "float32", "bounded")
    layout = with_layouts(case.ndim, grouped=False)[-2]
    whole = answers(EmulatedBackend(FAMILIES), case, tensors, layout)
    monkeypatch.setattr(window_box, "MOST_BYTES", bytes)
    monkeypatch.setattr(window_scatter, "MOST_BYTES", bytes)
    found = answers(EmulatedBackend(FAMILIES), case, tensors, layout)
    check(found, wanted, "bounded", f"seed {seed}, {case.id}")
    for name, array in found.items():
        assert_same_bits(array, whole[name], f"seed {seed}, {case.id} {name}")


@EMULATED
@pytest.mark.parametrize("case", pool_cases("maxpool2d_fwd"), ids=lambda case: case.id)
def test_emulated_maxima_of_planes(seed: int, case: Case) -> None:
    tensors = draw(case, rng_for(seed, case.id), DTYPES["bfloat16"], with_nans)
    wanted = expected(case.operation, tensors, case.params)
    found = answers(EmulatedBackend(FAMILIES), case, tensors, "NCHW")
    check(found, wanted, "exact", f"seed {seed}, {case.id}")


@EMULATED
@pytest.mark.parametrize("width", ["int32", "int64"])
@pytest.mark.parametrize("name", FROM_INDICES)
def test_emulated_gradient_from_indices(seed: int, name: str, width: str) -> None:
    backend, case = EmulatedBackend(FAMILIES), maxpool_bwd(name, POOLS[name])
    rng = rng_for(seed, name)
    tensors = draw(case, rng, DTYPES["float32"], integers)
    wanted = expected(case.operation, tensors, case.params)
    asked, given = sources(case, tensors)[width]
    for layout in with_layouts(case.ndim, grouped=False)[-2:]:
        check(answers(backend, asked, given, layout), wanted, "exact", f"seed {seed}, {layout}")
        params = {**asked.params, "layout": layout}
        for indices in bad_indices(rng, case, given["indices"]).values():
            arrays = request_arrays(asked, {**given, "indices": indices}, layout)
            with pytest.raises(InvalidProblem, match="outside its window"):
                run(backend, case.operation, arrays, params)


@EMULATED
@pytest.mark.parametrize("shape", [(3, 2), (5, 2), (3, 1)], ids=str)
def test_emulated_gradient_of_long_lines(seed: int, shape: tuple[int, int]) -> None:
    kernel, stride = shape
    case = maxpool_bwd("long", Pool(2, 3, (1700,), kernel, stride, 1))
    tensors = draw(case, rng_for(seed, kernel), DTYPES["float32"], integers)
    wanted = expected(case.operation, tensors, case.params)
    asked, given = sources(case, tensors)["int64"]
    found = answers(EmulatedBackend(FAMILIES), asked, given, "NCW")
    check(found, wanted, "exact", f"seed {seed}, {shape}")


@EMULATED
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("size", [(5, 6), (14, 14), (30, 29)], ids=str)
def test_emulated_blocks_of_many_planes(seed: int, size: tuple[int, int], dtype: str) -> None:
    """Teams of 8, 32 and 64 threads add to planes; staged results start anywhere in a chunk."""
    backend = EmulatedBackend(FAMILIES, replace(H200, multiprocessors=1))
    pool = Pool(3, 7, size, 3, 1, 1)
    for make in (maxpool_bwd, maxpool_fwd):
        case = make("planes", pool)
        tensors = draw(case, rng_for(seed, make.__name__), DTYPES[dtype], integers)
        wanted = expected(case.operation, tensors, case.params)
        if make is maxpool_bwd:
            case, tensors = sources(case, tensors)["int64"]
        found = answers(backend, case, tensors, "NCHW")
        check(found, wanted, "exact", f"seed {seed}, {case.id}")


@pytest.mark.parametrize("case", [*CASES, *UNEVEN], ids=lambda case: case.id)
def test_pieces_have_the_bits_of_the_whole(backend: Backend, seed: int, case: Case) -> None:
    tensors = draw(case, rng_for(seed, case.id), DTYPES["float32"], normals)
    for layout in with_layouts(case.ndim, grouped=False)[-2:]:
        problem, arrays = problem_and_tensors(case, tensors, layout)
        whole = backend.run(problem, arrays).outputs
        for parts in (2, 100):
            found = run_in_pieces(problem, arrays, parts, lambda p, t: backend.run(p, t).outputs)
            for name, array in found.items():
                assert_same_bits(array, whole[name], f"{case.id} {layout} {name}, {parts} parts")


@pytest.mark.parametrize("name", ADAPTIVE)
def test_nans_and_ties_of_adaptive_maxima(backend: Backend, seed: int, name: str) -> None:
    case = adaptive_pool("max", name, *ADAPTIVE[name], "fwd")
    tensors = draw(case, rng_for(seed, case.id), DTYPES["bfloat16"], with_nans)
    wanted = expected(case.operation, tensors, case.params)
    for layout in with_layouts(case.ndim, grouped=False)[-2:]:
        check(answers(backend, case, tensors, layout), wanted, "exact", f"{case.id} {layout}")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", [*CASES, *UNEVEN], ids=lambda case: case.id)
def test_nans_and_infinities_stay_in_their_windows(
    backend: Backend, seed: int, case: Case, dtype: str
) -> None:
    tensors = draw(case, rng_for(seed, case.id), DTYPES[dtype], with_nans)
    wanted = expected(case.operation, tensors, case.params)
    for layout in with_layouts(case.ndim, grouped=False)[-2:]:
        found = answers(backend, case, tensors, layout)
        check(found, wanted, "bounded", f"seed {seed}, {case.id} {dtype} {layout}")


@pytest.mark.parametrize("width", [np.int32, np.int64])
def test_adaptive_gradient_from_indices(backend: Backend, seed: int, width: type) -> None:
    forward = adaptive_pool("max", "uneven", (2, 8), (7, 10), [4, 7], "fwd")
    tensors = draw(forward, rng_for(seed), DTYPES["float32"], integers)
    _, indices = answers(backend, forward, tensors).values()
    case = adaptive_pool("max", "uneven", (2, 8), (7, 10), [4, 7], "bwd")
    given = draw(case, rng_for(seed, 1), DTYPES["float32"], integers) | tensors
    wanted = expected(case.operation, given, case.params)
    del given["input"]
    given["indices"] = indices.astype(width)
    asked = case.with_params("i", input_size=(7, 10))
    for layout in with_layouts(2, grouped=False)[-2:]:
        check(answers(backend, asked, given, layout), wanted, "exact", str(layout))


@pytest.mark.parametrize("index", [-1, 70, 6, 30])
def test_an_index_outside_its_window_is_refused(backend: Backend, index: int) -> None:
    indices = np.arange(4)[:, None] * 20 + np.array([[0, 5]])
    indices[3, 1] = index
    arrays = {
        "grad_output": np.ones((1, 1, 4, 2), np.float32),
        "indices": indices.clip(-1, None)[None, None].astype(np.int64),
    }
    with pytest.raises(InvalidProblem, match="indices"):
        run(backend, "adaptive_max_pool_bwd", arrays, {"input_size": [7, 10]})


@pytest.mark.parametrize("index", [-1, 16])
@pytest.mark.parametrize("operation", ["max_unpool_fwd", "max_unpool_bwd"])
def test_an_index_outside_its_plane_is_refused(
    backend: Backend, operation: str, index: int
) -> None:
    indices = np.array([[[[0, 2], [8, index]]]])
    arrays = {"indices": indices}
    if operation.endswith("fwd"):
        arrays["input"] = np.ones((1, 1, 2, 2), np.float32)
        params = {"kernel_size": 2}
    else:
        arrays["grad_output"] = np.ones((1, 1, 4, 4), np.float32)
        params = {}
    with pytest.raises(InvalidProblem, match="indices"):
        run(backend, operation, arrays, params)
