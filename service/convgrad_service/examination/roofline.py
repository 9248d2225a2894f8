"""The time that a device cannot go below: what must be computed, and what must be moved."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from convgrad.contract.timing import ReferenceTime
from convgrad_service.backends.base import Rates, ServingBackend
from convgrad_service.problems.base import Problem

__all__ = ["reference_time"]


class _Asked(NamedTuple):
    """Told apart by identity: a backend's rates are measured once."""

    backend: ServingBackend
    dtype: str
    precision: str


def reference_time(backend: ServingBackend, problem: Problem) -> ReferenceTime:
    """The larger of computing valid taps at the peak and moving compulsory bytes, and a launch."""
    precision = str(getattr(problem, "precision", "highest"))
    rates = _rates(_Asked(backend, problem.dtype.value, precision))
    computing_s = problem.valid_flops / rates.flops_per_s
    moving_s = problem.compulsory_bytes / rates.bytes_per_s
    return ReferenceTime(
        seconds=max(computing_s, moving_s) + rates.launch_s,
        limited_by="flops" if computing_s > moving_s else "bytes",
        flops_per_s=rates.flops_per_s,
        bytes_per_s=rates.bytes_per_s,
        overhead_s=rates.launch_s,
        source=rates.source,
    )


@lru_cache(maxsize=64)
def _rates(asked: _Asked) -> Rates:
    return asked.backend.rates(asked.dtype, asked.precision)
