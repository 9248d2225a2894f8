"""What a runner of one problem class gets and gives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from numpy.typing import NDArray

from convgrad_service.backends.cpu.arguments import aligned_empty
from convgrad_service.backends.cpu.library import Library
from convgrad_service.backends.cpu.threads import Rehearsal, Workers
from convgrad_service.plans.cpu_device import CpuDevice
from convgrad_service.problems.base import Piece, TensorSpec

__all__ = ["Machine", "Ran", "Runner"]


@dataclass(frozen=True, slots=True)
class Machine:
    """The loaded kernels, the threads that run them, and the description that plans read.

    ``out`` are places for outputs by name; they have the outputs' shapes and types.
    """

    library: Library
    workers: Workers
    device: CpuDevice
    out: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def output(self, name: str, spec: TensorSpec) -> NDArray[Any]:
        """Where an output is to be written."""
        place = self.out.get(name)
        if place is not None:
            return place
        return aligned_empty(spec.size_bytes).view(spec.dtype.numpy).reshape(spec.shape)

    def rehearsing(self) -> Machine:
        """The same, on threads that launch nothing."""
        return replace(self, workers=Rehearsal(self.workers.threads))

    def to_run(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        """All of them; in a rehearsal the first, which tells what the others do."""
        return pieces[:1] if isinstance(self.workers, Rehearsal) else pieces


@dataclass(frozen=True, slots=True)
class Ran:
    """A problem's outputs, and what an Outcome and a Plan say of how they came about."""

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
