"""What a worker is given to do, and what it says when it is done: sizes and places, no data."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from convgrad_service.backends.base import Backend, Outcome
from convgrad_service.engine.arena import Arena
from convgrad_service.engine.finished import Finished
from convgrad_service.engine.parts import joined, pieces_of
from convgrad_service.engine.regions import InRegion
from convgrad_service.engine.segments import Place, Segments, apart, array_at
from convgrad_service.engine.sized import sized
from convgrad_service.problems.base import Piece, Problem
from convgrad_service.problems.pieces import piece_tensors, place_part

__all__ = ["Finished", "Job", "PackedJob", "run_job"]

Arrays = Mapping[str, NDArray[Any]]


class Job(NamedTuple):
    """A problem, and where each of its tensors lies, in the arena or in a client's shared memory.

    ``taken`` are inputs to be copied from there to their place first, because what is validated
    may not change any more. A problem of several ``parts`` is computed in so many, each a task of
    its own where that is possible, see `tasks`.
    """

    problem: Problem
    inputs: Mapping[str, Place]
    outputs: Mapping[str, Place]
    taken: Mapping[str, InRegion] = {}
    cost: float = 0.0
    """In units of `Pace`."""
    parts: int = 1

    @property
    def unfit(self) -> set[str]:
        """The tensors that cannot be computed where they lie."""
        sizes = sized(self.problem)
        return apart(self.inputs, self.outputs, {**sizes.inputs, **sizes.outputs})

    @property
    def tasks(self) -> int:
        """How many tasks it makes.

        One where a part could overwrite what another has still to read: outputs in a client's
        memory may lie where inputs do.
        """
        if self.parts == 1 or self.taken or self.unfit & self.outputs.keys():
            return 1
        return len(pieces_of(self.problem, self.parts))

    @property
    def regions(self) -> frozenset[int]:
        """The numbers of the regions that it touches."""
        places = [*self.inputs.values(), *self.outputs.values(), *self.taken.values()]
        return frozenset(place.file for place in places if isinstance(place, InRegion))

    def packed(self) -> PackedJob:
        """The same for another process."""
        text = pickle.dumps(self, pickle.HIGHEST_PROTOCOL)
        return PackedJob(text, self.cost, self.regions, self.tasks)


class PackedJob(NamedTuple):
    """A job as the hub passes it on from one process to another, without looking into it."""

    text: bytes
    cost: float
    regions: frozenset[int]
    tasks: int = 1

    def packed(self) -> PackedJob:
        """It is already."""
        return self

    def unpacked(self) -> Job:
        """The job itself."""
        job: Job = pickle.loads(self.text)  # noqa: S301 - from one of our own processes
        return job


def run_job(
    backend: Backend,
    arena: Arena,
    segments: Segments,
    job: Job,
    cancelled: threading.Event,
    part: int | None = None,
) -> Finished:
    """Compute a job, or one ``part`` of it, in the calling thread, with its regions open.

    Raises what the backend raises, and InvalidProblem if a client shortened its shared memory.
    """
    sizes = sized(job.problem)
    inputs = {
        name: array_at(place, sizes.inputs[name], arena, segments)
        for name, place in job.inputs.items()
    }
    for name, region in job.taken.items():
        np.copyto(inputs[name], segments.array(region, sizes.inputs[name]))
    for array in inputs.values():
        array.flags.writeable = False
    outputs = {
        name: array_at(place, sizes.outputs[name], arena, segments)
        for name, place in job.outputs.items()
    }
    direct = dict(outputs)
    # Rare: places that kernels cannot take as they are. They get a copy, or make one.
    unfit = job.unfit
    for name in unfit & outputs.keys():
        direct[name] = np.empty_like(outputs[name])
    if job.parts == 1:
        given = {name: array.copy() if name in unfit else array for name, array in inputs.items()}
        outcome = backend.run(job.problem, given, cancelled, direct)
        found: Arrays = outcome.outputs
        finished = _finished(outcome)
    else:
        pieces = pieces_of(job.problem, job.parts)
        chosen = pieces if part is None else pieces[part : part + 1]
        finished = joined(
            [_run_piece(backend, piece, inputs, unfit, direct, cancelled) for piece in chosen]
        )
        found = direct
    for name, place in outputs.items():
        # A backend may compute where it likes; most write to the place itself.
        if found[name] is not place:
            np.copyto(place, found[name], casting="no")
    segments.check(job.regions)
    return finished


def _run_piece(
    backend: Backend,
    piece: Piece,
    inputs: Arrays,
    unfit: set[str],
    outputs: Arrays,
    cancelled: threading.Event,
) -> Finished:
    """Compute a piece of a problem from the whole's inputs into its place in the outputs."""
    own = {
        name: array.copy() if name in unfit else array
        for name, array in piece_tensors(piece, inputs).items()
    }
    places = {
        name: outputs[name][slices]
        for name, slices in piece.outputs.items()
        if name not in piece.take and not piece.shifts.get(name)
    }
    # Rows of one sample, say, do not lie side by side; a backend computes those elsewhere.
    offered = {name: place for name, place in places.items() if place.flags.c_contiguous}
    outcome = backend.run(piece.problem, own, cancelled, offered)
    for name, array in outcome.outputs.items():
        if array is not offered.get(name):
            place_part(piece, name, array, outputs[name])
    return _finished(outcome)


def _finished(outcome: Outcome) -> Finished:
    return Finished(
        outcome.kernel,
        outcome.compute_s,
        outcome.pieces,
        outcome.workspace_bytes,
        outcome.upload_s,
        outcome.download_s,
    )
