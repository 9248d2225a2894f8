"""What a worker is given to do, and what it says when it is done: sizes and places, no data."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from convgrad_service.backends.base import Backend
from convgrad_service.engine.arena import Arena
from convgrad_service.problems.base import Problem

__all__ = ["Finished", "Job", "run_job"]


class Job(NamedTuple):
    """A problem, and where in the arena each of its tensors lies."""

    problem: Problem
    inputs: Mapping[str, int]
    outputs: Mapping[str, int]


class Finished(NamedTuple):
    """How a job was computed; its outputs lie where the job said. See `Outcome`."""

    kernel: str
    compute_s: float
    pieces: int
    workspace_bytes: int
    upload_s: float
    download_s: float


def run_job(backend: Backend, arena: Arena, job: Job, cancelled: threading.Event) -> Finished:
    """Compute a job in the calling thread; raises what the backend raises."""
    inputs = {
        name: arena.array(offset, job.problem.inputs[name]) for name, offset in job.inputs.items()
    }
    for array in inputs.values():
        array.flags.writeable = False
    outputs = {
        name: arena.array(offset, job.problem.outputs[name]) for name, offset in job.outputs.items()
    }
    outcome = backend.run(job.problem, inputs, cancelled, outputs)
    for name, place in outputs.items():
        # A backend may compute where it likes; most write to the place itself.
        if outcome.outputs[name] is not place:
            np.copyto(place, outcome.outputs[name], casting="no")
    return Finished(
        outcome.kernel,
        outcome.compute_s,
        outcome.pieces,
        outcome.workspace_bytes,
        outcome.upload_s,
        outcome.download_s,
    )
