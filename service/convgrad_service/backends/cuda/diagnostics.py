"""The part of `CudaBackend` for verification and timing: references, a stopwatch, peak rates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any

from numpy.typing import NDArray

from convgrad.contract.timing import Device
from convgrad.errors import DeviceOutOfMemory, UnsupportedProblem
from convgrad_service.backends.base import Rates
from convgrad_service.backends.cuda.cancellation import wait_for
from convgrad_service.backends.cuda.device import cuda_driver_major, import_cupy
from convgrad_service.backends.cuda.graphs import Graphs
from convgrad_service.backends.cuda.launch import Kernels
from convgrad_service.backends.cuda.memory import Arena, arena_of
from convgrad_service.backends.cuda.nvrtc import find_nvrtc
from convgrad_service.backends.cuda.reference_convolution import CudaConvolver, ReferenceKernels
from convgrad_service.backends.cuda.stopwatch import CudaStopwatch, Flusher
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Families
from convgrad_service.plans.cuda.planner import plan_for
from convgrad_service.plans.cuda.program import CudaPlan
from convgrad_service.problems.base import Problem

__all__ = ["Diagnostics"]

Tensors = Mapping[str, NDArray[Any]]

# FLOPs for each clock and multiprocessor, of dense tensor cores, in 16-bit types and in float64.
_PER_CLOCK: Mapping[tuple[int, int], tuple[int, int]] = {
    (8, 0): (2048, 128),
    (8, 6): (1024, 4),
    (8, 9): (1024, 4),
    (9, 0): (4096, 256),
    (10, 0): (8192, 128),
    (12, 0): (1024, 4),
}
# Rate of float32 relative to 16-bit types: by TF32, or by six products in bfloat16.
_FLOAT32_RATE = {"high": 1 / 2, "highest": 1 / 6}
# An empty graph node, measured on an H200.
_LAUNCH_S = 3.1e-6
_COPY_BYTES, _REPEATS = 512 * 2**20, 5


def peak_flops_per_s(device: CudaDevice, clock_hz: float, dtype: str, precision: str) -> float:
    """Return the device's theoretical peak in a type."""
    bits16, float64 = _PER_CLOCK.get(device.capability, _PER_CLOCK[9, 0])
    rate = float(float64 if dtype == "float64" else bits16)
    if dtype == "float32":
        rate *= _FLOAT32_RATE[precision]
    return rate * device.multiprocessors * clock_hz


