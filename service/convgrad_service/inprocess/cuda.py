"""The GPU kernels on the caller's device memory and stream.

A launch costs the host a few microseconds: argument structures are filled once, and later launches
only set the pointers in them that have changed.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import pairwise
from typing import Any

from convgrad.errors import DeviceUnavailable
from convgrad_service.backends.cuda.compile import DEFAULT_CACHE, Compiler
from convgrad_service.backends.cuda.device import cuda_driver_major, describe, import_cupy
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.launch import Enqueued, Kernels
from convgrad_service.backends.cuda.nvrtc import CompileError, find_nvrtc
from convgrad_service.inprocess.base import NotCompiled, problem_of
from convgrad_service.inprocess.launch_plan import MOST_BUFFERS, NativePlan
from convgrad_service.inprocess.peer_times import faster_peer
from convgrad_service.plans.cuda.planner import plan_for
from convgrad_service.plans.cuda.program import (
    ALIGNMENT,
    ZEROS,
    ZEROS_BYTES,
    CudaPlan,
    Step,
    ceil_div,
)
from convgrad_service.problems.base import Problem

__all__ = ["CudaExecutor"]

Branch = Sequence[Enqueued]
"""Steps that run one after another."""

# CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, CU_STREAM_CAPTURE_MODE_RELAXED
_IMPLICIT, _RELAXED = 906, 2
# Below this expected duration, forking to another stream costs the host about as much as it saves:
# the branches run one after another, unless a graph is captured.
FORK_S = 20e-6
FLOPS_S, BYTES_S = 400e12, 3e12
# Buffers of zeros allocated at a time.
ZERO_BUFFERS = 64


class CudaExecutor:
    """An `Executor` for one GPU.

    Raises
    ------
    DeviceUnavailable
        CuPy, NVRTC or the GPU is missing, or the GPU is too old.
    """

    def __init__(self, index: int) -> None:
        self._cuda: Any = import_cupy().cuda
        self._device = describe(index)
        try:
            compiler = Compiler(
                find_nvrtc(cuda_driver_major()), self._device.architecture, DEFAULT_CACHE
            )
        except CompileError as error:
            raise DeviceUnavailable(str(error)) from error
        self._index = index
        with self._cuda.Device(index):
            self._kernels = Kernels(compiler)
            self._zeros = _ZeroBuffers(self._cuda)

    def plan(
        self,
        operation: str,
        tensors: Mapping[str, tuple[tuple[int, ...], str]],
        parameters: Mapping[str, Any],
    ) -> PlannedOnCuda:
        """See `Executor.plan`."""
        problem = problem_of(operation, tensors, parameters)
        plan = plan_for(problem, self._device, FAMILIES)
        self._kernels.compile_ahead(plan.steps)
        return PlannedOnCuda(problem, plan)

    def prepare(
        self,
        operation: str,
        tensors: Mapping[str, tuple[tuple[int, ...], str]],
        parameters: Mapping[str, Any],
        *,
        wait: bool = True,
    ) -> PreparedOnCuda:
        """See `Executor.prepare`. Compiling kernels that are not cached takes seconds."""
        problem = problem_of(operation, tensors, parameters)
        plan = plan_for(problem, self._device, FAMILIES)
        compiling = self._kernels.compile_ahead(plan.steps)
        if compiling is not None:
            if not wait and not compiling.done():
                raise NotCompiled(f"the kernels of {plan.kernel} are being compiled")
            compiling.result()
        with self._cuda.Device(self._index):
            self._kernels.prepare(plan.steps)
            prepared = PreparedOnCuda(problem, plan, self._kernels, self._zeros)
        prepared.faster_peer = faster_peer(problem, self._device.name)
        return prepared


class PlannedOnCuda:
    """A `Planned`, with the offset of each buffer in the workspace."""

    def __init__(self, problem: Problem, plan: CudaPlan) -> None:
        self.inputs, self.outputs = problem.inputs, problem.outputs
        self._offsets = []
        end = 0
        for item in plan.workspace:
            self._offsets.append(end)
            end += ceil_div(item.size_bytes, ALIGNMENT) * ALIGNMENT
        self.workspace_bytes = end


class PreparedOnCuda(PlannedOnCuda):
    """A `Prepared` whose argument structures are filled once; later only their pointers change.

    Thread-safe.
    """

    faster_peer: str | None = None

    def __init__(
        self, problem: Problem, plan: CudaPlan, kernels: Kernels, zeros: _ZeroBuffers
    ) -> None:
        super().__init__(problem, plan)
        self.kernel = plan.kernel
        self._plan, self._kernels, self._zeros = plan, kernels, zeros
        # The order of addresses in `Enqueued.point`.
        workspace = (item.name for item in plan.workspace)
        self._buffers = (*self.inputs, *self.outputs, *workspace, ZEROS)
        expected_s = max(problem.flops / FLOPS_S, problem.compulsory_bytes / BYTES_S)
        self._forks = expected_s >= FORK_S
        self._branches: list[Branch] = []
        self._at: tuple[int, ...] = ()
        self._lock = threading.Lock()

    def launch(
        self, addresses: Sequence[int], workspace: int, stream: int, *, capturing: bool = True
    ) -> None:
        """See `Prepared.launch`. It returns before the kernels have run."""
        capture = capture_id(stream) if capturing else 0
        at = (stream, capture, workspace, *addresses)
        with self._lock:
            if at != self._at:
                self._point(at)
            branches = self._branches
            if len(branches) == 1 or not (self._forks or capture):
                for branch in branches:
                    for step in branch:
                        step(stream)
            else:
                for step in branches[0]:
                    step(stream)
                self._run_side_by_side(branches[1:], stream)

    def _run_side_by_side(self, branches: Sequence[Branch], stream: int) -> None:
        """Run each branch on a stream of its own, forked from this one and joined to it again."""
        runtime = self._zeros.cuda.runtime
        first, *rest = branches
        start, sides = self._zeros.sides(len(rest))
        runtime.eventRecord(start, stream)
        for _, side in sides:
            runtime.streamWaitEvent(side, start)
        try:
            for step in first:
                step(stream)
            for branch, (_, side) in zip(rest, sides, strict=True):
                for step in branch:
                    step(side)
        finally:
            for end, side in sides:
                runtime.eventRecord(end, side)
                runtime.streamWaitEvent(stream, end)

    def _point(self, at: tuple[int, ...]) -> None:
        """Point the steps at this stream, capture and workspace, and at the tensors' addresses."""
        self._at = ()  # should this fail halfway
        stream, capture, workspace, *addresses = at
        addresses += [workspace + offset for offset in self._offsets]
        if not self._branches:
            self._bind(addresses, stream, capture)
        for index, branch in enumerate(self._branches):
            places = (*addresses, self._zeros.of((stream, capture, index)))
            for step in branch:
                step.point(places)
        self._at = at

    def _bind(self, addresses: Sequence[int], stream: int, capture: int) -> None:
        """Fill in the steps' arguments."""
        places = (*addresses, self._zeros.of((stream, capture, 0)))
        named = dict(zip(self._buffers, places, strict=True))
        self._branches = [
            self._kernels.bind(steps, named, self._buffers) for steps in self._divided()
        ]

    def _divided(self) -> list[Sequence[Step]]:
        """Return the first steps, then those of each branch."""
        steps, cuts = self._plan.steps, self._plan.branches
        spans = [(0, cuts[0]), *pairwise([*cuts, len(steps)])] if cuts else [(0, len(steps))]
        return [steps[start:stop] for start, stop in spans]

    def native(self, addresses: Sequence[int], stream: int) -> NativePlan | None:
        """See `Prepared.native`."""
        if len(self._buffers) > MOST_BUFFERS:
            return None
        branches = self._divided()
        zeros = [self._zeros.of((stream, 0, index)) for index in range(len(branches))]
        workspace = (addresses[0] + offset for offset in self._offsets)  # any that is aligned
        places = dict(zip(self._buffers, (*addresses, *workspace, zeros[0]), strict=True))
        forks = self._forks and len(branches) > 1
        sides = self._zeros.native_sides(len(branches) - 2) if forks else None
        return NativePlan(branches, self._kernels, places, zeros, self._offsets, sides)


