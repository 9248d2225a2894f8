"""Times the configurations of layers on the device at hand, for a table of tuned layers."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from convgrad.errors import UnsupportedProblem
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.tuning.candidates import Candidate, candidates
from convgrad_service.backends.cuda.tuning.tuned import key_of
from convgrad_service.plans.cuda.assembly import conv_work
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Family
from convgrad_service.plans.cuda.planner import plan_for
from convgrad_service.plans.cuda.program import CudaPlan
from convgrad_service.plans.cuda.works import ConvWork
from convgrad_service.problems.base import Problem

__all__ = ["OPERATIONS", "Bench", "Run", "Tuning", "tune"]

OPERATIONS = {
    "conv_bwd_data": ("bwd_data", "grad_input", "weight", "grad_output"),
    "grouped_conv_bwd_weight": ("bwd_weight", "input", "grad_weight", "grad_output"),
}
"""Operations that are tuned: the direction, and the buffers of input, weight and output."""

_log = logging.getLogger("convgrad.tuning")
# Of each family, the configurations that are timed: those that should be fastest.
EACH_FAMILY = 8
SAMPLES, WINS = 7, 3
# A configuration is taken if it is this much faster than the present one, several times in a row.
MARGIN = 0.97
# ||a - b|| / ||b|| of two results rounded to 16 bits, which add in different orders.
TOLERANCE = {"float16": 4e-3, "bfloat16": 2e-2}


class Run(Protocol):
    """A plan on tensors in device memory."""

    def seconds(self) -> float:
        """Return the seconds of one run, with a cold L2 cache."""
        ...

    def result(self) -> Any:
        """Return the result, as an array of float32."""
        ...


class Bench(Protocol):
    """Runs plans of one problem on the same random inputs."""

    def run(self, problem: Problem, plan: CudaPlan) -> AbstractContextManager[Run]:
        """Compile the plan, and hold its memory as long as the context lasts."""
        ...


@dataclass(frozen=True, slots=True)
class Tuning:
    """What was found for one problem.

    Attributes
    ----------
    key
        The layer's name in a table; None if such layers are not tuned.
    entry
        The family and the configuration to be used; None if the present choice is no slower.
    kernel
        The present choice.
    was_s, now_s
        Seconds of the present choice, and of the one to be used.
    timed
        Configurations that were timed.
    """

    key: str | None
    entry: tuple[str, str] | None = None
    kernel: str = ""
    was_s: float = 0.0
    now_s: float = 0.0
    timed: int = 0


def tune(problem: Problem, device: CudaDevice, bench: Bench) -> Tuning:
    """Time a gradient's configurations, and the one that is chosen at present.

    Raises
    ------
    ServiceError
        The present choice cannot run.
    """
    if problem.operation not in OPERATIONS:
        return Tuning(None)
    asked: Any = problem
    work = conv_work(asked, *OPERATIONS[problem.operation], result_dtype=_result_dtype(problem))
    key = key_of(work)
    if key is None:
        return Tuning(None)
    plan = plan_for(problem, device, FAMILIES)
    best, timed = None, 0
    with bench.run(problem, plan) as present:
        expected, was_s = present.result(), _median_s(present)
        now_s = was_s
        for one in _worth_timing(work, device):
            try:
                its_plan = _with(one.family, problem, device)
            except UnsupportedProblem:
                continue
            with bench.run(problem, its_plan) as run:
                if not _agrees(problem, one, run.result(), expected):
                    continue
                time_s, timed = _median_s(run), timed + 1
                # Most are no faster, and one is the present choice: only clear winners are taken.
                if time_s < min(now_s, MARGIN * was_s) and _wins(run, present):
                    best, now_s = one, time_s
    entry = None if best is None else (best.family.name, best.config)
    return Tuning(key, entry, plan.kernel, was_s, now_s, timed)


def _result_dtype(problem: Any) -> Any:
    """Return the dtype of the gradient."""
    return getattr(problem, "weight_dtype", None) or problem.dtype


def _worth_timing(work: ConvWork, device: CudaDevice) -> Iterator[Candidate]:
    for every in candidates(work, device):
        yield from every[:EACH_FAMILY]


def _with(family: Family[ConvWork], problem: Problem, device: CudaDevice) -> CudaPlan:
    families = replace(FAMILIES, bwd_data=(family,), bwd_weight=(family,))
    return plan_for(problem, device, families)


def _median_s(run: Run) -> float:
    return statistics.median(run.seconds() for _ in range(SAMPLES))


def _wins(run: Run, present: Run) -> bool:
    pairs = ((_median_s(run), _median_s(present)) for _ in range(WINS))
    return all(ours < MARGIN * theirs for ours, theirs in pairs)


def _agrees(problem: Problem, one: Candidate, found: Any, expected: Any) -> bool:
    """Return whether two results differ by rounding alone; log it if not."""
    of: Any = problem
    error = float(np.linalg.norm(found - expected)) / max(float(np.linalg.norm(expected)), 1e-30)
    if error <= TOLERANCE[of.dtype.value]:
        return True
    _log.error(
        "%s %s is not used: its gradient differs by %.2g for %s",
        one.family.name,
        one.config,
        error,
        problem,
    )
    return False
