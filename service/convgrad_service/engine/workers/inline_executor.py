"""Small CPU problems, computed on the event loop of the process that received them.

Waking a worker and being woken takes longer than computing a small problem. Inline execution keeps
the safety of workers: a problem runs here only after a worker has computed the same layout without
crashing and fast enough, and if no input holds indices. With the same sizes a kernel then accesses
the same memory. Shared memory is read and written with file calls, not mapped: if the client has
truncated the file, they return errors instead of raising SIGBUS.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from convgrad_service.backends.base import ServingBackend
from convgrad_service.engine.memory.arena import Arena
from convgrad_service.engine.memory.tensor_layout import (
    PlacedTensor,
    TensorLayout,
    has_index_inputs,
    tensor_layout_of,
)
from convgrad_service.engine.options import InlineBackend
from convgrad_service.engine.scheduling.task import Job, JobResult
from convgrad_service.engine.shm.mappings import RegionMappings, truncated
from convgrad_service.engine.shm.registry import RegionSlice
from convgrad_service.engine.workers.worker import run_job

# About the cost of a round trip to a worker (tests/perf/results/serve.jsonl, 1 KiB over HTTP, with
# and without); up to this, blocking the event loop delays others no more than waking a worker does.
_MAX_SECONDS = 100e-6
_MAX_BYTES = 64 * 1024
# Workers use more threads, so a problem is given up here only after this many slow runs.
_TRIALS = 4
_MAX_LAYOUTS = 1024


class _Engine(Protocol):
    arena: Arena

    @property
    def backend(self) -> str: ...

    @property
    def timing(self) -> bool: ...


class _Copies(NamedTuple):
    """Copies of a layout's tensors in the executor's own arena."""

    layout: TensorLayout
    inputs: list[memoryview]
    outputs: list[memoryview]


class _Trials:
    """The runs of one layout. The minimum counts: other load on the cores only adds to it."""

    __slots__ = ("best_s", "copies", "runs")

    def __init__(self) -> None:
        self.runs, self.best_s = 0, math.inf
        self.copies: _Copies | None = None

    def add(self, seconds: float) -> None:
        self.runs, self.best_s = self.runs + 1, min(self.best_s, seconds)

    @property
    def too_slow(self) -> bool:
        return self.best_s > _MAX_SECONDS and self.runs >= _TRIALS


class InlineExecutor:
    """Computes eligible jobs in the calling thread, the event loop's.

    ``region_file`` returns the descriptor of a region; None in processes that do not have them.
    """

    def __init__(
        self,
        engine: _Engine,
        inline_backend: InlineBackend,
        region_file: Callable[[int], int] | None = None,
    ) -> None:
        self._engine, self._inline_backend = engine, inline_backend
        self._region_file = region_file
        self._trials: dict[TensorLayout, _Trials] = {}
        # Enough for one problem at a time.
        self._own_arena = Arena.create(_MAX_BYTES)
        self._own_arena.close()
        self._backend: ServingBackend | None = None
        self._mappings: RegionMappings

    def learn(self, layout: TensorLayout, compute_s: float) -> None:
        """Record that a worker computed this layout in ``compute_s``."""
        if compute_s > _MAX_SECONDS or layout in self._trials:
            return
        if layout.problem.computes != (layout.problem,):
            return  # an examination, which takes longer than its compute_s
        in_arena = tensor_layout_of(layout.problem)
        if in_arena.size_bytes > _MAX_BYTES or has_index_inputs(layout.problem):
            return
        if len(self._trials) >= _MAX_LAYOUTS:
            self._trials.clear()
        self._trials[layout] = _Trials()

    def try_run(
        self, layout: TensorLayout, base: int, regions: Sequence[RegionSlice] = ()
    ) -> JobResult | None:
        """Compute a layout whose lease starts at ``base``; None if a worker must compute it.

        Raises what the backend raises, and InvalidProblem if a client truncated its shared memory.
        """
        trials = self._trials.get(layout)
        if trials is None or trials.too_slow or self._engine.backend != self._inline_backend.name:
            return None
        if self._engine.timing:
            return None  # computing would disturb it
        if not regions:
            result = self._run(self._engine.arena, layout, base)
        elif self._region_file is not None:
            if trials.copies is None:
                trials.copies = self._make_copies(layout)
            result = self._run_copied(layout, base, regions, self._region_file, trials.copies)
        else:
            return None
        trials.add(result.compute_s)
        return result

    def _run_copied(
        self,
        layout: TensorLayout,
        base: int,
        regions: Sequence[RegionSlice],
        region_file: Callable[[int], int],
        copies: _Copies,
    ) -> JobResult:
        """Compute in copies of the tensors, some of which are in shared memory."""
        for tensor, copy in zip(layout.inputs, copies.inputs, strict=True):
            if tensor.region is None:
                copy[:] = _view(self._engine.arena, base, tensor)
            else:
                where = regions[tensor.region]
                _transfer(os.preadv, region_file(where.region), copy, where.offset)
        result = self._run(self._own_arena, copies.layout, 0)
        for tensor, copy in zip(layout.outputs, copies.outputs, strict=True):
            if tensor.region is None:
                _view(self._engine.arena, base, tensor)[:] = copy
            else:
                where = regions[tensor.region]
                _transfer(os.pwritev, region_file(where.region), copy, where.offset)
        return result

    def _make_copies(self, layout: TensorLayout) -> _Copies:
        in_arena = tensor_layout_of(layout.problem)
        inputs, outputs = (
            [_view(self._own_arena, 0, tensor) for tensor in tensors]
            for tensors in (in_arena.inputs, in_arena.outputs)
        )
        return _Copies(in_arena, inputs, outputs)

    def _run(self, arena: Arena, layout: TensorLayout, base: int) -> JobResult:
        if self._backend is None:
            self._backend = self._inline_backend.make()
            self._mappings = RegionMappings(self._backend.open_handle)
        return run_job(self._backend, arena, self._mappings, Job(layout, base))


def _view(arena: Arena, base: int, tensor: PlacedTensor) -> memoryview:
    assert tensor.offset is not None  # noqa: S101 - it is in the arena
    return arena.view(base + tensor.offset, tensor.spec.size_bytes)


def _transfer(
    call: Callable[[int, list[memoryview], int], int], file: int, copy: memoryview, offset: int
) -> None:
    """Read or write a whole tensor, or raise as a worker does if the file was truncated."""
    try:
        moved_bytes = call(file, [copy], offset)
    except OSError:
        raise truncated() from None
    if moved_bytes != len(copy):
        raise truncated()
