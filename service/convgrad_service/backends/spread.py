"""A backend that sends problems, whole or in pieces, to other backends concurrently.

The caller decides how to reach them: `ray_serve` sends them to replicas.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad.errors import DeadlineExceeded
from convgrad_service.backends.base import OnHost, Outcome
from convgrad_service.plans.base import Plan
from convgrad_service.problems import Piece, Problem
from convgrad_service.problems.pieces import assemble, piece_tensors

__all__ = ["Spread", "Submit"]

Submit = Callable[[Problem, Mapping[str, NDArray[Any]]], "Future[Outcome]"]
"""Sends a problem to another backend; the arrays of the outcome may be read-only."""

# How often a wait checks for cancellation.
_LOOK_S = 0.05


class Spread(OnHost):
    """Sends problems to other backends.

    A problem whose tensors take more than ``piece_bytes`` is split into pieces of about that size.
    Their number depends on the problem alone, not on the number of backends, and so do the bits of
    the result. ``slots`` problems are in progress at a time.
    """

    fault: str | None = None

    def __init__(self, submit: Submit, *, name: str, piece_bytes: int, slots: int) -> None:
        self.name, self.slots = name, slots
        self._submit, self._piece_bytes = submit, piece_bytes

    def run(
        self,
        problem: Problem,
        tensors: Mapping[str, NDArray[Any]],
        cancelled: threading.Event | None = None,
        out: Mapping[str, NDArray[Any]] | None = None,
    ) -> Outcome:
        """See `Backend.run`; ``compute_s`` is the time until the last piece came back."""
        started = time.perf_counter()
        pieces = problem.split(math.ceil(problem.memory_bytes / self._piece_bytes))
        waiting: list[Future[Outcome]] = []
        done: list[Outcome] = []

        def computed() -> Iterator[Mapping[str, NDArray[Any]]]:
            for future in waiting:
                done.append(_awaited(future, cancelled))
                yield done[-1].outputs

        try:
            for piece in pieces:
                waiting.append(self._send(piece, tensors))  # noqa: PERF401 - what was sent is known
            if len(pieces) == 1:
                (outputs,) = (dict(one) for one in computed())
            else:
                outputs = assemble(problem, tensors, pieces, computed())
        except BaseException:
            for future in waiting:
                future.cancel()
            raise
        return Outcome(
            outputs,
            kernel=done[0].kernel,
            compute_s=time.perf_counter() - started,
            pieces=sum(one.pieces for one in done),
            workspace_bytes=max(one.workspace_bytes for one in done),
        )

    def explain(self, problem: Problem) -> Plan:
        """See `Backend.explain`: describes the pieces, not the kernels that compute them."""
        parts = math.ceil(problem.memory_bytes / self._piece_bytes)
        return Plan(kernel=self.name, workspace_bytes=0, pieces=len(problem.split(parts)))

    def _send(self, piece: Piece, tensors: Mapping[str, NDArray[Any]]) -> Future[Outcome]:
        # Pieces are views into the whole tensors; send only their own elements.
        own = piece_tensors(piece, tensors)
        whole = {name: np.ascontiguousarray(array) for name, array in own.items()}
        return self._submit(piece.problem, whole)


def _awaited(future: Future[Outcome], cancelled: threading.Event | None) -> Outcome:
    # Not `result(timeout)`: the future may finish between the timeout and a check of `done`.
    while not wait([future], timeout=_LOOK_S).done:
        if cancelled is not None and cancelled.is_set():
            raise DeadlineExceeded("the request was cancelled before its answer was ready")
    return future.result()
