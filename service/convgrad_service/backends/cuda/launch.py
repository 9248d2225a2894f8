"""Loading kernels and launching them, at a few microseconds of host time each."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any

from convgrad_service.backends.cuda.attributed_launch import AttributedLaunch
from convgrad_service.backends.cuda.compile import Compiler
from convgrad_service.backends.cuda.device import import_cupy
from convgrad_service.plans.cuda.program import (
    ZEROS,
    ZEROS_BYTES,
    Clear,
    Instance,
    Launch,
    Step,
)

__all__ = ["Kernels"]

# CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_MAX_DYNAMIC_SHARED = 8


class _Addresses(dict[str, int]):
    """Addresses of a plan's buffers, and of the zeros, which are allocated on first use."""

    def __init__(self, given: Mapping[str, int], zeros: Callable[[], int]) -> None:
        super().__init__(given)
        self._zeros = zeros

    def __missing__(self, name: str) -> int:
        if name != ZEROS:
            raise KeyError(name)
        return self._zeros()


class PlainLaunch:
    """A launch with its arguments filled in.

    The driver copies the structure before it returns. CuPy's own call of a kernel inspects the
    types of its arguments first, which doubles the time.
    """

    __slots__ = ("_arguments", "_function", "_kept", "_launch", "_shape")

    def __init__(self, launch: Any, function: int, step: Launch, filled: bytearray) -> None:
        self._launch, self._function = launch, function
        self._shape = (*step.grid, *step.block, step.shared_bytes)
        structure = (ctypes.c_char * len(filled)).from_buffer(filled)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(structure))
        self._arguments = ctypes.addressof(pointers)
        self._kept = structure, pointers

    def __call__(self, stream: int) -> None:
        self._launch(self._function, *self._shape, stream, self._arguments, 0)


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
                self._function(step)

    def run(self, steps: Iterable[Step], addresses: Mapping[str, int], stream: Any) -> None:
        """Enqueue the steps on a stream, in order."""
        addresses = _Addresses(addresses, lambda: self._zeros_of(stream))
        for step in self.bind(steps, addresses):
            step(stream.ptr)

    def bind(
        self, steps: Iterable[Step], addresses: Mapping[str, int]
    ) -> list[Callable[[int], None]]:
        """Fill in the steps' arguments; each step returned takes a stream, and can be repeated."""
        return [self._bound(step, addresses) for step in steps]

    def _bound(self, step: Step, addresses: Mapping[str, int]) -> Callable[[int], None]:
        if isinstance(step, Clear):
            address, size, clear = addresses[step.buffer], step.size_bytes, self._cuda.runtime
            return lambda stream: clear.memsetAsync(address, 0, size, stream)
        function = self._function(step)
        filled = step.arguments.fill(addresses)
        if step.overlaps or step.cluster > 1:
            return AttributedLaunch(function.ptr, step, filled)
        return PlainLaunch(self._cuda.driver.launchKernel, function.ptr, step, filled)

    def _zeros_of(self, stream: Any) -> int:
        """Return the zeros of a stream, whose kernels run one after another."""
        with self._lock:
            zeros = self._zeros.get(stream.ptr)
            if zeros is None:
                zeros = self._zeros[stream.ptr] = self._cuda.alloc(ZEROS_BYTES)
                self._cuda.runtime.memsetAsync(zeros.ptr, 0, ZEROS_BYTES, stream.ptr)
        return int(zeros.ptr)

    def _function(self, step: Launch) -> Any:
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
