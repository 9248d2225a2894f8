"""Times an operation that runs alone on its device."""

from __future__ import annotations

import json
import math
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from convgrad.contract.again import again
from convgrad.contract.timing import Candidate, Peer, ReferenceTime, TimedPlan, TimingReport
from convgrad.contract.verification import Inputs
from convgrad.errors import ServiceError
from convgrad.wire.strict_json import dumps
from convgrad_service.backends.base import Outcome, ServingBackend, Stopwatch
from convgrad_service.examination.explain import plan_report, reference_time
from convgrad_service.examination.peers import peers_for
from convgrad_service.examination.verifying import draw_inputs, refuse_if
from convgrad_service.problems.base import Problem
from convgrad_service.problems.examinations import OURS, TimeIt

# Fewest and most samples, however fast the mean converges.
_LEAST, _MOST = 20, 5000
_KEPT = 512
# A back-to-back run is long compared with the clock's resolution.
_RUN_S, _LONGEST_RUN = 2e-3, 4096
# The ways of timing, for this server and its peers; each gets an equal share of the budget.
_WAYS = ("cold", "warm", "back_to_back")
_CANDIDATE_SHARE = 0.1


def time_it(
    backend: ServingBackend,
    problem: TimeIt,
    tensors: Mapping[str, Any],
    cancelled: threading.Event | None,
    out: Mapping[str, Any],
) -> Outcome:
    """Draw the tensors, and take samples until the standard error of their mean is small enough.

    Raises
    ------
    DeadlineExceeded
        ``cancelled`` was set.
    UnsupportedProblem, DeviceOutOfMemory
        As `Backend.run`; or the problem needs more memory than the device has.
    """
    began_s = time.perf_counter()
    check, subject = refuse_if(cancelled), problem.subject
    inputs = draw_inputs(problem, out, check)
    places = {name: out[f"{OURS}{name}"] for name in subject.outputs}
    reference = reference_time(backend, subject)
    plan = plan_report(backend, subject)
    with backend.stopwatch(subject, inputs, places) as watch:
        sampler = _Sampler(subject, reference, problem.standard_error, check)
        peers = peers_for(watch, subject, json.loads(problem.parameters)) if problem.peers else []
        shares = len(_WAYS) * (1 + sum(peer.watch is not None for peer in peers))
        each_s = problem.budget_s / shares
        before = watch.clocks()
        timings = {way: sampler.sampled(watch, way, each_s) for way in _WAYS}
        after = watch.clocks()
        timed = []
        for peer in peers:
            own = {}
            if peer.watch is not None:
                own = {way: sampler.sampled(peer.watch, way, each_s) for way in _WAYS}
            timed.append(Peer(name=peer.name, timings=own, reason=peer.reason))
        found = TimedPlan(
            operation=subject.operation,
            layer=problem.layer,
            device=backend.described(),
            plan=plan,
            timings=timings,
            flops=subject.flops,
            valid_flops=subject.valid_flops,
            bytes=subject.compulsory_bytes,
            reference=reference,
            clocks_before=before,
            clocks_after=after,
            peers=tuple(timed),
            candidates=_candidates(backend, problem, watch, sampler, timings["cold"], plan.kernel),
            inputs=Inputs(
                dtype=problem.dtype.value,
                seed=problem.seed,
                distribution=problem.distribution,
                drawn=problem.drawn,
            ),
            again=again(problem.name, json.loads(problem.asked)),
        )
    report = dumps(found.json_values())
    seconds = time.perf_counter() - began_s
    return Outcome({}, plan.kernel, seconds, 1, plan.workspace_bytes, report_json=report)


class _Sampler:
    """Takes samples until the standard error of their mean is small, or the budget is spent."""

    def __init__(
        self,
        subject: Problem,
        reference: ReferenceTime,
        standard_error: float,
        check: Callable[[], None],
    ) -> None:
        self._subject, self._reference = subject, reference
        self._wanted, self._check = standard_error, check

    def sampled(self, watch: Stopwatch, way: str, budget_s: float) -> TimingReport:
        """Take samples in one way of timing, after discarding the first ones."""
        take: Callable[[], float] = watch.cold if way == "cold" else watch.warm
        once_s = min(take() for _ in range(2))
        if way == "back_to_back":
            count = max(2, min(_LONGEST_RUN, math.ceil(_RUN_S / max(once_s, 1e-9))))
            take = lambda: watch.run_of(count) / count  # noqa: E731
            take()
        began_s = time.perf_counter()
        samples: list[float] = []
        spread = _Spread()
        while len(samples) < _MOST:
            self._check()
            samples.append(take())
            spread.add(samples[-1])
            if len(samples) >= _LEAST and spread.standard_error <= self._wanted:
                break
            # At least three: a standard error needs them.
            if len(samples) >= 3 and time.perf_counter() - began_s > budget_s:
                break
        return self._report(samples, spread.standard_error)

    def _report(self, samples: Sequence[float], error: float) -> TimingReport:
        median = statistics.median(samples)
        p05, p25, p75, p95 = (float(each) for each in np.percentile(samples, (5, 25, 75, 95)))
        kept = samples[:: max(1, -(-len(samples) // _KEPT))]
        return TimingReport(
            samples=len(samples),
            median_s=median,
            mean_s=statistics.fmean(samples),
            min_s=min(samples),
            max_s=max(samples),
            p05_s=p05,
            p25_s=p25,
            p75_s=p75,
            p95_s=p95,
            standard_error=error,
            converged=error <= self._wanted and len(samples) >= _LEAST,
            flops_per_s=self._subject.flops / median,
            bytes_per_s=self._subject.compulsory_bytes / median,
            reference_share=self._reference.seconds / median,
            samples_s=tuple(kept),
        )


class _Spread:
    """Running mean and variance (Welford)."""

    def __init__(self) -> None:
        self._count, self._mean, self._squares = 0, 0.0, 0.0

    def add(self, sample: float) -> None:
        self._count += 1
        apart = sample - self._mean
        self._mean += apart / self._count
        self._squares += apart * (sample - self._mean)

    @property
    def standard_error(self) -> float:
        """The standard error of the mean, relative to the mean."""
        if self._count < 2 or self._mean <= 0:
            return math.inf
        variance = self._squares / (self._count - 1)
        return math.sqrt(variance / self._count) / self._mean


def _candidates(
    backend: ServingBackend,
    problem: TimeIt,
    watch: Stopwatch,
    sampler: _Sampler,
    chosen: TimingReport,
    kernel: str,
) -> tuple[Candidate, ...]:
    """Return the chosen kernel and, if requested, the others with their times."""
    expected_s = watch.predicted_s
    own = Candidate(kernel=kernel, chosen=True, predicted_s=expected_s, measured_s=chosen.median_s)
    found = [own]
    if not problem.candidates:
        return tuple(found)
    for name, other in watch.others():
        reason, measured_s, predicted_s = None, None, None
        try:
            with other as another:
                predicted_s = another.predicted_s
                budget_s = problem.budget_s * _CANDIDATE_SHARE
                measured_s = sampler.sampled(another, "cold", budget_s).median_s
        except ServiceError as refused:
            reason = refused.detail
        found.append(
            Candidate(
                kernel=name,
                chosen=False,
                predicted_s=predicted_s,
                measured_s=measured_s,
                reason=reason,
            )
        )
    return tuple(found)
