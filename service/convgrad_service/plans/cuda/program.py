"""What runs on a GPU: launches over named buffers, as data.

A plan is made without a GPU and without memory: its steps name buffers, and addresses are filled
in when it runs. A buffer is an input or an output of the problem, by the problem's own name, or a
piece of workspace that the plan lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Protocol

from convgrad_service.plans.base import Plan
from convgrad_service.plans.cuda.device import (
    ARCHITECTURES,
    CudaDevice,
    listed_architecture,
)

__all__ = [
    "ALIGNMENT",
    "Arguments",
    "Check",
    "Clear",
    "CudaPlan",
    "Fragment",
    "Instance",
    "Launch",
    "Step",
    "Workspace",
    "ceil_div",
]

ALIGNMENT = 256
"""Every buffer starts at a multiple of so many bytes."""

ZEROS, ZEROS_BYTES = "zeros", 2**16
"""A buffer that every plan has beside its own: zeros, that kernels leave as they found them. Blocks
count in it how many of them are done; clearing such counters would cost a launch each time."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One compilation of one kernel source: a cubin, and the entry in it.

    ``defines`` are the preprocessor's names and values. ``architectures`` are those that it can
    be compiled for.
    """

    source: str
    entry: str
    defines: tuple[tuple[str, str], ...] = ()
    architectures: tuple[str, ...] = ARCHITECTURES

    @classmethod
    def of(
        cls,
        source: str,
        defines: Mapping[str, object],
        architectures: tuple[str, ...] = ARCHITECTURES,
    ) -> Instance:
        """Of the kernel that is named as its source is, but for the suffix."""
        values = tuple((name, str(value)) for name, value in defines.items())
        return cls(source, PurePosixPath(source).stem, values, architectures)

    @property
    def name(self) -> str:
        values = ",".join(value for _, value in self.defines)
        return f"{self.entry}<{values}>" if values else self.entry

    def is_for(self, architecture: str) -> bool:
        """Whether plans for devices of this architecture may name it."""
        return listed_architecture(architecture) in self.architectures

    def runs_on(self, device: CudaDevice) -> bool:
        """Whether ``architectures`` leaves this device in: those of before it without a suffix."""
        return self.architectures != ("sm_90a",) or device.architecture == "sm_90a"


class Arguments(Protocol):
    """The one argument of a kernel: a structure, passed by value."""

    @property
    def buffers(self) -> tuple[str, ...]:
        """The names of the buffers that it points to."""
        ...

    def renamed(self, names: Mapping[str, str]) -> Arguments:
        """The same with these names for those of some of its buffers."""
        ...

    def fill(self, addresses: Mapping[str, int]) -> bytearray:
        """Its bytes, with the addresses of the buffers that it points to."""
        ...


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch. ``shared_bytes`` is dynamic shared memory. ``cluster`` is how many blocks
    along the grid's first dimension form a cluster, where the kernel leaves that to the launch.

    One that ``overlaps`` may start while the kernel before it still runs, and waits itself for what
    that one writes (``ptx/tma.cuh``: start_next, wait_for_previous).
    """

    instance: Instance
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    arguments: Arguments
    shared_bytes: int = 0
    overlaps: bool = False
    cluster: int = 1


@dataclass(frozen=True, slots=True)
class Clear:
    """Zero the first ``size_bytes`` of a buffer."""

    buffer: str
    size_bytes: int


Step = Launch | Clear


@dataclass(frozen=True, slots=True)
class Workspace:
    """A buffer that lives as long as the plan runs."""

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Check:
    """An int32 at the start of a buffer which, where it is not 0 afterwards, means that the data
    contradict the problem: ``sentence`` is what the caller is told."""

    buffer: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Fragment:
    """What one kernel family does for one piece of work: part of a plan.

    ``expected_s`` is what its kernel should take on the device it was planned for, where the family
    has a model of that. ``order`` is what decides, beside the family, in which order products are
    added up, where the sizes of a batch or an image have a say in it.
    """

    kernel: str
    steps: tuple[Step, ...]
    workspace: tuple[Workspace, ...] = ()
    checks: tuple[Check, ...] = ()
    expected_s: float | None = None
    order: str = ""


@dataclass(frozen=True, slots=True)
class CudaPlan(Plan):
    """A problem's steps, in order, and the memory that they need beside inputs and outputs.

    ``branches`` are the places in the steps where work begins that may run beside the other
    branches: it needs what stands before the first of them, and nothing of theirs. ``orders`` are
    the families, and in which order each adds up: of one problem's pieces those that have the same
    put the same bits side by side. ``expected_s`` is what all of it should take, where every family
    has a model.
    """

    steps: tuple[Step, ...] = ()
    workspace: tuple[Workspace, ...] = ()
    checks: tuple[Check, ...] = ()
    branches: tuple[int, ...] = ()
    orders: tuple[str, ...] = ()
    expected_s: float | None = None

    @property
    def families(self) -> frozenset[str]:
        """The names of the families whose kernels run."""
        return frozenset(order.partition(" ")[0] for order in self.orders)


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)
