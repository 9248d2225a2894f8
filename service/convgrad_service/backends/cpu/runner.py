"""The interface of runners: a runner executes the problems of one class."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from numpy.typing import NDArray

from convgrad_service.backends.cpu.arguments import aligned_array
from convgrad_service.backends.cpu.library import Library
from convgrad_service.backends.cpu.threads import Rehearsal, Workers
from convgrad_service.plans.cpu_device import CpuDevice
from convgrad_service.problems.base import Piece, TensorSpec

__all__ = ["Machine", "Ran", "Runner"]


@dataclass(frozen=True, slots=True)
class Machine:
    """The loaded kernels, the threads that run them, and the device description for plans.

    ``out`` holds caller-provided arrays for outputs, by name, of the outputs' shapes and dtypes.
    """

    library: Library
    workers: Workers
    device: CpuDevice
    out: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def output(self, name: str, spec: TensorSpec) -> NDArray[Any]:
        """Return the array to write an output to."""
        place = self.out.get(name)
        if place is not None:
            return place
        return aligned_array(spec.shape, spec.dtype.numpy)

    def rehearsing(self) -> Machine:
        """Return a copy for a dry run, whose threads launch nothing."""
        return replace(self, workers=Rehearsal(self.workers.threads))

    def to_run(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        """Return all pieces; in a dry run only the first, which stands for the others."""
        return self.workers.to_run(pieces)


@dataclass(frozen=True, slots=True)
class Ran:
    """The outputs of a problem, and the statistics reported in an Outcome or a Plan."""

    outputs: dict[str, NDArray[Any]]
    kernel: str
    workspace_bytes: int
    pieces: int = 1
    passed_over: tuple[tuple[str, str], ...] = ()


Runner = Callable[
    [Machine, Any, Mapping[str, NDArray[Any]], threading.Event | None],
    Ran,
]
"""(machine, problem, tensors, cancelled) -> Ran, for the problem class it is registered for."""
