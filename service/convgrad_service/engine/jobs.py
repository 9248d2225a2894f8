"""What a worker is given to do, and what it says when it is done: sizes and places, no data."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from convgrad_service.backends.base import Backend
from convgrad_service.engine.arena import Arena
from convgrad_service.engine.regions import InRegion
from convgrad_service.engine.segments import Place, Segments, array_at
from convgrad_service.problems.base import Problem

__all__ = ["Finished", "Job", "run_job"]


class Job(NamedTuple):
    """A problem, and where each of its tensors lies, in the arena or in a client's shared memory.

    ``taken`` are inputs to be copied from there to their place first, because what is validated
    may not change any more.
    """

    problem: Problem
    inputs: Mapping[str, Place]
    outputs: Mapping[str, Place]
    taken: Mapping[str, InRegion] = {}

    @property
    def regions(self) -> set[int]:
        """The numbers of the regions that it touches."""
        places = [*self.inputs.values(), *self.outputs.values(), *self.taken.values()]
        return {place.file for place in places if isinstance(place, InRegion)}


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
    inputs = {
        name: array_at(place, job.problem.inputs[name], arena, segments)
        for name, place in job.inputs.items()
    }
    for name, region in job.taken.items():
        np.copyto(inputs[name], segments.array(region, job.problem.inputs[name]))
    for array in inputs.values():
        array.flags.writeable = False
    outputs = {
        name: array_at(place, job.problem.outputs[name], arena, segments)
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
