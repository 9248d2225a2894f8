"""What the engine asks of a backend, and what a backend answers."""

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
from convgrad_service.cgroups import usable_cores
from convgrad_service.plans.base import Plan
from convgrad_service.problems.base import Problem, TensorSpec

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
    """One problem's outputs, by name, and what computing them took.

    ``compute_s`` is seconds in the backend; ``workspace_bytes`` the memory used beyond inputs and
    outputs. ``upload_s`` and ``download_s`` are the way to a device and back, where there is one.
    ``words`` is the answer of a problem that is answered in words.
    """

    outputs: dict[str, NDArray[Any]]
    kernel: str
    compute_s: float
    pieces: int
    workspace_bytes: int
    upload_s: float = 0.0
    download_s: float = 0.0
    words: str = ""


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
    """Set once nobody wants the answer any more; a backend says through it that it gets on."""

    progress = 0

    def advanced(self) -> None:
        """Some part of the computation is done: it does not hang."""
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
        """Compute a problem; blocks, and leaves the interpreter to others meanwhile.

        ``tensors`` are the problem's inputs, in its layout. Once ``cancelled`` is set, the answer
        is not wanted any more; where it is a `Cancellation`, each step that is done is reported to
        it. ``out`` offers a place for each output; where a backend uses it,
        that very array is the outcome's.

        Raises:
            InvalidProblem: the data contradict the problem (a pool index out of its window).
            DeadlineExceeded: ``cancelled`` was set before the answer was ready.
            UnsupportedProblem, DeviceOutOfMemory, DeviceUnavailable: no kernel, memory or device.
        """
        ...

    def vitals(self) -> Vitals:
        """How its device is now; asked every few seconds."""
        ...

    def explain(self, problem: Problem) -> Plan:
        """Which kernel `run` would use, and why not another; computes nothing."""
        ...


class DeviceTensor(Protocol):
    """A tensor on a device, which `run` takes in an array's place. Cut like one."""

    def fill(self, array: NDArray[Any]) -> None:
        """Fill it from the host, and wait."""
        ...

    def read(self, target: NDArray[Any]) -> None:
        """Copy it to the host, and wait."""
        ...


class DeviceMemory(Protocol):
    """Memory of a device that another process owns."""

    def array(self, offset: int, spec: TensorSpec) -> DeviceTensor:
        """A tensor in it."""
        ...

    def close(self) -> None:
        """Let go of it: nothing uses it any more."""
        ...


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device cannot exceed: computing in one type, moving, and starting a kernel."""

    flops_per_s: float
    bytes_per_s: float
    launch_s: float
    source: str


class Stopwatch(Protocol):
    """One problem, ready to be run again and again on tensors that stay where they are.

    ``tensors`` are its inputs and outputs by name, as libraries on the same device take them.
    """

    tensors: Mapping[str, Any]

    @property
    def predicted_s(self) -> float | None:
        """What the plan expects; None where it has no model."""
        ...

    def cold(self) -> float:
        """Seconds of one run, the caches flushed before it."""
        ...

    def warm(self) -> float:
        """Seconds of one run after another."""
        ...

    def run_of(self, count: int) -> float:
        """Return the seconds that a number of back-to-back runs take."""
        ...

    def like(self, run: Callable[[], Any]) -> Stopwatch:
        """Return a clock for ``run``, which must use the same device."""
        ...

    def others(self) -> Iterator[tuple[str, AbstractContextManager[Stopwatch]]]:
        """The other kernels that could run the problem, by name, best first."""
        ...

    def clocks(self) -> Clocks | None:
        """How the device runs at this moment."""
        ...


class ServingBackend(Backend, Protocol):
    """A backend that a worker of a server runs."""

    devices: int
    """How many devices of this kind there are here, its own included."""

    slots: int
    """How many problems are best computed at a time, where nothing else was asked for."""

    pins: bool
    """Whether it keeps hold of pages of the memory that it adopts."""

    def compile_ahead(self, problems: Sequence[Problem]) -> Future[None] | None:
        """Begin what takes seconds before `run` can compute problems like these for the first time;
        None where there is nothing of the kind.

        Once the future is done, `run` begins at once; it has the error where there was one. To
        cancel it is to say that the problems need not be computed any more.

        Raises what `run` does for a problem that no kernel computes.
        """
        ...

    def adopt(self, address: int, size_bytes: int) -> None:
        """Know that tensors will lie in this memory, which stays mapped until `disown`."""
        ...

    def disown(self, address: int) -> None:
        """Let go of the memory adopted at ``address``: it is about to be unmapped."""
        ...

    def open_handle(self, handle: bytes, size_bytes: int) -> DeviceMemory:
        """Map another process's memory of the device by the handle that CUDA gave it.

        Raises:
            InvalidProblem: it cannot be opened, or is smaller than ``size_bytes``.
            UnsupportedProblem: there is no such memory here.
        """
        ...

    def resident(self, key: int, version: int, array: NDArray[Any]) -> Any:
        """What `run` may take for an input that will be used again.

        Until `forget` is called with the key, it may be kept on the device; another version of the
        same key is another tensor, and the one before is of no more use.
        """
        ...

    def resident_place(self, key: int, version: int, array: NDArray[Any]) -> Any:
        """Where `run` may write an output for which `resident` will be asked, as it is and cut.

        It writes the array too: what is kept on the device may be lost.
        """
        ...

    def forget(self, key: int) -> None:
        """Let go of what was kept under a key."""
        ...

    def described(self) -> Device:
        """What computes, for those who read a timing."""
        ...

    def rates(self, dtype: str, precision: str) -> Rates:
        """The device's peak rates; the first call may measure them."""
        ...

    def convolver(self, check: Callable[[], None]) -> Convolver:
        """What computes references in float64; ``check`` is called meanwhile and may raise."""
        ...

    def stopwatch(
        self, problem: Problem, tensors: Mapping[str, NDArray[Any]], out: Mapping[str, NDArray[Any]]
    ) -> AbstractContextManager[Stopwatch]:
        """A problem ready to be timed; ``out`` is where its outputs may be written.

        Raises:
            UnsupportedProblem, DeviceOutOfMemory: as `run`, or it needs more than one piece.
        """
        ...