class _ZeroBuffers:
    """Zeroed counters for kernels, one buffer for each stream or capture, and side streams.

    Kernels restore the zeros, and kernels on one stream do not overlap, so they can share a buffer.
    A graph may be replayed on any stream, so each capture has its own buffers.
    """

    def __init__(self, cuda: Any) -> None:
        self.cuda = cuda
        self._memory: list[Any] = []
        self._grow()
        self._of: dict[tuple[int, ...], int] = {}
        self._local = threading.local()
        self._native: dict[str, Any] = {}
        self._lock = threading.Lock()

    def of(self, user: tuple[int, ...]) -> int:
        """Return the address of the zeros of (stream, capture, branch)."""
        with self._lock:
            found = self._of.get(user)
            if found is None:
                if self._left == 0:
                    self._grow()
                self._left -= 1
                found = self._of[user] = int(self._memory[-1].ptr) + self._left * ZEROS_BYTES
        return found

    def _grow(self) -> None:
        """Allocate another block of buffers, which a capture in this thread must not take part in.

        Raises
        ------
        DeviceUnavailable
            CUDA cannot allocate.
        """
        size = ZERO_BUFFERS * ZEROS_BYTES
        try:
            with _relaxed_capture():
                memory, side = self.cuda.Memory(size), self.cuda.Stream(non_blocking=True)
                self.cuda.runtime.memsetAsync(memory.ptr, 0, size, side.ptr)
                side.synchronize()
        except self.cuda.runtime.CUDARuntimeError as error:
            raise DeviceUnavailable(f"no memory for the kernels' counters: {error}") from error
        self._memory.append(memory)
        self._left = ZERO_BUFFERS

    def sides(self, count: int) -> tuple[int, list[tuple[int, int]]]:
        """Return an event, and ``count`` pairs of an event and a stream.

        Each thread has its own, which one launch after another uses.
        """
        return self._sides(self._local.__dict__, count)

    def native_sides(self, count: int) -> tuple[int, list[tuple[int, int]]]:
        """Return those of native code, which makes one launch at a time."""
        with self._lock:
            return self._sides(self._native, count)

    def _sides(self, own: dict[str, Any], count: int) -> tuple[int, list[tuple[int, int]]]:
        if not own:
            own["made"] = [self.cuda.Event(disable_timing=True)]
            own["start"], own["sides"] = own["made"][0].ptr, []
        while len(own["sides"]) < count:
            event = self.cuda.Event(disable_timing=True)
            side = self.cuda.Stream(non_blocking=True)
            own["made"] += event, side
            own["sides"].append((event.ptr, side.ptr))
        return own["start"], own["sides"][:count]


@contextmanager
def _relaxed_capture() -> Iterator[None]:
    """Let this thread allocate and synchronize while it captures a graph."""
    mode = ctypes.c_int(_RELAXED)
    _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


@lru_cache(maxsize=1)
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def capture_id(stream: int) -> int:
    """Return the id of the graph capture that a stream takes part in, or 0.

    Raises
    ------
    DeviceUnavailable
        The driver returns an error.
    """
    status, number = ctypes.c_int(0), ctypes.c_uint64(0)
    result = _driver().cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None
    )
    if result == _IMPLICIT:
        return 0  # the default stream, while another one captures
    if result != 0:
        raise DeviceUnavailable(f"cuStreamGetCaptureInfo failed: CUDA error {result}")
    return int(number.value) if status.value == 1 else 0
