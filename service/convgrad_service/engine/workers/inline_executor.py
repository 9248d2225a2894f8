"""Small problems on the CPU, computed by the process that was asked for them.

A worker is two wakes of a process away, which takes longer than a small problem does. What workers
are for stays as it is: only that is computed here which a worker has computed before, in the same
arrangement, without harm and in no time to speak of, and whose data names no elements of others.
A kernel that is given the same sizes stays within the same memory, so it does no harm here either.
Shared memory is read and written as the file that it is: where its client has just cut it off,
reading is an error and writing makes it longer again, and neither is a signal.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from convgrad_service.backends.base import ServingBackend
from convgrad_service.engine.bounded_cache import BoundedCache
from convgrad_service.engine.memory.arena import Arena
from convgrad_service.engine.memory.placement import names_elements
from convgrad_service.engine.memory.tensor_layout import Tensor, TensorLayout, tensor_layout_of
from convgrad_service.engine.shm.mappings import RegionMappings, shortened
from convgrad_service.engine.shm.registry import InRegion
from convgrad_service.engine.workers.execute import Finished, Job, run_job

__all__ = ["InlineBackend", "InlineExecutor"]

# About what the way to a worker and back costs (tests/perf/results/serve.jsonl, 1 KiB over HTTP,
# with and without): up to here nobody waits longer for a loop that computes than for a worker.
_LONGEST_S = 100e-6
_LARGEST_BYTES = 64 * 1024
# A worker has more threads; so often it is tried whether this process is as quick.
_TRIES = 4
_MOST_LEARNT = 1024
_NEVER = threading.Event()


class InlineBackend(NamedTuple):
    """What computes on the spot where workers run a backend of the same name, and how it is made.

    It is to start no threads: what it computes is over before one would have woken.
    """

    name: str
    make: Callable[[], ServingBackend]


class _Engine(Protocol):
    arena: Arena

    @property
    def backend(self) -> str: ...

    @property
    def timing(self) -> bool: ...


class _Copies(NamedTuple):
    """Where copies of an arrangement's tensors lie that are computed with in its stead."""

    inside: TensorLayout
    inputs: list[memoryview]
    outputs: list[memoryview]


class _Tried:
    """How often a problem was computed here, and the least time that it took: what others do on
    the same cores only adds to it."""

    __slots__ = ("least_s", "times")

    def __init__(self) -> None:
        self.times, self.least_s = 0, math.inf

    def took(self, seconds: float) -> None:
        self.times, self.least_s = self.times + 1, min(self.least_s, seconds)

    @property
    def is_too_long(self) -> bool:
        return self.least_s > _LONGEST_S and self.times >= _TRIES


class InlineExecutor:
    """Computes what it may in the calling thread, the loop's.

    ``region_file`` gives the file of a region by its number, in the process that has them.
    """

    def __init__(
        self,
        engine: _Engine,
        beside: InlineBackend,
        region_file: Callable[[int], int] | None = None,
    ) -> None:
        self._engine, self._beside, self._region_file = engine, beside, region_file
        self._tried: dict[TensorLayout, _Tried] = {}
        # One problem at a time has it to itself.
        self._own = Arena.create(_LARGEST_BYTES)
        self._own.close()
        self._copies = BoundedCache()
        self._backend: ServingBackend | None = None
        self._segments: RegionMappings

    def learn(self, layout: TensorLayout, compute_s: float) -> None:
        """A worker has computed this, in so many seconds."""
        if compute_s > _LONGEST_S or layout in self._tried:
            return
        if layout.problem.computes != (layout.problem,):
            return  # a problem about another, which takes longer than it says
        inside = tensor_layout_of(layout.problem)
        if inside.size_bytes > _LARGEST_BYTES or names_elements(layout.sizes):
            return
        if len(self._tried) >= _MOST_LEARNT:
            self._tried.clear()
        self._tried[layout] = _Tried()

    def computed(
        self, layout: TensorLayout, base: int, regions: Sequence[InRegion] = ()
    ) -> Finished | None:
        """How the tensors whose place begins at ``base`` were computed; None where that is for a
        worker.

        Raises what the backend raises, and InvalidProblem if a client shortened its shared memory.
        """
        tried = self._tried.get(layout)
        if tried is None or tried.is_too_long or self._engine.backend != self._beside.name:
            return None
        if self._engine.timing:
            return None  # it waits for a worker: beside a timing nothing is computed
        if not regions:
            finished = self._run(self._engine.arena, layout, base)
        elif self._region_file is not None:
            finished = self._run_copied(layout, base, regions, self._region_file)
        else:
            return None
        tried.took(finished.compute_s)
        return finished

    def _run_copied(
        self,
        layout: TensorLayout,
        base: int,
        regions: Sequence[InRegion],
        file_of: Callable[[int], int],
    ) -> Finished:
        """The same with copies of the tensors, some of which lie in shared memory."""
        copies = self._copies.get(layout, lambda: self._places(layout))
        for tensor, copy in zip(layout.inputs, copies.inputs, strict=True):
            if tensor.region is None:
                copy[:] = _view(self._engine.arena, base, tensor)
            else:
                place = regions[tensor.region]
                _move(os.preadv, file_of(place.file), copy, place.offset)
        finished = self._run(self._own, copies.inside, 0)
        for tensor, copy in zip(layout.outputs, copies.outputs, strict=True):
            if tensor.region is None:
                _view(self._engine.arena, base, tensor)[:] = copy
            else:
                place = regions[tensor.region]
                _move(os.pwritev, file_of(place.file), copy, place.offset)
        return finished

    def _places(self, layout: TensorLayout) -> _Copies:
        inside = tensor_layout_of(layout.problem)
        inputs, outputs = (
            [_view(self._own, 0, tensor) for tensor in tensors]
            for tensors in (inside.inputs, inside.outputs)
        )
        return _Copies(inside, inputs, outputs)

    def _run(self, arena: Arena, layout: TensorLayout, base: int) -> Finished:
        if self._backend is None:
            self._backend = self._beside.make()
            self._segments = RegionMappings(self._backend.open_handle)
        return run_job(self._backend, arena, self._segments, Job(layout, base), _NEVER)


def _view(arena: Arena, base: int, tensor: Tensor) -> memoryview:
    assert tensor.offset is not None  # noqa: S101 - it lies in the arena
    return arena.view(base + tensor.offset, tensor.spec.size_bytes)


def _move(
    move: Callable[[int, list[memoryview], int], int], file: int, copy: memoryview, offset: int
) -> None:
    """Read or write all of a copy, or refuse the request as a worker would, which finds no memory
    where the file has been cut off or its file system is full."""
    try:
        moved_bytes = move(file, [copy], offset)
    except OSError:
        raise shortened() from None
    if moved_bytes != len(copy):
        raise shortened()
