"""A request on its way between its transport and the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from convgrad.contract import Operation, Report, Request
from convgrad.dtypes import DType
from convgrad.errors import MalformedRequest
from convgrad_service.engine.deadline import Deadline
from convgrad_service.engine.hub import JobHandle
from convgrad_service.engine.scheduling.finished import Finished
from convgrad_service.engine.scheduling.progress import Progress
from convgrad_service.engine.scheduling.quotas import ANYBODY, Caller
from convgrad_service.engine.shm.registry import RegionPart
from convgrad_service.engine.telemetry.record import Timings
from convgrad_service.problems import Problem

__all__ = [
    "SMALL_BYTES",
    "ClientGone",
    "ComputeRequest",
    "Decoded",
    "Fields",
    "Result",
    "blank",
]

Fields = Mapping[str, Any]

SMALL_BYTES = 64 * 1024
"""What is decoded, copied or encoded on the event loop: handing it to a thread takes longer."""


class ClientGone(Exception):
    """The client went away before its answer was ready."""


@dataclass(slots=True)
class ComputeRequest:
    """One request, as its transport hands it over.

    ``deadline`` counts from when the request began where ``counts_receiving``, as it does for a
    client that has set its own. Otherwise the same time is allowed once the request has been
    received. ``operation`` may be unknown until the transport has read the request's head.
    ``submitted`` is called with the job once it is queued.
    """

    operation: Operation | None
    deadline: Deadline
    timings: Timings
    caller: Caller = ANYBODY
    counts_receiving: bool = True
    submitted: Callable[[JobHandle], None] | None = None

    @property
    def owner(self) -> str:
        """Whose stored tensors and shared memory its names mean: its API key's name, or ""."""
        return self.caller.name


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a request says, but for its tensors' data.

    A tensor whose data is still to come is `blank` in ``fields``. ``regions`` are tensors, inputs
    and outputs, that lie in shared memory. ``refuse`` raises, before anything is computed, where
    the answer could not be encoded. ``timeout_s`` is what the request itself allows. ``notes`` are
    the transport's own. ``repeatable`` is False where more than tensors' data may differ between
    two requests with the same key.
    """

    fields: Fields
    regions: Mapping[str, RegionPart] = field(default_factory=dict)
    refuse: Callable[[Request, Problem], None] | None = None
    timeout_s: float | None = None
    notes: Any = None
    repeatable: bool = True


class Result(Protocol):
    """What a transport encodes: the arrays, and how they came to be.

    With ``progress`` they are still being computed; it says how much of them is.
    """

    finished: Finished
    progress: Progress | None

    @property
    def request(self) -> Request:
        """The request that it answers."""
        ...

    @property
    def outputs(self) -> Mapping[str, NDArray[Any]]:
        """The outputs by name."""
        ...

    @property
    def report(self) -> Report:
        """How they were computed, for the caller."""
        ...


def blank(shape: tuple[int, ...], dtype: DType, *, name: str) -> NDArray[Any]:
    """A tensor that is known by shape and dtype alone: it has no data and takes no memory."""
    try:
        return np.broadcast_to(np.empty((), dtype.numpy), shape)
    except ValueError:
        # More elements than NumPy can count.
        raise MalformedRequest(f"{name}: shape {shape} is too large") from None
