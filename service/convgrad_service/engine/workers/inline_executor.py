"""Small CPU problems, computed on the event loop of the process that received them.

Waking a worker and being woken takes longer than computing a small problem. Inline execution keeps
the safety of workers: a problem runs here only after a worker has computed the same layout without
crashing and fast enough, and if no input holds indices. With the same sizes a kernel then accesses
the same memory. Clients' shared memory is mapped as in a worker, see `RegionMappings`.
"""

from __future__ import annotations

import contextlib
import math
from typing import Protocol

from convgrad_service.backends.base import ServingBackend
from convgrad_service.engine.memory.arena import Arena
from convgrad_service.engine.memory.tensor_layout import (
    TensorLayout,
    has_index_inputs,
    tensor_layout_of,
)
from convgrad_service.engine.options import InlineBackend
from convgrad_service.engine.scheduling.job import Job, JobResult
from convgrad_service.engine.shm.mappings import RegionMappings
from convgrad_service.engine.shm.registry import RegionRegistry, RegionSlice
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


class _Trials:
    """The runs of one layout. The minimum counts: other load on the cores only adds to it."""

    runs, best_s = 0, math.inf


class InlineExecutor:
    """Computes eligible jobs in the calling thread, the event loop's.

    ``regions`` is None in processes that do not have them.
    """

    def __init__(
        self,
        engine: _Engine,
        inline_backend: InlineBackend,
        regions: RegionRegistry | None = None,
    ) -> None:
        self._engine, self._inline_backend, self._regions = engine, inline_backend, regions
        self._trials: dict[TensorLayout, _Trials] = {}
        self._backend: ServingBackend | None = None
        self._mappings: RegionMappings

    def learn(self, layout: TensorLayout, compute_s: float) -> None:
        """Record that a worker computed this layout in ``compute_s``."""
        if compute_s > _MAX_SECONDS or layout in self._trials:
            return
        if layout.problem.computes != (layout.problem,):
            return  # an examination, which takes longer than its compute_s
        size_bytes = tensor_layout_of(layout.problem).size_bytes
        if size_bytes > _MAX_BYTES or has_index_inputs(layout.problem):
            return
        if len(self._trials) >= _MAX_LAYOUTS:
            self._trials.clear()
        self._trials[layout] = _Trials()

    def try_run(
        self, layout: TensorLayout, base: int, regions: tuple[RegionSlice, ...] = ()
    ) -> JobResult | None:
        """Compute a layout whose lease starts at ``base``; None if a worker must compute it.

        Raises what the backend raises, and InvalidProblem if a client truncated its shared memory.
        """
        trials = self._trials.get(layout)
        if trials is None or self._engine.backend != self._inline_backend.name:
            return None
        if trials.best_s > _MAX_SECONDS and trials.runs >= _TRIALS:
            return None
        if self._engine.timing:
            return None  # computing would disturb it
        if self._backend is None:
            self._backend = self._inline_backend.make()
            self._mappings = RegionMappings(self._backend)
            if self._regions is not None:
                self._regions.on_closed.append(self._mappings.close)
        if regions and not self._opened(regions):
            return None
        job = Job(layout, base, regions)
        result = run_job(self._backend, self._engine.arena, self._mappings, job)
        trials.runs, trials.best_s = trials.runs + 1, min(trials.best_s, result.compute_s)
        return result

    def _opened(self, regions: tuple[RegionSlice, ...]) -> bool:
        """Open regions; return whether this process has them, and a descriptor to spare for each.

        Raises InvalidProblem if a region cannot be mapped.
        """
        if self._regions is None:
            return False
        with contextlib.suppress(OSError):
            for number in (each.region for each in regions):
                _, end = self._regions.extent(number)
                self._mappings.open(number, self._regions.descriptor(number), end)
            return True
        return False
