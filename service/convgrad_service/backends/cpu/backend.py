"""`CpuBackend`: dispatches each problem class to its runner on a shared thread pool."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad.errors import DeadlineExceeded, DeviceOutOfMemory, UnsupportedProblem
from convgrad_service.backends.base import OnHost, Outcome, Plan
from convgrad_service.backends.cpu.library import load
from convgrad_service.backends.cpu.replay import Recordings
from convgrad_service.backends.cpu.runner import Machine
from convgrad_service.backends.cpu.runners import RUNNERS
from convgrad_service.backends.cpu.threads import Workers, WrongIndices
from convgrad_service.plans.cpu_device import CpuDevice
from convgrad_service.problems.base import Problem
from convgrad_service.process import usable_cores

__all__ = ["CpuBackend"]

# Before a launch is planned, one helper thread is woken for each of this many bytes of its inputs.
HELPED_BYTES = 64 * 1024
# Below both limits a problem finishes so fast that watching for cancellation does not pay.
WATCHED_FLOPS, WATCHED_BYTES = 2_000_000_000, 64 * 1024 * 1024


class CpuBackend(OnHost):
    """Compute every operation on the CPU. Results do not depend on the number of threads.

    Parameters
    ----------
    threads : int, optional
        Number of threads; by default, the number of usable cores.
    workspace_limit_bytes : int
        Limit on memory beyond inputs and outputs. A smaller limit leads to smaller steps or to
        ProblemTooLarge, but never changes the bits of a result.
    level : str, optional
        Instruction-set level; by default, the best that this CPU supports.

    Raises
    ------
    DeviceUnavailable
        The kernels have not been built, or do not support this CPU.
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
            # Up to a quarter of the limit stays allocated while idle.
            Workers(threads, keep_bytes=workspace_limit_bytes // 4),
            CpuDevice(library.level, threads, workspace_limit_bytes),
        )
        self._recordings = Recordings()

    @property
    def device(self) -> CpuDevice:
        """The device description that plans are made for."""
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
        machine = replace(self._machine, out=out) if out else self._machine
        workers = machine.workers
        if workers.threads > 1:
            workers.wake(sum([array.nbytes for array in tensors.values()]) // HELPED_BYTES)
        try:
            recording = None
            if cancelled is None:  # a replay cannot be cancelled
                recording = self._recordings.of(self._machine, runner, problem, tensors, out)
            ran = None
            if recording is not None:
                with suppress(WrongIndices):  # the runner finds which
                    ran = recording.run(machine, tensors)
            if ran is None:
                whole = {name: _in_elements(array) for name, array in tensors.items()}
                ran = runner(machine, problem, whole, cancelled)
        except MemoryError as error:
            raise DeviceOutOfMemory(
                f"there is not enough free memory for {problem.operation}: {error}"
            ) from error
        compute_s = time.perf_counter() - started
        return Outcome(ran.outputs, ran.kernel, compute_s, ran.pieces, ran.workspace_bytes)

    def explain(self, problem: Problem) -> Plan:
        """See `Backend.explain`. This is a dry run: the runner executes without launching."""
        runner = RUNNERS.get(type(problem))
        if runner is None:
            raise UnsupportedProblem(f"the CPU has no kernel for {problem.operation}")
        # Never touched beyond the first piece, so the operating system commits no memory.
        blank = {
            name: np.empty(spec.shape, spec.dtype.numpy) for name, spec in problem.inputs.items()
        }
        ran = runner(self._machine.rehearsing(), problem, blank, None)
        return Plan(ran.kernel, ran.workspace_bytes, ran.pieces, ran.passed_over)

    def close(self) -> None:
        """Stop the threads."""
        self._machine.workers.close()


def _in_elements(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array, or a copy if its strides are not multiples of the element size."""
    if array.flags.c_contiguous or not any(stride % array.itemsize for stride in array.strides):
        return array
    return np.ascontiguousarray(array)
