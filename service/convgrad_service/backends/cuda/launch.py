"""Loading kernels and launching them, at a few microseconds of host time each."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from convgrad_service.backends.cuda.attributed_launch import AttributedLaunch
from convgrad_service.backends.cuda.compile import Compiler
from convgrad_service.backends.cuda.device import import_cupy
from convgrad_service.plans.cuda.program import (
    ZEROS,
    ZEROS_BYTES,
    ArgumentBlock,
    Clear,
    Instance,
    Launch,
    Step,
)

__all__ = ["Enqueued", "Kernels"]

# CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_MAX_DYNAMIC_SHARED = 8


class Enqueued(Protocol):
    """A step whose arguments are filled in. Not thread-safe."""

    def __call__(self, stream: int) -> None:
        """Enqueue it on a stream; the driver copies the arguments before it returns."""
        ...

    def point(self, addresses: Sequence[int]) -> None:
        """Let it run on other buffers; see `ArgumentBlock.point`."""
        ...


class PlainLaunch:
    """A launch with its arguments filled in. See `Enqueued`.

    CuPy's own call of a kernel inspects the types of its arguments first, which doubles the time.
    """

    __slots__ = ("_given", "_kept", "_launch", "point")

    def __init__(self, launch: Any, function: int, step: Launch, block: ArgumentBlock) -> None:
        pointers = (ctypes.c_void_p * 1)(block.address)
        self._launch = launch
        self._given = function, *step.grid, *step.block, step.shared_bytes
        self._kept = ctypes.addressof(pointers), pointers, block
        self.point = block.point

    def __call__(self, stream: int) -> None:
        self._launch(*self._given, stream, self._kept[0], 0)


class ClearLaunch:
    """A memset of a buffer. See `Enqueued`."""

    __slots__ = ("_address", "_index", "_set", "_size")

    def __init__(self, set_: Any, step: Clear, address: int, buffers: Sequence[str]) -> None:
        self._set, self._size = set_, step.size_bytes
        self._address, self._index = address, buffers.index(step.buffer)

    def __call__(self, stream: int) -> None:
        self._set(self._address, 0, self._size, stream)

    def point(self, addresses: Sequence[int]) -> None:
        """See `Enqueued.point`."""
        self._address = addresses[self._index]


class Kernels:
    """The kernels of one device, compiled and loaded on first use.

    The device must be current in the calling thread. Thread-safe.
    """

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._cuda: Any = import_cupy().cuda
        self._loaded: dict[Instance, Any] = {}
        self._shared: dict[Instance, int] = {}
        self._zeros: dict[int, Any] = {}
        self._lock = threading.Lock()

    def compile_ahead(self, steps: Iterable[Step]) -> Future[None] | None:
        """Start to compile kernels of these steps that are neither loaded nor cached.

        See `Compiler.compile_ahead`. Needs no current device.
        """
        instances = {
            step.instance: None
            for step in steps
            if isinstance(step, Launch) and step.instance not in self._loaded
        }
        return self._compiler.compile_ahead(instances) if instances else None

    def prepare(self, steps: Iterable[Step]) -> None:
        """Compile and load the kernels of these steps, so that running them does not wait."""
        for step in steps:
            if isinstance(step, Launch):
                self.function(step)

    def run(self, steps: Iterable[Step], addresses: Mapping[str, int], stream: Any) -> None:
        """Enqueue the steps on a stream, in order."""
        addresses = {**addresses, ZEROS: self._zeros_of(stream)}
        for step in self.bind(steps, addresses, tuple(addresses)):
            step(stream.ptr)

    def bind(
        self, steps: Iterable[Step], addresses: Mapping[str, int], buffers: Sequence[str]
    ) -> list[Enqueued]:
        """Fill in the steps' arguments, to be enqueued any number of times.

        ``buffers`` are in the order in which `Enqueued.point` will take their addresses.
        """
        return [self._bound(step, addresses, buffers) for step in steps]

    def _bound(self, step: Step, addresses: Mapping[str, int], buffers: Sequence[str]) -> Enqueued:
        if isinstance(step, Clear):
            address = addresses[step.buffer]
            return ClearLaunch(self._cuda.runtime.memsetAsync, step, address, buffers)
        function = self.function(step)
        block = step.arguments.block(addresses, buffers)
        if step.overlaps or step.cluster > 1:
            return AttributedLaunch(function.ptr, step, block)
        return PlainLaunch(self._cuda.driver.launchKernel, function.ptr, step, block)

    def _zeros_of(self, stream: Any) -> int:
        """Return the zeros of a stream, whose kernels run one after another; allocated on first
        use."""
        with self._lock:
            zeros = self._zeros.get(stream.ptr)
            if zeros is None:
                zeros = self._zeros[stream.ptr] = self._cuda.alloc(ZEROS_BYTES)
                self._cuda.runtime.memsetAsync(zeros.ptr, 0, ZEROS_BYTES, stream.ptr)
        return int(zeros.ptr)

    def function(self, step: Launch) -> Any:
        """Return CuPy's function of a launch, with a maximum of shared memory that is enough."""
        function = self._loaded.get(step.instance)
        if function is None or step.shared_bytes > self._shared[step.instance]:
            function = self._load(step)
        return function

    def _load(self, step: Launch) -> Any:
        instance = step.instance
        # Compiling takes seconds, so it happens outside the lock.
        cubin = self._compiler.cubin(instance)
        with self._lock:
            function = self._loaded.get(instance)
            if function is None:
                module = self._cuda.Module()
                module.load(cubin.code)
                function = module.get_function(instance.entry)
                # A kernel has 48 KiB less its static shared memory by default; always set it.
                self._shared[instance] = 0
                self._loaded[instance] = function
            if step.shared_bytes > self._shared[instance]:
                self._cuda.driver.funcSetAttribute(
                    function.ptr, _MAX_DYNAMIC_SHARED, step.shared_bytes
                )
                self._shared[instance] = step.shared_bytes
        return function
