"""The CPU kernels on the caller's memory."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad_service.backends.cpu import CpuBackend
from convgrad_service.inprocess.base import problem_of
from convgrad_service.problems.base import Problem, TensorSpec

__all__ = ["CpuExecutor"]


class CpuExecutor:
    """An `Executor` on the threads of one `CpuBackend`."""

    def __init__(self) -> None:
        self._backend = CpuBackend()

    def plan(
        self,
        operation: str,
        tensors: Mapping[str, tuple[tuple[int, ...], str]],
        parameters: Mapping[str, Any],
    ) -> PreparedOnCpu:
        """See `Executor.plan`."""
        return self.prepare(operation, tensors, parameters)

    def prepare(
        self,
        operation: str,
        tensors: Mapping[str, tuple[tuple[int, ...], str]],
        parameters: Mapping[str, Any],
        *,
        wait: bool = True,
    ) -> PreparedOnCpu:
        """See `Executor.prepare`."""
        return PreparedOnCpu(self._backend, problem_of(operation, tensors, parameters))


class PreparedOnCpu:
    """A `Prepared` whose workspace belongs to the backend."""

    workspace_bytes = 0
    faster_peer: str | None = None

    def __init__(self, backend: CpuBackend, problem: Problem) -> None:
        self._backend, self._problem = backend, problem
        self.inputs, self.outputs = problem.inputs, problem.outputs
        self.kernel = "cpu"

    def launch(
        self, addresses: Sequence[int], workspace: int, stream: int, *, capturing: bool = False
    ) -> None:
        """See `Prepared.launch`. The results are complete when it returns."""
        specs = {**self.inputs, **self.outputs}
        arrays = {
            name: _array_at(address, spec)
            for (name, spec), address in zip(specs.items(), addresses, strict=True)
        }
        places = {name: arrays[name] for name in self.outputs}
        given = {name: arrays[name] for name in self.inputs}
        outcome = self._backend.run(self._problem, given, out=places)
        self.kernel = outcome.kernel
        for name, place in places.items():
            if outcome.outputs[name] is not place:  # a kernel may allocate its result
                np.copyto(place, outcome.outputs[name])

    def native(self, addresses: Sequence[int], stream: int) -> None:
        """See `Prepared.native`."""


def _array_at(address: int, spec: TensorSpec) -> NDArray[Any]:
    """Return the memory at an address as an array; its owner must keep it alive."""
    memory = memoryview((ctypes.c_byte * spec.size_bytes).from_address(address))
    array: NDArray[Any] = np.frombuffer(memory, spec.dtype.numpy)
    return array.reshape(spec.shape)
