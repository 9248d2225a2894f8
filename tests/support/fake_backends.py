"""Backends that compute little or nothing: for tests of what surrounds a backend."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad.errors import DeadlineExceeded, InvalidProblem
from convgrad_service.backends.base import OnHost, Outcome, Plan
from convgrad_service.backends.cpu import CpuBackend
from convgrad_service.problems import Problem
from tests.support.tree_server import until

__all__ = ["Blocking", "Failing", "Gated", "Sums", "Zeros"]


class Zeros(OnHost):
    """Answers every problem with zeros, at once."""

    name = "zeros"
    fault: str | None = None

    def run(
        self,
        problem: Problem,
        tensors: Mapping[str, NDArray[Any]],
        cancelled: threading.Event | None = None,
        out: Mapping[str, NDArray[Any]] | None = None,
    ) -> Outcome:
        outputs = {
            name: np.zeros(spec.shape, spec.dtype.numpy) for name, spec in problem.outputs.items()
        }
        return Outcome(outputs, "zeros", 1e-6, 1, 0)

    def explain(self, problem: Problem) -> Plan:
        raise NotImplementedError


class Sums(Zeros):
    """Answers with the sum of all inputs in every element, so that each byte of them counts."""

    name = "sums"

    def run(
        self,
        problem: Problem,
        tensors: Mapping[str, NDArray[Any]],
        cancelled: threading.Event | None = None,
        out: Mapping[str, NDArray[Any]] | None = None,
    ) -> Outcome:
        outcome = super().run(problem, tensors, cancelled, out)
        total = sum(float(tensor.sum(dtype=np.float64)) for tensor in tensors.values())
        for array in outcome.outputs.values():
            array += array.dtype.type(total)
        return outcome


class Blocking(Zeros):
    """Answers with zeros once `release` is set or it is told to give up; counts what it saw."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.started = threading.Semaphore(0)
        self.ended = threading.Semaphore(0)
        self.cancelled = 0
        self.runs = 0

    def run(
        self,
        problem: Problem,
        tensors: Mapping[str, NDArray[Any]],
        cancelled: threading.Event | None = None,
        out: Mapping[str, NDArray[Any]] | None = None,
    ) -> Outcome:
        self.runs += 1
        self.started.release()
        try:
            while not self.release.wait(0.01):
                if cancelled is not None and cancelled.is_set():
                    self.cancelled += 1
                    break
            return super().run(problem, tensors, cancelled)
        finally:
            self.ended.release()


class Failing(Zeros):
    """Raises ``error`` whatever the problem."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def run(
        self,
        problem: Problem,
        tensors: Mapping[str, NDArray[Any]],
        cancelled: threading.Event | None = None,
        out: Mapping[str, NDArray[Any]] | None = None,
    ) -> Outcome:
        raise self.error


class Gated(Zeros):
    """Computes on the CPU, a piece each time it is let."""

    def __init__(self, *, open_from_start: bool = False) -> None:
        self.gate = threading.Semaphore(1000 if open_from_start else 0)
        self.fail_at: int | None = None
        self.runs = 0
        self._cpu = CpuBackend(threads=1)

    def run(
        self,
        problem: Problem,
        tensors: Mapping[str, NDArray[Any]],
        cancelled: threading.Event | None = None,
        out: Mapping[str, NDArray[Any]] | None = None,
    ) -> Outcome:
        while not self.gate.acquire(timeout=0.01):
            if cancelled is not None and cancelled.is_set():
                raise DeadlineExceeded("nobody waits")
        self.runs += 1
        if self.fail_at is not None and self.runs >= self.fail_at:
            raise InvalidProblem("it failed")
        return self._cpu.run(problem, tensors, cancelled, out)


class GatedByFile(Zeros):
    """Answers once a file exists: a gate that another process can open."""

    def __init__(self, gate: Path, _: int) -> None:
        self._gate = gate

    def run(self, *arguments: Any, **more: Any) -> Any:
        until(self._gate.exists, 60)
        return super().run(*arguments, **more)
