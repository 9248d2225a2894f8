"""`CudaBackend`: planning, memory, launches, and failures of memory or of the GPU."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad.dtypes import DType
from convgrad.errors import DeviceOutOfMemory, DeviceUnavailable, InvalidProblem, ServiceError
from convgrad_service.backends.base import Outcome, Plan, Vitals
from convgrad_service.backends.cuda.cancellation import stop_if, wait_for
from convgrad_service.backends.cuda.compile import DEFAULT_CACHE, Compiler
from convgrad_service.backends.cuda.device import (
    cuda_driver_major,
    describe,
    device_count,
    import_cupy,
    uuid_of,
)
from convgrad_service.backends.cuda.device_tensors import (
    CudaTensor,
    IpcMemory,
    on_the_host,
    read_in_place,
    write_in_place,
)
from convgrad_service.backends.cuda.diagnostics import Diagnostics
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.faults import alloc_or_none, fatal_fault
from convgrad_service.backends.cuda.graphs import Graphs
from convgrad_service.backends.cuda.launch import Kernels
from convgrad_service.backends.cuda.memory import COPIERS, Arena, Lane, UploadQueue, arena_of
from convgrad_service.backends.cuda.nvrtc import CompileError, find_nvrtc
from convgrad_service.backends.cuda.pinned import Pinned
from convgrad_service.backends.cuda.residents import Residents, mirrored, places_of
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Families
from convgrad_service.plans.cuda.planner import plan_for
from convgrad_service.plans.cuda.program import CudaPlan
from convgrad_service.plans.cuda.splitting import parts_that_fit
from convgrad_service.problems import run_in_pieces
from convgrad_service.problems.base import Problem, TensorSpec

__all__ = ["CudaBackend"]

Tensors = Mapping[str, NDArray[Any]]
# Device memory left to the context, the kernels and other programs.
RESERVE_BYTES = 1 * 2**30
# Device memory that each lane's pool starts with, and at most this share of all of it.
POOLED_BYTES, POOLED_SHARE = 64 * 2**20, 256


class CudaBackend(Diagnostics):
    """Computes every operation on one GPU, deterministically.

    Requests run concurrently on ``lanes`` streams. A problem larger than the GPU's memory, or than
    ``memory_limit_bytes``, runs in pieces. ``cache`` is the folder of compiled kernels, and
    ``compilers_ahead`` processes are started for the first ones to compile. ``plan``, an
    attribute, may be replaced by what plans elsewhere. For tests, ``poison`` fills outputs and
    workspace with NaNs first, and ``debug`` kernels turn endless waits into faults.

    Raises
    ------
    DeviceUnavailable
        No CuPy, no NVRTC, no such GPU, or one too old.
    """

    name = "cuda"
    # One request uploads, one computes, one downloads, and one arrives.
    slots = 4
    pins = True

    def __init__(
        self,
        device: int = 0,
        *,
        lanes: int = slots,
        memory_limit_bytes: int | None = None,
        cache: Path | None = DEFAULT_CACHE,
        compilers_ahead: int = 0,
        families: Families = FAMILIES,
        poison: bool = False,
        debug: bool = False,
    ) -> None:
        self._cuda: Any = import_cupy().cuda
        self.devices = device_count()
        self.device: CudaDevice = describe(device, memory_limit_bytes)
        self._index, self._poison, self._uuid = device, poison, uuid_of(device)
        self._limited = memory_limit_bytes is not None
        try:
            nvrtc, architecture = find_nvrtc(cuda_driver_major()), self.device.architecture
            compiler = Compiler(nvrtc, architecture, cache, debug=debug, ahead=compilers_ahead)
        except CompileError as error:
            raise DeviceUnavailable(str(error)) from error
        self._families = families
        self.plan: Callable[[Problem], CudaPlan]
        self.plan = partial(plan_for, device=self.device, families=families)
        self._prepared = lru_cache(maxsize=1024)(self._prepare)
        self._fault: str | None = None
        self._residents = Residents(self._uploaded, self._room_for)
        with self._cuda.Device(device):
            self._compiler, self._kernels = compiler, Kernels(compiler)
            self._graphs = Graphs(self._kernels, lambda: self._cuda.Stream(non_blocking=True))
            self._pinned = Pinned()
            self._copiers = ThreadPoolExecutor(COPIERS, "convgrad-cuda-copy")
            self._lanes: queue.SimpleQueue[Lane] = queue.SimpleQueue()
            uploads = UploadQueue()
            pooled = min(POOLED_BYTES, self.device.memory_bytes // POOLED_SHARE)
            for _ in range(lanes):
                self._lanes.put(Lane(self._copiers, self._pinned, uploads, pooled))

    def vitals(self) -> Vitals:
        """See `Backend.vitals`."""
        compiler, runtime = self._compiler, self._cuda.runtime
        try:
            with self._cuda.Device(self._index):
                free, total = runtime.memGetInfo()
        except runtime.CUDARuntimeError:
            free = total = 0  # the GPU has failed
        counts = compiler.found, compiler.compiled, compiler.compile_s
        return Vitals(total - free, total, *counts, self._uuid)

    def adopt(self, address: int, size_bytes: int) -> None:
        """See `ServingBackend.adopt`: tensors there are copied without staging."""
        self._pinned.adopt(address, size_bytes)

    def disown(self, address: int) -> None:
        """See `ServingBackend.disown`."""
        self._pinned.disown(address)

    def open_handle(self, handle: bytes, size_bytes: int) -> IpcMemory:
        """See `ServingBackend.open_handle`."""
        with self._cuda.Device(self._index):
            return IpcMemory(handle, size_bytes)

    def resident(self, key: int, version: int, array: NDArray[Any]) -> Any:
        """See `ServingBackend.resident`: uploads a tensor on first use, if there is room."""
        return self._residents.of(key, version, array)

    def resident_place(self, key: int, version: int, array: NDArray[Any]) -> Any:
        """See `ServingBackend.resident_place`."""
        return self._residents.place(key, version, array)

    def forget(self, key: int) -> None:
        """See `ServingBackend.forget`."""
        self._residents.forget(key)

    @property
    def fault(self) -> str | None:
        """Why this process can no longer use the GPU; None while it can."""
        return self._fault

    def run(
        self,
        problem: Problem,
        tensors: Tensors,
        cancelled: threading.Event | None = None,
        out: Tensors | None = None,
    ) -> Outcome:
        """See `Backend.run`.

        ``compute_s`` is the GPU's time without copies.
        """
        done: list[Outcome] = []

        def one(part: Problem, inputs: Tensors) -> dict[str, NDArray[Any]]:
            wanted = out if part is problem else None
            # Take a lane only once the kernels are compiled.
            wait_for(self._kernels.compile_ahead(self._prepared(part)[0].steps), cancelled)
            with self._translated(part), self._lane() as lane:
                piece = self._compute(part, inputs, wanted or {}, lane, cancelled)
            done.append(replace(piece, outputs={}))  # pieces' outputs are not kept
            return piece.outputs

        if self._fault is not None:
            raise DeviceUnavailable(f"{self.device.name} failed before: {self._fault}")
        parts = self._parts(problem)
        try:
            if parts == 1:
                outputs = one(problem, tensors)
            else:
                outputs = run_in_pieces(problem, tensors, parts, one)
        except DeviceOutOfMemory:
            # Other programs use memory too. Smaller pieces may be used if they give the same bits:
            # not if pieces are summed, because results would depend on what else runs.
            finer = self._parts_by_free_memory(problem)
            if finer <= parts or _is_summed(problem) or not self._same_bits(problem, parts, finer):
                raise
            done.clear()
            outputs = run_in_pieces(problem, tensors, finer, one)
        return replace(
            done[-1],
            outputs=outputs,
            compute_s=sum(piece.compute_s for piece in done),
            pieces=len(done),
            workspace_bytes=max(piece.workspace_bytes for piece in done),
            upload_s=sum(piece.upload_s for piece in done),
            download_s=sum(piece.download_s for piece in done),
        )

    def compile_ahead(self, problems: Sequence[Problem]) -> Future[None] | None:
        """See `ServingBackend.compile_ahead`."""
        pieces = (piece for each in problems for piece in each.split(self._parts(each)))
        plans = (self._prepared(piece.problem)[0] for piece in pieces)
        return self._kernels.compile_ahead(step for plan in plans for step in plan.steps)

    def explain(self, problem: Problem) -> Plan:
        """See `Backend.explain`."""
        plan, _ = self._prepared(problem)
        pieces = len(problem.split(self._parts(problem)))
        return Plan(plan.kernel, plan.workspace_bytes, pieces, plan.passed_over)

    def close(self) -> None:
        """Stop compilations and threads, and return pooled memory to the device."""
        self._compiler.close()
        self._copiers.shutdown()
        if self._fault is None:
            self._free_cached()

    def _parts(self, problem: Problem) -> int:
        """Return the number of parts for the device's total memory: free memory changes results."""
        reserve = 0 if self._limited else RESERVE_BYTES
        return parts_that_fit(problem, self.device.memory_bytes - reserve, self._needed)

    def _parts_by_free_memory(self, problem: Problem) -> int:
        with self._translated(problem), self._cuda.Device(self._index):
            self._free_cached()
            free, _ = self._cuda.runtime.memGetInfo()
        return parts_that_fit(problem, free - RESERVE_BYTES // 8, self._needed)

    def _same_bits(self, problem: Problem, parts: int, finer: int) -> bool:
        """Whether pieces of either size add in the same order."""
        pieces = (*problem.split(parts), *problem.split(finer))
        return len({self._prepared(piece.problem)[0].orders for piece in pieces}) == 1

    def _needed(self, problem: Problem) -> int:
        return self._prepared(problem)[1].size_bytes

    def _prepare(self, problem: Problem) -> tuple[CudaPlan, Arena]:
        plan = self.plan(problem)
        return plan, arena_of(problem, plan)

    @contextmanager
    def _lane(self) -> Iterator[Lane]:
        lane = self._lanes.get()
        try:
            with self._cuda.Device(self._index), lane.stream:
                yield lane
        finally:
            self._lanes.put(lane)

    @contextmanager
    def _translated(self, problem: Problem) -> Iterator[None]:
        """Translate CUDA's errors to the service's, and remember a fatal one."""
        try:
            yield
        except ServiceError:
            raise
        except MemoryError as error:
            raise DeviceOutOfMemory(
                f"there is not enough free memory for {problem.operation}: {error}"
            ) from error
        except Exception as error:
            fault = fatal_fault(error)
            if fault is not None:
                self._fault = f"{fault} ({error})"
                raise DeviceUnavailable(f"{self.device.name} failed: {fault}") from error
            raise

    def _compute(
        self,
        problem: Problem,
        tensors: Tensors,
        places: Tensors,
        lane: Lane,
        cancelled: threading.Event | None,
    ) -> Outcome:
        stop_if(cancelled)
        plan, arena = self._prepared(problem)
        self._kernels.prepare(plan.steps)
        memory = self._allocate(arena.size_bytes, problem)
        base: int = memory.ptr
        addresses = arena.addresses(base)
        started = time.perf_counter()
        try:
            inputs = {name: tensors[name] for name in problem.inputs}
            on_host = read_in_place(inputs, addresses, lane.stream)
            lane.upload(((arena.offsets[name], array) for name, array in on_host.items()), base)
            if self._poison:
                start, size = base + arena.input_bytes, arena.size_bytes - arena.input_bytes
                self._cuda.runtime.memsetAsync(start, 0xFF, size, lane.stream.ptr)
            outputs = places_of(problem, places)
            to_move = write_in_place(outputs, addresses)
            begin, end = self._cuda.Event(), self._cuda.Event()
            begin.record(lane.stream)
            self._graphs.run(plan, addresses, lane.stream)
            end.record(lane.stream)
            for name, place in to_move.items():
                place.copy_from(addresses[name], lane.stream)
            found = {check.buffer: np.zeros(1, np.int64) for check in plan.checks}
            wanted = {**on_the_host(outputs), **found}
            # Downloads without staging are enqueued behind the kernels at once.
            rest = lane.download_soon(
                ((addresses[name] - base, wanted[name]) for name in wanted), base
            )
            begin.synchronize()
            uploaded = time.perf_counter()
            stop_if(cancelled)
            end.synchronize()
            computed = time.perf_counter()
            stop_if(cancelled)
            # Outputs in the arena are downloaded together, those elsewhere one by one.
            inside = [each for each in rest if 0 <= each[0] < arena.size_bytes]
            outside = [[each] for each in rest if not 0 <= each[0] < arena.size_bytes]
            for group in [inside, *outside] if inside else outside:
                lane.download(group, base)
            lane.stream.synchronize()
        finally:
            # Kernels must have ended before their memory returns to the pool.
            lane.stream.synchronize()
        for check in plan.checks:
            if found[check.buffer][0]:
                raise InvalidProblem(check.sentence)
        for result in mirrored(outputs):
            result.written()
        compute_s = self._cuda.get_elapsed_time(begin, end) / 1e3
        download_s = time.perf_counter() - computed
        taken = plan.workspace_bytes, uploaded - started, download_s
        return Outcome(outputs, plan.kernel, compute_s, 1, *taken)

    def _uploaded(self, array: NDArray[Any]) -> CudaTensor | None:
        """Copy an array to the device; return None if there is no room."""
        with self._lane() as lane:
            tensor = self._room_for(array)
            if tensor is not None:
                lane.upload([(0, array)], tensor.address)
                lane.stream.synchronize()
        return tensor

    def _room_for(self, array: NDArray[Any]) -> CudaTensor | None:
        """Allocate a tensor like an array on the device; return None if there is no room."""
        with self._cuda.Device(self._index):
            memory = alloc_or_none(self._cuda.alloc, array.nbytes)
        if memory is None:
            return None
        spec = TensorSpec(array.shape, DType(array.dtype.name))
        return CudaTensor.whole(memory.ptr, spec, memory)

    def _allocate(self, size: int, problem: Problem) -> Any:
        """Allocate memory; if there is too little, drop cached tensors and try again.

        Raises
        ------
        DeviceOutOfMemory
            There is still too little.
        """
        memory = alloc_or_none(self._cuda.alloc, size)
        if memory is None:
            self._residents.clear()
            self._free_cached()
            memory = alloc_or_none(self._cuda.alloc, size)
        if memory is None:
            raise DeviceOutOfMemory(
                f"{problem.operation} needs {size} bytes on {self.device.name}, which has fewer "
                "free; expected a smaller problem, or a device with nothing else on it"
            )
        return memory

    def _free_cached(self) -> None:
        with self._cuda.Device(self._index):
            import_cupy().get_default_memory_pool().free_all_blocks()


def _is_summed(problem: Problem) -> bool:
    return any("sum" in piece.combine.values() for piece in problem.split(2))
