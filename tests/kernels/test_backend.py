"""Backends apart from their results: cancellation, plans and output arrays."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import numpy as np
import pytest

from convgrad.contract import OPERATIONS
from convgrad.contract.base import validate
from convgrad.errors import DeadlineExceeded, InvalidProblem
from convgrad_service.backends.base import Backend
from convgrad_service.problems import Problem, problem_from, run_in_pieces
from tests.support.kernels.harness import run
from tests.support.numerics.arrays import DTYPES, Arrays, draw, normals, rng_for
from tests.support.numerics.bounds import assert_same_bits
from tests.support.numerics.cases import FROM_CONV, FUSED, Case, conv_cases, maxpool_bwd, pool_cases
from tests.support.numerics.geometries import POOLS, Conv
from tests.support.numerics.reference_pool import maxpool_fwd

# About 60 GFLOP in float64: seconds of work in little memory.
LONG = Conv(16, 512, 512, (28, 28), (3, 3), padding=1)
CASES = [
    *(case for operation in FROM_CONV for case in conv_cases(operation)),
    *(
        case
        for n in (1, 2, 3)
        for way in ("fwd", "bwd")
        for case in pool_cases(f"maxpool{n}d_{way}")
    ),
    *FUSED,
]


def problem_and_tensors(case: Case, dtype: str = "float32") -> tuple[Problem, Arrays]:
    tensors = draw(case, rng_for(0, case.id), DTYPES[dtype], normals)
    request = validate(OPERATIONS[case.operation].request, {**tensors, **case.params})
    return problem_from(case.operation, request), request.tensors()


@pytest.mark.parametrize("case", CASES[::5], ids=lambda case: case.id)
def test_what_it_explains_is_what_it_runs(backend: Backend, case: Case) -> None:
    problem, tensors = problem_and_tensors(case)
    plan, outcome = backend.explain(problem), backend.run(problem, tensors)
    assert plan.kernel == outcome.kernel
    assert plan.pieces == outcome.pieces
    assert plan.workspace_bytes == outcome.workspace_bytes
    assert outcome.compute_s > 0
    for name, spec in problem.outputs.items():
        array = outcome.outputs[name]
        assert (array.shape, array.dtype) == (spec.shape, spec.dtype.numpy)
        assert array.flags.c_contiguous


def test_the_order_of_the_outputs_is_the_problems(backend: Backend) -> None:
    for case in CASES[::5]:
        problem, tensors = problem_and_tensors(case)
        assert list(backend.run(problem, tensors).outputs) == list(problem.outputs)


@pytest.mark.parametrize("case", CASES[::3], ids=lambda case: case.id)
def test_outputs_go_to_their_places(backend: Backend, case: Case) -> None:
    problem, tensors = problem_and_tensors(case)
    wanted = backend.run(problem, tensors).outputs
    places = {
        name: np.full(spec.shape, 77, spec.dtype.numpy) for name, spec in problem.outputs.items()
    }
    found = backend.run(problem, tensors, None, places).outputs
    for name, place in places.items():
        # A backend need not use the given array; if it returns it, it has written it.
        if found[name] is place:
            assert_same_bits(place, wanted[name])
        else:
            assert (place == 77).all()
    if backend.name == "cpu":
        assert all(found[name] is place for name, place in places.items())


def test_a_request_cancelled_before_it_began(backend: Backend) -> None:
    cancelled = threading.Event()
    cancelled.set()
    for case in CASES[::20]:
        with pytest.raises(DeadlineExceeded):
            backend.run(*problem_and_tensors(case), cancelled)


@pytest.mark.parametrize("operation", ["conv_fwd", "conv_bwd_data", "grouped_conv_bwd_weight"])
def test_cancelled_while_it_computes(backend: Backend, operation: str) -> None:
    problem, tensors = problem_and_tensors(FROM_CONV[operation]("long", LONG), "float64")
    cancelled = threading.Event()
    started = time.perf_counter()
    backend.run(problem, tensors, cancelled)
    whole_s = time.perf_counter() - started
    # Other load on the machine may slow down any run: five attempts.
    for _ in range(5):
        cancelled.clear()
        timer = threading.Timer(whole_s / 8, cancelled.set)
        timer.start()
        refused = True
        started = time.perf_counter()
        with contextlib.suppress(DeadlineExceeded):
            backend.run(problem, tensors, cancelled)
            # It finished before the cancellation: this run was faster than the one before.
            whole_s, refused = time.perf_counter() - started, False
        spent_s = time.perf_counter() - started
        timer.cancel()
        timer.join()
        # A GPU finishes the launches that it was given, but the request still fails.
        if refused and (backend.name == "cuda" or spent_s < whole_s):
            return
    pytest.fail("it went on to its end though it was cancelled")


def test_the_interpreter_stays_free(backend: Backend) -> None:
    """Other Python threads run while a kernel runs."""
    problem, tensors = problem_and_tensors(FROM_CONV["conv_fwd"]("long", LONG), "float64")
    done = threading.Event()
    taken: dict[str, float] = {}

    def compute() -> None:
        started = time.perf_counter()
        backend.run(problem, tensors)
        taken["s"] = time.perf_counter() - started
        done.set()

    worker = threading.Thread(target=compute)
    worker.start()
    turns = 0
    while not done.is_set():
        time.sleep(0.001)
        turns += 1
    worker.join()
    # An iteration takes a millisecond on an idle machine; the cores are shared, so allow 50.
    assert turns >= taken["s"] / 0.05


def test_kernels_leave_the_floating_point_mode_alone(backend: Backend) -> None:
    """Kernels do not leave flush-to-zero enabled in the calling thread."""
    for case in CASES[::25]:
        backend.run(*problem_and_tensors(case))
    tiny = np.array([np.finfo(np.float32).smallest_subnormal] * 3)
    assert (tiny * np.float32(3) == 3 * float(tiny[0])).all()
    assert (np.array([5e-324]) * 2 != 0).all()


def bad(indices: Any, plane: int) -> list[Any]:
    """Return copies of the indices, each with one wrong index, across the whole array."""
    places = [(place, value) for place in range(0, indices.size, 29) for value in (-1, plane)]
    # The first window of a plane does not contain its last element, nor the last window its first.
    windows = int(np.prod(indices.shape[2:]))
    for first in range(0, indices.size, windows):
        places += [(first, plane - 1), (first + windows - 1, 0)]
    made = []
    for place, value in places:
        made.append(indices.copy())
        made[-1].flat[place] = value
    return made


@pytest.mark.parametrize("width", [np.int32, np.int64])
@pytest.mark.parametrize("name", ["plain", "overlapping", "3d_plain"])
def test_bad_indices_are_found_in_pieces_too(
    backend: Backend, seed: int, name: str, width: type
) -> None:
    """Indices are relative to a piece's first row; the conversion does not hide bad ones."""
    pool = POOLS[name]
    tensors = draw(maxpool_bwd(name, pool), rng_for(seed, name), DTYPES["float32"], normals)
    _, indices = maxpool_fwd(tensors["input"], pool.kernel, **_geometry(pool.params))
    params = {**pool.params, "input_size": pool.size}
    operation = f"maxpool{pool.ndim}d_bwd"
    given = {"grad_output": tensors["grad_output"], "indices": indices.astype(width)}
    problem = problem_from(operation, validate(OPERATIONS[operation].request, given | params))

    def in_pieces(arrays: Arrays) -> Arrays:
        return run_in_pieces(problem, arrays, 5, lambda *piece: backend.run(*piece).outputs)

    wanted = run(backend, operation, given, params).outputs
    assert_same_bits(in_pieces(given)["grad_input"], wanted["grad_input"])
    for wrong in bad(given["indices"], int(np.prod(pool.size))):
        for compute in (in_pieces, lambda arrays: run(backend, operation, arrays, params)):
            with pytest.raises(InvalidProblem, match=r"(?i)ind(ex|ices)"):
                compute({**given, "indices": wrong})


def _geometry(params: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in params.items() if key != "kernel_size"}
