"""A problem's sizes, worked out once: a server asks for them a dozen times in each request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from convgrad_service.engine.scheduling.partition import parts_of
from convgrad_service.problems.base import Problem, TensorSpec

__all__ = ["ProblemSize", "problem_size"]


@dataclass(frozen=True, slots=True)
class ProblemSize:
    """What `Problem` says under the same names, and in how many ``parts`` it is computed."""

    operation: str
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    flops: int
    memory_bytes: int
    compulsory_bytes: int
    parts: int = 1


# Clients send the same few problems again and again, with other data.
@lru_cache(maxsize=1024)
def problem_size(problem: Problem) -> ProblemSize:
    """The sizes of a problem."""
    return ProblemSize(
        problem.operation,
        dict(problem.inputs),
        dict(problem.outputs),
        problem.flops,
        problem.memory_bytes,
        problem.compulsory_bytes,
        parts_of(problem),
    )
