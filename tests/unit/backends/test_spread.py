"""Problems that are sent elsewhere, in pieces: the same answers, and failures that are told."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from convgrad.contract import OPERATIONS
from convgrad.contract.base import validate
from convgrad.errors import DeadlineExceeded, InvalidProblem
from convgrad_service.backends.base import Outcome
from convgrad_service.backends.cpu import CpuBackend
from convgrad_service.backends.spread import Spread
from convgrad_service.problems import Problem, problem_from, run_in_pieces
from tests.support.numerics.arrays import DTYPES, draw, normals, rng_for
from tests.support.numerics.cases import FROM_CONV, Case, maxpool_bwd
from tests.support.numerics.geometries import Conv, Pool

CONV = Conv(4, 8, 12, (17, 16), (3, 3), padding=1)
CASES = [
    *(make("conv", CONV) for make in FROM_CONV.values()),
    maxpool_bwd("pool", Pool(4, 6, (17, 16), 3, 2, 1)),
]
BACKEND = CpuBackend(threads=1)


class Elsewhere:
    """Others that compute, with answers that nobody may write to, as shared memory gives them."""

    def __init__(self) -> None:
        self.sent: list[Problem] = []
        self._pool = ThreadPoolExecutor(3)

    def __call__(self, problem: Problem, tensors: Mapping[str, NDArray[Any]]) -> Future[Outcome]:
        self.sent.append(problem)
        return self._pool.submit(self._run, problem, tensors)

    def _run(self, problem: Problem, tensors: Mapping[str, NDArray[Any]]) -> Outcome:
        assert all(array.flags.c_contiguous for array in tensors.values())
        outcome = BACKEND.run(problem, tensors)
        for array in outcome.outputs.values():
            array.flags.writeable = False
        return outcome


def stated(case: Case, seed: int) -> tuple[Problem, dict[str, NDArray[Any]]]:
    tensors = draw(case, rng_for(seed, case.id), DTYPES["float32"], normals)
    request = validate(OPERATIONS[case.operation].request, {**tensors, **case.params})
    return problem_from(case.operation, request), tensors


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("parts", [1, 3])
def test_pieces_come_back_as_a_whole(seed: int, case: Case, parts: int) -> None:
    problem, tensors = stated(case, seed)
    others = Elsewhere()
    spread = Spread(others, name="cpu", piece_bytes=-(-problem.memory_bytes // parts), slots=2)
    found = spread.run(problem, tensors)
    assert len(others.sent) >= parts
    assert spread.explain(problem).pieces == len(others.sent)
    wanted = run_in_pieces(problem, tensors, parts, lambda p, t: BACKEND.run(p, t).outputs)
    assert found.outputs.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(found.outputs[name], array)


def test_what_fails_elsewhere_fails_here(seed: int) -> None:
    problem, tensors = stated(CASES[0], seed)

    def refuse(problem: Problem, tensors: Mapping[str, NDArray[Any]]) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        future.set_exception(InvalidProblem("an index is out of its window"))
        return future

    spread = Spread(refuse, name="cpu", piece_bytes=problem.memory_bytes // 3, slots=2)
    with pytest.raises(InvalidProblem, match="out of its window"):
        spread.run(problem, tensors)


def test_an_unwanted_answer_is_not_waited_for(seed: int) -> None:
    problem, tensors = stated(CASES[0], seed)
    futures: list[Future[Outcome]] = []

    def never(problem: Problem, tensors: Mapping[str, NDArray[Any]]) -> Future[Outcome]:
        futures.append(Future())
        return futures[-1]

    cancelled = threading.Event()
    cancelled.set()
    spread = Spread(never, name="cpu", piece_bytes=problem.memory_bytes // 3, slots=2)
    with pytest.raises(DeadlineExceeded):
        spread.run(problem, tensors, cancelled)
    assert all(future.cancelled() for future in futures)


def test_what_was_sent_before_sending_failed_is_not_wanted(seed: int) -> None:
    problem, tensors = stated(CASES[0], seed)
    futures: list[Future[Outcome]] = []

    def once(problem: Problem, tensors: Mapping[str, NDArray[Any]]) -> Future[Outcome]:
        if futures:
            raise ConnectionError("nobody is there any more")
        futures.append(Future())
        return futures[-1]

    spread = Spread(once, name="cpu", piece_bytes=problem.memory_bytes // 3, slots=2)
    with pytest.raises(ConnectionError):
        spread.run(problem, tensors)
    assert futures[0].cancelled()


class _JustTooLate(Future[Outcome]):
    """Its answer comes between the end of a wait for it and the look whether it is there."""

    def result(self, timeout: float | None = None) -> Outcome:
        if timeout is None:
            return super().result()
        self.answer()
        raise TimeoutError

    def answer(self) -> None:
        if not self.done():
            self.set_result(Outcome({}, kernel="late", compute_s=0.0, pieces=1, workspace_bytes=0))


def test_an_answer_that_comes_as_a_wait_ends_is_an_answer(seed: int) -> None:
    problem, tensors = stated(CASES[0], seed)

    def late(problem: Problem, tensors: Mapping[str, NDArray[Any]]) -> Future[Outcome]:
        future = _JustTooLate()
        threading.Timer(0.2, future.answer).start()
        return future

    spread = Spread(late, name="cpu", piece_bytes=problem.memory_bytes, slots=2)
    assert spread.run(problem, tensors).kernel == "late"
