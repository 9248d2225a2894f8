"""`CpuBackend`: one runner for each class of problems, on shared threads and work memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad.errors import DeadlineExceeded, DeviceOutOfMemory, UnsupportedProblem
from convgrad_service.backends.base import OnHost, Outcome, Plan
from convgrad_service.backends.cpu.library import load
from convgrad_service.backends.cpu.runner import Machine
from convgrad_service.backends.cpu.runners import RUNNERS
from convgrad_service.backends.cpu.threads import Workers
from convgrad_service.cgroups import usable_cores
from convgrad_service.plans.cpu_device import CpuDevice
from convgrad_service.problems.base import Problem

__all__ = ["CpuBackend"]

# A problem of fewer operations on fewer bytes ends sooner than a cancellation is worth watching.
WATCHED_FLOPS, WATCHED_BYTES = 2_000_000_000, 64 * 1024 * 1024


class CpuBackend(OnHost):
    """Computes every operation on the CPU, deterministically, whatever the number of threads.

    Memory beyond inputs and outputs stays below ``workspace_limit_bytes``; a smaller limit means
    smaller steps, or a ProblemTooLarge, and never other bits. ``level`` picks an instruction-set
    level by name; the default is the best that this CPU has.

    Raises
    ------
    DeviceUnavailable
        The kernels were not built, or not for this CPU.
    """

    name = "cpu"
    fault = None

    def __init__(
        self,
        threads: int | None = None,
        workspace_limit_bytes: int = 256 * 1024 * 1024,
        level: str | None = None,
    ) -> None:
        library = load(level)
        threads = threads or usable_cores()
        self._machine = Machine(
            library,
            # Of the limit, what is kept while nothing runs.
            Workers(threads, keep_bytes=workspace_limit_bytes // 4),
            CpuDevice(library.level, threads, workspace_limit_bytes),
        )

    @property
    def device(self) -> CpuDevice:
        """What plans are made for."""
        return self._machine.device

    def run(
        self,
        problem: Problem,
        tensors: Mapping[str, NDArray[Any]],
        cancelled: threading.Event | None = None,
        out: Mapping[str, NDArray[Any]] | None = None,
    ) -> Outcome:
        """See `Backend.run`."""
        runner = RUNNERS.get(type(problem))
        if runner is None:
            raise UnsupportedProblem(f"the CPU has no kernel for {problem.operation}")
        if cancelled is not None:
            if cancelled.is_set():
                raise DeadlineExceeded("the request was cancelled before it was computed")
            if problem.flops < WATCHED_FLOPS and problem.memory_bytes < WATCHED_BYTES:
                cancelled = None
        started = time.perf_counter()
        whole = {name: _in_elements(array) for name, array in tensors.items()}
        try:
            machine = replace(self._machine, out=out) if out else self._machine
            ran = runner(machine, problem, whole, cancelled)
        except MemoryError as error:
            raise DeviceOutOfMemory(
                f"there is not enough free memory for {problem.operation}: {error}"
            ) from error
        compute_s = time.perf_counter() - started
        return Outcome(ran.outputs, ran.kernel, compute_s, ran.pieces, ran.workspace_bytes)

    def explain(self, problem: Problem) -> Plan:
        """See `Backend.explain`: the runner itself says it, on threads that launch nothing."""
        runner = RUNNERS.get(type(problem))
        if runner is None:
            raise UnsupportedProblem(f"the CPU has no kernel for {problem.operation}")
        # Untouched beyond the first piece of them, so the system gives them no memory.
        blank = {
            name: np.empty(spec.shape, spec.dtype.numpy) for name, spec in problem.inputs.items()
        }
        ran = runner(self._machine.rehearsing(), problem, blank, None)
        return Plan(ran.kernel, ran.workspace_bytes, ran.pieces, ran.passed_over)

    def close(self) -> None:
        """End the threads."""
        self._machine.workers.close()


def _in_elements(array: NDArray[Any]) -> NDArray[Any]:
    """The array itself, or a copy where its strides are not whole elements: kernels count those."""
    if any(stride % array.itemsize for stride in array.strides):
        return np.ascontiguousarray(array)
    return array
