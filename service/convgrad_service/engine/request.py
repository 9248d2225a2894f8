"""A request as its transport hands it over, and what the transport gets back to encode."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from convgrad.contract import Operation, Report, Request
from convgrad_service.engine.deadline import Deadline
from convgrad_service.engine.scheduling.progress import Progress
from convgrad_service.engine.scheduling.quotas import Ticket
from convgrad_service.engine.shm.registry import ANONYMOUS
from convgrad_service.engine.telemetry.timing import Timings
from convgrad_service.problems import Problem

__all__ = ["ComputeRequest", "Result"]

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Result:
    """What a transport encodes: the request it answers, the arrays, and how they came to be.

    With ``progress`` they are still being computed; it says how much of them is.
    """

    request: Request
    outputs: Arrays
    report: Report
    progress: Progress | None = None


@dataclass(slots=True)
class ComputeRequest:
    """One request as its transport hands it over.

    ``refuse``, where there is one, raises where the transport could not encode the answer.
    ``small`` says that decoding takes no time worth a thread. ``key`` is all that the fields and
    ``refuse`` depend on beside the operation: what is made of them is remembered under it, with
    whatever decoding has put into ``notes``. ``owner`` is whose stored tensors
    its names mean, ``ticket`` what its key has in flight with it.
    """

    operation: Operation
    deadline: Deadline
    timings: Timings
    refuse: Callable[[Request, Problem], None] | None = None
    small: bool = False
    key: Hashable = None
    notes: list[Any] = field(default_factory=list)
    owner: str = ANONYMOUS
    ticket: Ticket | None = None