class Diagnostics:
    """Base class of `CudaBackend`."""

    name: str
    device: CudaDevice
    _cuda: Any
    _index: int
    _uuid: str
    _families: Families
    _kernels: Kernels
    _graphs: Graphs
    _prepared: Callable[[Problem], tuple[CudaPlan, Arena]]
    _parts: Callable[[Problem], int]
    _allocate: Callable[[int, Problem], Any]
    _translated: Callable[[Problem], AbstractContextManager[None]]

    def described(self) -> Device:
        """See `ServingBackend.described`."""
        return Device(
            backend=self.name,
            name=self.device.name,
            index=self._index,
            uuid=self._uuid,
            processors=self.device.multiprocessors,
        )

    def convolver(self, check: Callable[[], None]) -> CudaConvolver:
        """See `ServingBackend.convolver`."""
        return CudaConvolver(self._reference_kernels, self._cuda.Device(self._index), check)

    @cached_property
    def _reference_kernels(self) -> ReferenceKernels:
        return ReferenceKernels(find_nvrtc(cuda_driver_major()), self.device.architecture)

    def rates(self, dtype: str, precision: str) -> Rates:
        """See `ServingBackend.rates`: FLOP/s are theoretical, bandwidth is measured."""
        attributes = self._cuda.Device(self._index).attributes
        clock_hz = 1e3 * attributes["ClockRate"]
        return Rates(
            peak_flops_per_s(self.device, clock_hz, dtype, precision),
            self._copy_bytes_per_s,
            _LAUNCH_S,
            f"tensor cores at {clock_hz / 1e6:.0f} MHz on paper, and a copy of 512 MiB measured",
        )

    @cached_property
    def _copy_bytes_per_s(self) -> float:
        cupy = import_cupy()
        with self._cuda.Device(self._index), self._cuda.Stream(non_blocking=True) as stream:
            source, target = (cupy.zeros(_COPY_BYTES // 4, cupy.float32) for _ in range(2))
            best_ms = float("inf")
            for _ in range(_REPEATS):
                begin, end = self._cuda.Event(), self._cuda.Event()
                begin.record(stream)
                target.data.copy_from_device_async(source.data, _COPY_BYTES, stream)
                end.record(stream)
                end.synchronize()
                best_ms = min(best_ms, self._cuda.get_elapsed_time(begin, end))
        return 2 * _COPY_BYTES / (best_ms / 1e3)

    @contextmanager
    def stopwatch(
        self, problem: Problem, tensors: Tensors, out: Tensors
    ) -> Iterator[CudaStopwatch]:
        """See `ServingBackend.stopwatch`: times the plan's graph on tensors in device memory."""
        if self._parts(problem) > 1:
            raise DeviceOutOfMemory(
                f"{problem.operation} takes more memory than {self.device.name} has, and what is "
                "timed must fit; expected a smaller batch"
            )
        plan, _ = self._prepared(problem)
        with self._timed(problem, tensors, plan, Flusher) as watch:
            yield watch

    def stopwatch_of(
        self, problem: Problem, tensors: Tensors, plan: CudaPlan
    ) -> AbstractContextManager[CudaStopwatch]:
        """Return a stopwatch of any plan for the problem, which must fit in device memory."""
        return self._timed(problem, tensors, plan, lambda: self._flusher, is_first=False)

    @cached_property
    def _flusher(self) -> Flusher:
        return Flusher()

    @contextmanager
    def _timed(
        self,
        problem: Problem,
        tensors: Tensors,
        plan: CudaPlan,
        flusher: Callable[[], Flusher],
        *,
        is_first: bool = True,
    ) -> Iterator[CudaStopwatch]:
        wait_for(self._kernels.compile_ahead(plan.steps), None)
        arena = arena_of(problem, plan)
        cupy = import_cupy()
        with self._translated(problem), self._cuda.Device(self._index):
            stream = self._cuda.Stream(non_blocking=True)
            self._kernels.prepare(plan.steps)
            memory = self._allocate(arena.size_bytes, problem)
            addresses = arena.addresses(memory.ptr)
            views = {}
            for name, spec in (*problem.inputs.items(), *problem.outputs.items()):
                pointer = memory + (addresses[name] - memory.ptr)
                views[name] = cupy.ndarray(spec.shape, spec.dtype.numpy, pointer)
                if name in problem.inputs:
                    data = tensors[name].ctypes.data
                    self._cuda.runtime.memcpy(addresses[name], data, spec.size_bytes, 1)
            try:
                # A first run creates the streams and zeros, which a capture cannot.
                self._graphs.run_steps(plan, addresses, stream)
                stream.synchronize()
                graph, flush = self._graphs.captured(plan, addresses, stream), flusher()

                def others() -> Iterator[tuple[str, AbstractContextManager[CudaStopwatch]]]:
                    return self._others(problem, tensors, plan, flush) if is_first else iter(())

                yield CudaStopwatch(
                    views,
                    lambda: graph.launch(stream),
                    stream,
                    flush,
                    self._uuid,
                    plan.expected_s,
                    others,
                )
            finally:
                # Kernels must have ended before their memory returns to the pool.
                stream.synchronize()

    def _others(
        self, problem: Problem, tensors: Tensors, chosen: CudaPlan, flush: Flusher
    ) -> Iterator[tuple[str, AbstractContextManager[CudaStopwatch]]]:
        """Yield plans without the families of earlier ones, until no family is left."""
        excluded = set(chosen.families)
        while True:
            try:
                plan = plan_for(problem, self.device, self._families.without(excluded))
            except UnsupportedProblem:
                return
            yield plan.kernel, self._timed(problem, tensors, plan, lambda: flush, is_first=False)
            if plan.families <= excluded:
                return
            excluded |= plan.families
