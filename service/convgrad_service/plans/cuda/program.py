"""A plan for a GPU: kernel launches over named buffers, as data.

Planning needs no GPU and no memory: steps name buffers, and addresses are filled in when a plan
runs. A buffer is an input or output of the problem, by its name there, or workspace that the plan
lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Protocol

from convgrad.dtypes import DType
from convgrad_service.plans.base import Plan, ceil_div
from convgrad_service.plans.cuda.device import ARCHITECTURES, CudaDevice, listed_architecture

__all__ = ["ALIGNMENT", "CUDA_TYPES", "ArgumentBlock", "Arguments", "Check", "Clear", "CudaPlan"]
__all__ += ["Fragment", "Instance", "Launch", "Step", "Workspace", "ceil_div", "macros_of"]

ALIGNMENT = 256
"""Alignment of every buffer, in bytes."""

ZEROS, ZEROS_BYTES = "zeros", 2**16
"""A buffer of zeros that every plan may use and that every kernel leaves zero. Blocks count their
arrivals in it; clearing such counters would cost a launch each time."""


CUDA_TYPES = {
    DType.FLOAT16: "f16",
    DType.BFLOAT16: "bf16",
    DType.FLOAT32: "float",
    DType.FLOAT64: "double",
    DType.INT32: "int",
    DType.INT64: "long long",
}
"""The names of element types in ``core/elements.cuh``."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One compilation of one kernel source: a cubin, and the entry point in it.

    Attributes
    ----------
    source : str
        Path of the ``.cu`` file, relative to ``backends/cuda/kernels``.
    entry : str
        Name of the kernel.
    defines : tuple of (str, str)
        Preprocessor macros and their values.
    architectures : tuple of str
        The members of `ARCHITECTURES` that it can be compiled for.
    """

    source: str
    entry: str
    defines: tuple[tuple[str, str], ...] = ()
    architectures: tuple[str, ...] = ARCHITECTURES

    @classmethod
    def of(
        cls, source: str, architectures: tuple[str, ...] = ARCHITECTURES, /, **macros: object
    ) -> Instance:
        """Return an instance of the kernel that has the name of its source file.

        A dtype among the macros is spelled as kernels do (`CUDA_TYPES`), a flag as 0 or 1; a
        macro that is None is not defined.
        """
        values = tuple(
            (name, _spelled(value)) for name, value in macros.items() if value is not None
        )
        return cls(source, PurePosixPath(source).stem, values, architectures)

    @property
    def name(self) -> str:
        values = ",".join(value for _, value in self.defines)
        return f"{self.entry}<{values}>" if values else self.entry

    def is_for(self, architecture: str) -> bool:
        """Whether plans for devices of this architecture may use it."""
        return listed_architecture(architecture) in self.architectures

    def runs_on(self, device: CudaDevice) -> bool:
        """Whether this device runs it; Hopper's own instructions run on Hopper alone."""
        return self.architectures != ("sm_90a",) or device.architecture == "sm_90a"


def macros_of(tile: object, *fields: str) -> dict[str, object]:
    """Return macros that are named after these fields of a tile, in capitals."""
    return {field.upper(): getattr(tile, field) for field in fields}


def _spelled(value: object) -> str:
    if isinstance(value, DType):
        return CUDA_TYPES[value]
    return str(int(value)) if isinstance(value, bool) else str(value)


class ArgumentBlock(Protocol):
    """A kernel's structure in memory, ready to launch. Not thread-safe.

    Attributes
    ----------
    pointers, maps : sequence of tuple
        Where it points into buffers; see ``arguments.Block``.
    """

    @property
    def pointers(self) -> Sequence[tuple[int, int, int]]: ...

    @property
    def maps(self) -> Sequence[tuple[int, int, int, bool]]: ...

    @property
    def address(self) -> int:
        """Where the structure starts."""
        ...

    def point(self, addresses: Sequence[int]) -> None:
        """Make it point into buffers at other addresses, in the order that the block was given."""
        ...


class Arguments(Protocol):
    """The only argument of a kernel: a structure passed by value."""

    @property
    def buffers(self) -> tuple[str, ...]:
        """The names of the buffers that it points into."""
        ...

    def renamed(self, names: Mapping[str, str]) -> Arguments:
        """Return a copy in which buffers in ``names`` are replaced by their values there."""
        ...

    def fill(self, addresses: Mapping[str, int]) -> bytearray:
        """Return its bytes with pointers into buffers at these addresses."""
        ...

    def block(self, addresses: Mapping[str, int], buffers: Sequence[str]) -> ArgumentBlock:
        """Return it in memory; ``buffers`` are in the order in which `ArgumentBlock.point` will
        take their addresses."""
        ...


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch.

    Attributes
    ----------
    shared_bytes : int
        Dynamic shared memory of a block.
    overlaps : bool
        Programmatic dependent launch: it may start while the previous kernel runs, and itself
        waits for what that one writes (``ptx/pdl.cuh``).
    cluster : int
        Blocks of a cluster along the grid's first dimension, for kernels that do not fix it
        themselves.
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
    """A memset to zero of the first ``size_bytes`` of a buffer."""

    buffer: str
    size_bytes: int


Step = Launch | Clear


@dataclass(frozen=True, slots=True)
class Workspace:
    """A buffer that exists while the plan runs."""

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Check:
    """An int64 at the start of a buffer, not 0 if the data contradict the problem.

    ``sentence`` is the message of the resulting error.
    """

    buffer: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Fragment:
    """The part of a plan by which one kernel family computes one piece of work.

    Attributes
    ----------
    expected_s : float or None
        Predicted time of its kernel; None if the family has no performance model.
    order : str
        What determines the order of additions beside the family, if batch or image size affect it.
    """

    kernel: str
    steps: tuple[Step, ...]
    workspace: tuple[Workspace, ...] = ()
    checks: tuple[Check, ...] = ()
    expected_s: float | None = None
    order: str = ""


@dataclass(frozen=True, slots=True)
class CudaPlan(Plan):
    """A problem's steps, in order, and their workspace.

    Attributes
    ----------
    branches : tuple of int
        Indices into ``steps`` at which a branch starts. Branches may run concurrently: each depends
        on the steps before the first branch and on no other branch.
    orders : tuple of str
        Each family and its order of additions (`Fragment.order`). Pieces of one problem with equal
        orders give the same bits as the whole.
    expected_s : float or None
        Predicted time of all steps; None if a family has no performance model.
    """

    steps: tuple[Step, ...] = ()
    workspace: tuple[Workspace, ...] = ()
    checks: tuple[Check, ...] = ()
    branches: tuple[int, ...] = ()
    orders: tuple[str, ...] = ()
    expected_s: float | None = None

    @property
    def families(self) -> frozenset[str]:
        """Names of the families whose kernels run."""
        return frozenset(order.partition(" ")[0] for order in self.orders)
