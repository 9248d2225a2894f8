"""Small problems on the CPU, computed by the process that was asked for them.

A worker is two wakes of a process away, which takes longer than a small problem does. What workers
are for stays as it is: only that is computed here which a worker has computed before, in the same
arrangement, without harm and in no time to speak of, and whose data names no elements of others.
A kernel that is given the same sizes goes the same way through memory, so it does no harm here
either. Shared memory is read and written as the file that it is: where its client has cut it off
there is an error, and no signal.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from convgrad_service.backends.base import ServingBackend
from convgrad_service.engine.arrangement import Arrangement, Tensor, arrangement_of
from convgrad_service.engine.jobs import Finished, Job, run_job
from convgrad_service.engine.placement import names_elements
from convgrad_service.engine.regions import InRegion
from convgrad_service.engine.segments import Segments, shortened

if TYPE_CHECKING:
    from convgrad_service.engine.hub import Engine

__all__ = ["Beside", "OnTheSpot"]

# About what the way to a worker and back costs this process's own time: up to here nobody waits
# longer for a loop that computes than for one that sends a job and receives its end.
_LONGEST_S = 100e-6
_LARGEST_BYTES = 64 * 1024
_MOST_LEARNT = 1024
_NEVER = threading.Event()


class Beside(NamedTuple):
    """What computes on the spot where workers run a backend of the same name, and how it is made.

    It is to start no threads: what it computes is over before one would have woken.
    """

    name: str
    make: Callable[[], ServingBackend]


class OnTheSpot:
    """Computes what it may in the calling thread, the loop's.

    ``region_file`` gives the file of a region by its number, in the process that has them.
    """

    def __init__(
        self, engine: Engine, beside: Beside, region_file: Callable[[int], int] | None = None
    ) -> None:
        self._engine, self._beside, self._region_file = engine, beside, region_file
        self._took_s: dict[Arrangement, float] = {}
        self._backend: ServingBackend | None = None
        self._segments: Segments

    def learn(self, arrangement: Arrangement, compute_s: float) -> None:
        """A worker has computed this, in so many seconds."""
        if arrangement.size_bytes > _LARGEST_BYTES or names_elements(arrangement.sizes):
            return
        if len(self._took_s) >= _MOST_LEARNT:
            self._took_s.clear()
        self._took_s[arrangement] = compute_s

    def computed(
        self, arrangement: Arrangement, base: int, regions: Sequence[InRegion] = ()
    ) -> Finished | None:
        """How the tensors whose place begins at ``base`` were computed; None where that is for a
        worker.

        Raises what the backend raises, and InvalidProblem if a client shortened its shared memory.
        """
        took_s = self._took_s.get(arrangement)
        if took_s is None or took_s > _LONGEST_S or self._engine.backend != self._beside.name:
            return None
        if regions:
            finished = self._among_regions(arrangement, base, regions)
        else:
            finished = self._run(arrangement, base)
        if finished is not None:
            self._took_s[arrangement] = finished.compute_s
        return finished

    def _among_regions(
        self, arrangement: Arrangement, base: int, regions: Sequence[InRegion]
    ) -> Finished | None:
        """The same in a place of the arena that holds copies of shared memory's tensors too."""
        inside = arrangement_of(arrangement.problem)
        if self._region_file is None or inside.size_bytes > _LARGEST_BYTES:
            return None
        place = self._engine.take(inside.size_bytes)
        if place is None:
            return None
        try:
            for given, here in zip(arrangement.inputs, inside.inputs, strict=True):
                view = self._view(here, place.offset)
                if given.region is None:
                    view[:] = self._view(given, base)
                else:
                    self._move(os.preadv, regions[given.region], view)
            finished = self._run(inside, place.offset)
            for given, here in zip(arrangement.outputs, inside.outputs, strict=True):
                view = self._view(here, place.offset)
                if given.region is None:
                    self._view(given, base)[:] = view
                else:
                    self._move(os.pwritev, regions[given.region], view)
            return finished
        finally:
            place.release()

    def _view(self, tensor: Tensor, base: int) -> memoryview:
        assert tensor.offset is not None  # noqa: S101 - it lies in the arena
        return self._engine.arena.view(base + tensor.offset, tensor.spec.size_bytes)

    def _move(
        self, by: Callable[[int, list[memoryview], int], int], place: InRegion, view: memoryview
    ) -> None:
        assert self._region_file is not None  # noqa: S101 - or no region was given
        if by(self._region_file(place.file), [view], place.offset) != len(view):
            raise shortened()

    def _run(self, arrangement: Arrangement, base: int) -> Finished:
        if self._backend is None:
            self._backend = self._beside.make()
            self._segments = Segments(self._backend.open_handle)
        job = Job(arrangement, base)
        return run_job(self._backend, self._engine.arena, self._segments, job, _NEVER)
