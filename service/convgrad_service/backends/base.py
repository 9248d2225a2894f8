"""The interfaces between the engine and a backend."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from convgrad.check.convolve import Convolver, NumpyConvolver
from convgrad.contract.timing import Clocks, Device
from convgrad.errors import UnsupportedProblem
from convgrad_service.backends.host_clock import HostStopwatch, measured_rates, processor_name
from convgrad_service.plans.base import Plan
from convgrad_service.problems.base import Problem, TensorSpec
from convgrad_service.process import usable_cores

__all__ = [
    "Backend",
    "Cancellation",
    "DeviceMemory",
    "DeviceTensor",
    "MappingGuard",
    "OnHost",
    "Outcome",
    "Plan",
    "Rates",
    "ServingBackend",
    "Stopwatch",
    "Vitals",
    "guard_mapping",
]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A computed problem: its outputs by name, and how they were computed.

    ``compute_s`` is the time in the backend, of which ``upload_s`` and ``download_s`` are copies to
    and from a device. ``workspace_bytes`` is the memory used in addition to inputs and outputs.
    ``report_json`` is the answer of an examination, which computes no tensor.
    """

    outputs: dict[str, NDArray[Any]]
    kernel: str
    compute_s: float
    pieces: int
    workspace_bytes: int
    upload_s: float = 0.0
    download_s: float = 0.0
    report_json: bytes = b""


@dataclass(frozen=True, slots=True)
class Vitals:
    """The state of a device: its memory, used by any process, and the kernels needed so far.

    ``kernels_found`` were in the kernel cache; ``kernels_compiled`` were not, and took
    ``compile_s`` seconds in total. Each kernel that this process has loaded counts once. ``uuid``
    is the GPU's, as NVIDIA's tools print it.
    """

    memory_used_bytes: int = 0
    memory_total_bytes: int = 0
    kernels_found: int = 0
    kernels_compiled: int = 0
    compile_s: float = 0.0
    uuid: str = ""


class Cancellation(threading.Event):
    """An event that is set once the result is no longer needed. Backends report progress to it."""

    progress = 0

    def advanced(self) -> None:
        """Report that a part of the computation is done, so that it does not count as hung."""
        self.progress += 1


class Backend(Protocol):
    """Computes problems. Safe to call from several threads at once."""

    name: str

    @property
    def fault(self) -> str | None:
        """Why this backend will not work again in this process; None while it works."""
        ...

    def run(
        self,
        problem: Problem,
        tensors: Mapping[str, NDArray[Any]],
        cancelled: threading.Event | None = None,
        out: Mapping[str, NDArray[Any]] | None = None,
    ) -> Outcome:
        """Compute a problem. Blocks, but releases the interpreter lock while computing.

        Parameters
        ----------
        tensors
            The problem's inputs by name, with its shapes, dtypes and layout.
        cancelled
            Set once the result is no longer needed. A `Cancellation` is notified of each step.
        out
            Arrays for outputs, by name. If the backend uses one, the outcome contains that array.

        Raises
        ------
        InvalidProblem
            The data contradict the problem, such as a pool index outside its window.
        DeadlineExceeded
            ``cancelled`` was set before the result was ready.
        UnsupportedProblem, DeviceOutOfMemory, DeviceUnavailable
            There is no kernel, memory or device.
        """
        ...

    def vitals(self) -> Vitals:
        """Return the current state of its device; called every few seconds."""
        ...

    def explain(self, problem: Problem) -> Plan:
        """Return which kernel `run` would use, and why not the others; computes nothing."""
        ...


class DeviceTensor(Protocol):
    """A tensor on a device, which `run` accepts instead of an array. Can be sliced like one."""

    def fill(self, array: NDArray[Any]) -> None:
        """Copy an array from the host into it, and wait."""
        ...

    def read(self, target: NDArray[Any]) -> None:
        """Copy it to the host, and wait."""
        ...


class DeviceMemory(Protocol):
    """Memory of a device that another process owns."""

    def array(self, offset: int, spec: TensorSpec) -> DeviceTensor:
        """Return a tensor in it, ``offset`` bytes from its start."""
        ...

    def close(self) -> None:
        """Unmap it; nothing may use it afterwards."""
        ...


@dataclass(frozen=True, slots=True)
class Rates:
    """A device's limits: FLOP/s in one dtype, memory bandwidth, and the time to launch a kernel."""

    flops_per_s: float
    bytes_per_s: float
    launch_s: float
    source: str


class Stopwatch(Protocol):
    """A problem that can be run repeatedly on the same tensors, and timed.

    ``tensors`` are its inputs and outputs by name, in a form that libraries on the device accept.
    """

    tensors: Mapping[str, Any]

    @property
    def predicted_s(self) -> float | None:
        """The plan's predicted time; None without a cost model."""
        ...

    def cold(self) -> float:
        """Return the seconds of one run after the caches were flushed."""
        ...

    def warm(self) -> float:
        """Return the seconds of one run that follows another."""
        ...

    def run_of(self, count: int) -> float:
        """Return the seconds that a number of back-to-back runs take."""
        ...

    def like(self, run: Callable[[], Any]) -> Stopwatch:
        """Return a stopwatch for ``run``, which must use the same device."""
        ...

    def others(self) -> Iterator[tuple[str, AbstractContextManager[Stopwatch]]]:
        """Yield the other kernels that could compute the problem, with names, fastest first."""
        ...

    def clocks(self) -> Clocks | None:
        """Return the device's current clock rates and power; None if unknown."""
        ...


