"""What a request asks to compute, from any transport."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad.contract import Operation, Request
from convgrad.dtypes import DType
from convgrad.errors import MalformedRequest
from convgrad_service.engine.admission import Deadline
from convgrad_service.engine.scheduling.job import JobHandle
from convgrad_service.engine.scheduling.quotas import ANYBODY, Caller
from convgrad_service.engine.shm.registry import RegionPart
from convgrad_service.engine.telemetry.record import Timings
from convgrad_service.problems import Problem

Fields = Mapping[str, Any]
SMALL_BYTES = 64 * 1024
"""Up to this size, data is decoded, copied and encoded on the event loop: a thread takes longer."""


@dataclass(slots=True)
class ComputeRequest:
    """One request for a computation.

    Attributes
    ----------
    operation
        None until the transport has read the request's head, if that names it.
    counts_receiving
        Whether ``deadline`` includes receiving the body, as it does if the client set it.
        Otherwise it starts again once the body has been received.
    submitted
        Called with the job's handle once it is queued.
    body_bytes
        The size of the body if that is known before it is received.
    """

    operation: Operation | None
    deadline: Deadline
    timings: Timings
    caller: Caller = ANYBODY
    counts_receiving: bool = True
    submitted: Callable[[JobHandle], None] | None = None
    body_bytes: int | None = None

    @property
    def owner(self) -> str:
        """The owner of stored tensors and regions that it names: its API key's name, or ""."""
        return self.caller.name


@dataclass(frozen=True, slots=True)
class Decoded:
    """A request's content except for its tensors' data.

    Attributes
    ----------
    fields
        The request's fields; tensors whose data is still to come are `blank`.
    regions
        The tensors, inputs and outputs, that are in shared memory.
    refuse
        Called before anything is computed; raises if the response could not be encoded.
    timeout_s
        The request's own time limit.
    transport_data
        Private to the transport.
    repeatable
        Whether requests with the same key differ in their tensors' data alone.
    """

    fields: Fields
    regions: Mapping[str, RegionPart] = field(default_factory=dict)
    refuse: Callable[[Request, Problem], None] | None = None
    timeout_s: float | None = None
    transport_data: Any = None
    repeatable: bool = True


def blank(shape: tuple[int, ...], dtype: DType, *, name: str) -> NDArray[Any]:
    """Return a stand-in for a tensor: it has the shape and dtype, but takes no memory."""
    try:
        return np.broadcast_to(np.empty((), dtype.numpy), shape)
    except ValueError:
        # More elements than NumPy can count.
        raise MalformedRequest(f"{name}: shape {shape} is too large") from None