class MappingGuard(Protocol):
    """While it lasts, a page of a mapping that its file has lost reads as zeros."""

    def lost(self) -> int | None:
        """The offset of the first page that was missing when it was touched; None if none was."""
        ...

    def remove(self) -> None:
        """End it; nothing may touch the range any more. Once."""
        ...


def guard_mapping(address: int, size_bytes: int) -> MappingGuard:
    """Guard a mapping of a file that others may shorten, whatever backend computes in it.

    Raises DeviceUnavailable where this system cannot.
    """
    # The handler of SIGBUS is in the CPU's library, which is loaded when it is first needed.
    from convgrad_service.backends.cpu.guard import Guard

    return Guard(address, size_bytes)


class OnHost:
    """What a backend without a device of its own says of itself as a `ServingBackend`."""

    devices = 1
    name = "cpu"
    # With one, a problem of a millisecond would wait for a stranger's of a minute.
    slots = 2
    pins = False

    def vitals(self) -> Vitals:
        """See `Backend.vitals`: the machine's memory; kernels came with the package."""
        used, total = _host_memory_bytes()
        return Vitals(used, total)

    def compile_ahead(self, problems: Sequence[Problem]) -> Future[None] | None:
        """Kernels came compiled."""
        return None

    def adopt(self, address: int, size_bytes: int) -> None:
        """There is nothing to prepare."""

    def disown(self, address: int) -> None:
        """Nor to let go of."""

    def open_handle(self, handle: bytes, size_bytes: int) -> DeviceMemory:
        """Refuse."""
        raise UnsupportedProblem("this server computes on the CPU, which has no CUDA memory")

    def resident(self, key: int, version: int, array: NDArray[Any]) -> Any:
        """The array: it is where it is computed with."""
        return array

    def resident_place(self, key: int, version: int, array: NDArray[Any]) -> Any:
        """The array, again."""
        return array

    def forget(self, key: int) -> None:
        """Nothing was kept."""

    def described(self) -> Device:
        """The processor."""
        return Device(backend=self.name, name=processor_name(), processors=usable_cores())

    def rates(self, dtype: str, precision: str) -> Rates:
        """Measured with NumPy."""
        return Rates(*measured_rates(dtype))

    def convolver(self, check: Callable[[], None]) -> Convolver:
        """NumPy's matrix products."""
        return NumpyConvolver(check)

    @contextmanager
    def stopwatch(
        self, problem: Problem, tensors: Mapping[str, NDArray[Any]], out: Mapping[str, NDArray[Any]]
    ) -> Iterator[Stopwatch]:
        """Runs in the calling thread, timed by the host's clock."""
        run = partial(self.run, problem, tensors, None, out)  # type: ignore[attr-defined]
        yield HostStopwatch({**tensors, **out}, run)


def _host_memory_bytes() -> tuple[int, int]:
    """Used and in all; zeros on a system that does not say it as Linux does."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0, 0
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return (kib["MemTotal"] - kib["MemAvailable"]) * 1024, kib["MemTotal"] * 1024