class ServingBackend(Backend, Protocol):
    """A backend as a server's worker uses it."""

    devices: int
    """Number of devices of this kind on this machine, its own included."""

    slots: int
    """Default number of problems to compute at the same time."""

    pins: bool
    """Whether it pins the pages of memory that it adopts."""

    def compile_ahead(self, problems: Sequence[Problem]) -> Future[None] | None:
        """Start compiling the kernels that `run` needs for these problems; None if it needs none.

        Once the future is done, `run` starts without delay; the future has the error of a failed
        compilation. Cancelling it means that the problems need not be computed after all.

        Raises as `run` for a problem that no kernel computes.
        """
        ...

    def adopt(self, address: int, size_bytes: int) -> None:
        """Prepare for tensors in this memory, which stays mapped until `disown`."""
        ...

    def disown(self, address: int) -> None:
        """Release the memory adopted at ``address``, which is about to be unmapped."""
        ...

    def open_handle(self, handle: bytes, size_bytes: int) -> DeviceMemory:
        """Map another process's device memory by its CUDA IPC handle.

        Raises
        ------
        InvalidProblem
            It cannot be opened, or is smaller than ``size_bytes``.
        UnsupportedProblem
            This backend has no such memory.
        """
        ...

    def resident(self, key: int, version: int, array: NDArray[Any]) -> Any:
        """Return what to pass to `run` for an input that later problems may use too.

        It may stay on the device until `forget` is called with the key. A new version of a key is
        a different tensor and replaces the previous one.
        """
        ...

    def resident_place(self, key: int, version: int, array: NDArray[Any]) -> Any:
        """Return a target for an output of `run`, or a slice of it, that `resident` will request.

        The array is written as well, because the copy on the device may be lost.
        """
        ...

    def forget(self, key: int) -> None:
        """Drop what is kept under a key."""
        ...

    def described(self) -> Device:
        """Return a description of the device, for reports of timings."""
        ...

    def rates(self, dtype: str, precision: str) -> Rates:
        """Return the device's peak rates; the first call may measure them."""
        ...

    def convolver(self, check: Callable[[], None]) -> Convolver:
        """Return what computes float64 references; it calls ``check``, which may raise, often."""
        ...

    def stopwatch(
        self, problem: Problem, tensors: Mapping[str, NDArray[Any]], out: Mapping[str, NDArray[Any]]
    ) -> AbstractContextManager[Stopwatch]:
        """Return a context with a stopwatch of the problem; ``out`` may be used for its outputs.

        Raises UnsupportedProblem and DeviceOutOfMemory as `run`, and if it needs several pieces.
        """
        ...


class MappingGuard(Protocol):
    """While it exists, pages of a mapping that were truncated from its file read as zeros."""

    def lost(self) -> int | None:
        """Return the offset of the first missing page that was accessed; None if none was."""
        ...

    def remove(self) -> None:
        """Remove it; call once, when nothing accesses the range any longer."""
        ...


def guard_mapping(address: int, size_bytes: int) -> MappingGuard:
    """Guard a mapping of a file that other processes may truncate, for any backend.

    Raises DeviceUnavailable if this system does not support it.
    """
    # The handler of SIGBUS is in the CPU's library, which is loaded when it is first needed.
    from convgrad_service.backends.cpu.guard import Guard

    return Guard(address, size_bytes)


class OnHost:
    """The parts of `ServingBackend` that are trivial for a backend that computes on the host."""

    devices = 1
    name = "cpu"
    # With one, a problem of a millisecond would wait for another client's of a minute.
    slots = 2
    pins = False

    def vitals(self) -> Vitals:
        """See `Backend.vitals`: the machine's memory. Kernels are part of the package."""
        used, total = _host_memory_bytes()
        return Vitals(used, total)

    def compile_ahead(self, problems: Sequence[Problem]) -> Future[None] | None:
        """Return None: kernels are part of the package."""
        return None

    def adopt(self, address: int, size_bytes: int) -> None:
        """Do nothing."""

    def disown(self, address: int) -> None:
        """Do nothing."""

    def open_handle(self, handle: bytes, size_bytes: int) -> DeviceMemory:
        """Raise UnsupportedProblem."""
        raise UnsupportedProblem("this server computes on the CPU, which has no CUDA memory")

    def resident(self, key: int, version: int, array: NDArray[Any]) -> Any:
        """Return the array itself."""
        return array

    def resident_place(self, key: int, version: int, array: NDArray[Any]) -> Any:
        """Return the array itself."""
        return array

    def forget(self, key: int) -> None:
        """Do nothing: nothing is kept."""

    def described(self) -> Device:
        """Return the processor's description."""
        return Device(backend=self.name, name=processor_name(), processors=usable_cores())

    def rates(self, dtype: str, precision: str) -> Rates:
        """Return rates measured with NumPy."""
        return Rates(*measured_rates(dtype))

    def convolver(self, check: Callable[[], None]) -> Convolver:
        """Return a convolver that uses NumPy's matrix products."""
        return NumpyConvolver(check)

    @contextmanager
    def stopwatch(
        self, problem: Problem, tensors: Mapping[str, NDArray[Any]], out: Mapping[str, NDArray[Any]]
    ) -> Iterator[Stopwatch]:
        """Return a stopwatch that runs in the calling thread and reads the host's clock."""
        run = partial(self.run, problem, tensors, None, out)  # type: ignore[attr-defined]
        yield HostStopwatch({**tensors, **out}, run)


def _host_memory_bytes() -> tuple[int, int]:
    """Return the used and the total memory; zeros without /proc/meminfo."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0, 0
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return (kib["MemTotal"] - kib["MemAvailable"]) * 1024, kib["MemTotal"] * 1024
