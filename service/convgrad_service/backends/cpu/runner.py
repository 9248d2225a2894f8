"""What a runner of one problem class gets and gives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from convgrad_service.backends.cpu.library import Library
from convgrad_service.backends.cpu.threads import Workers
from convgrad_service.plans.cpu_device import CpuDevice

__all__ = ["Machine", "Ran", "Runner"]


@dataclass(frozen=True, slots=True)
class Machine:
    """The loaded kernels, the threads that run them, and the description that plans read."""

    library: Library
    workers: Workers
    device: CpuDevice


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
