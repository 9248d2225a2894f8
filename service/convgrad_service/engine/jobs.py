"""What a worker is given to do, and what it says when it is done: sizes and places, no data."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from convgrad_service.backends.base import Backend
from convgrad_service.engine.arena import Arena
from convgrad_service.engine.regions import InRegion
from convgrad_service.engine.segments import Place, Segments, array_at
from convgrad_service.engine.sized import sized
from convgrad_service.problems.base import Problem

__all__ = ["Finished", "Job", "PackedJob", "run_job"]


class Job(NamedTuple):
    """A problem, and where each of its tensors lies, in the arena or in a client's shared memory.

    ``taken`` are inputs to be copied from there to their place first, because what is validated
    may not change any more.
    """

    problem: Problem
    inputs: Mapping[str, Place]
    outputs: Mapping[str, Place]
    taken: Mapping[str, InRegion] = {}
    cost: float = 0.0
    """In units of `Pace`."""

    @property
    def regions(self) -> frozenset[int]:
        """The numbers of the regions that it touches."""
        places = [*self.inputs.values(), *self.outputs.values(), *self.taken.values()]
        return frozenset(place.file for place in places if isinstance(place, InRegion))

    def packed(self) -> PackedJob:
        """The same for another process."""
        return PackedJob(pickle.dumps(self, pickle.HIGHEST_PROTOCOL), self.cost, self.regions)


class PackedJob(NamedTuple):
    """A job as the hub passes it on from one process to another, without looking into it."""

    text: bytes
    cost: float
    regions: frozenset[int]

    def packed(self) -> PackedJob:
        """It is already."""
        return self

    def unpacked(self) -> Job:
        """The job itself."""
        job: Job = pickle.loads(self.text)  # noqa: S301 - from one of our own processes
        return job


class Finished(NamedTuple):
    """How a job was computed; its outputs lie where the job said. See `Outcome`."""

    kernel: str
    compute_s: float
    pieces: int
    workspace_bytes: int
    upload_s: float
    download_s: float


def run_job(
    backend: Backend, arena: Arena, segments: Segments, job: Job, cancelled: threading.Event
) -> Finished:
    """Compute a job in the calling thread, with its regions open.

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
    for name in segments.apart(job.inputs, job.outputs, inputs | outputs):
        # Rare: a place that kernels cannot take as it is. They get a copy, or make one.
        if name in inputs:
            inputs[name] = inputs[name].copy()
        else:
            direct[name] = np.empty_like(outputs[name])
    outcome = backend.run(job.problem, inputs, cancelled, direct)
    for name, place in outputs.items():
        # A backend may compute where it likes; most write to the place itself.
        if outcome.outputs[name] is not place:
            np.copyto(place, outcome.outputs[name], casting="no")
    segments.check(job.regions)
    return Finished(
        outcome.kernel,
        outcome.compute_s,
        outcome.pieces,
        outcome.workspace_bytes,
        outcome.upload_s,
        outcome.download_s,
    )
