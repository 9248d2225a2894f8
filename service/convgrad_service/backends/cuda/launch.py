"""Loaded kernels, and launching them: a few microseconds of the host for each."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from convgrad_service.backends.cuda.compile import Compiler
from convgrad_service.backends.cuda.device import import_cupy
from convgrad_service.plans.cuda_program import Clear, Instance, Launch, Step

__all__ = ["Kernels"]

# CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_MAX_DYNAMIC_SHARED = 8


class Kernels:
    """The kernels of one device, compiled and loaded as they are first needed.

    The device must be current in the calling thread. Safe to call from several threads.
    """

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._cuda: Any = import_cupy().cuda
        self._loaded: dict[Instance, Any] = {}
        self._shared: dict[Instance, int] = {}
        self._lock = threading.Lock()

    def prepare(self, steps: Iterable[Step]) -> None:
        """Compile and load what these steps need, so that running them does not wait for it."""
        for step in steps:
            if isinstance(step, Launch):
                self._function(step)

    def run(self, steps: Iterable[Step], addresses: Mapping[str, int], stream: Any) -> None:
        """Put the steps on a stream, in order; returns before they have run."""
        for step in steps:
            if isinstance(step, Clear):
                self._cuda.runtime.memsetAsync(
                    addresses[step.buffer], 0, step.size_bytes, stream.ptr
                )
                continue
            function = self._function(step)
            filled = step.arguments.fill(addresses)
            # CuPy passes an array of one element by value.
            argument = np.frombuffer(filled, f"V{len(filled)}")
            function(
                step.grid, step.block, (argument,), shared_mem=step.shared_bytes, stream=stream
            )

    def _function(self, step: Launch) -> Any:
        function = self._loaded.get(step.instance)
        if function is None or step.shared_bytes > self._shared[step.instance]:
            function = self._load(step)
        return function

    def _load(self, step: Launch) -> Any:
        instance = step.instance
        # Compiling takes seconds, so other kernels are not kept waiting for it.
        cubin = self._compiler.cubin(instance)
        with self._lock:
            function = self._loaded.get(instance)
            if function is None:
                module = self._cuda.Module()
                module.load(cubin.code)
                function = module.get_function(instance.entry)
                # What a kernel may have without asking is 48 KiB less what it has statically: it
                # is asked for every time.
                self._shared[instance] = 0
                self._loaded[instance] = function
            if step.shared_bytes > self._shared[instance]:
                self._cuda.driver.funcSetAttribute(
                    function.ptr, _MAX_DYNAMIC_SHARED, step.shared_bytes
                )
                self._shared[instance] = step.shared_bytes
        return function
