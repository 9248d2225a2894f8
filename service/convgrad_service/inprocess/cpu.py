"""The CPU kernels on memory of the caller."""

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
    """Computes on the threads of one `CpuBackend`. See `Executor`."""

    def __init__(self) -> None:
        self._backend = CpuBackend()

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
    """See `Prepared`; the backend has workspace of its own."""

    workspace_bytes = 0

    def __init__(self, backend: CpuBackend, problem: Problem) -> None:
        self._backend, self._problem = backend, problem
        self.inputs, self.outputs = problem.inputs, problem.outputs
        self.kernel = "cpu"

    def launch(
        self, addresses: Sequence[int], workspace: int, stream: int, *, capturing: bool = False
    ) -> None:
        """See `Prepared.launch`: the results are there on return."""
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
            if outcome.outputs[name] is not place:  # a kernel need not take the place offered
                np.copyto(place, outcome.outputs[name])


def _array_at(address: int, spec: TensorSpec) -> NDArray[Any]:
    """The memory at an address as an array; whoever owns it keeps it alive."""
    memory = memoryview((ctypes.c_byte * spec.size_bytes).from_address(address))
    array: NDArray[Any] = np.frombuffer(memory, spec.dtype.numpy)
    return array.reshape(spec.shape)
