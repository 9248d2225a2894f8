"""Explains how a problem would be computed, and the fastest it could be."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from convgrad.contract.again import again
from convgrad.contract.timing import (
    PassedOver,
    PlanExplained,
    PlanReport,
    ReferenceTime,
    TensorShape,
)
from convgrad.wire.strict_json import dumps
from convgrad_service.backends.base import Outcome, Rates, ServingBackend
from convgrad_service.problems.base import Problem, TensorSpec
from convgrad_service.problems.examinations import Explain


def explain(
    backend: ServingBackend,
    problem: Explain,
    tensors: Mapping[str, Any],
    cancelled: threading.Event | None,
    out: Mapping[str, Any],
) -> Outcome:
    """Return which kernel would compute the subject, and why no other."""
    subject = problem.subject
    plan = plan_report(backend, subject)
    found = PlanExplained(
        operation=subject.operation,
        layer=problem.layer,
        device=backend.described(),
        plan=plan,
        inputs=_shapes(subject.inputs),
        outputs=_shapes(subject.outputs),
        flops=subject.flops,
        valid_flops=subject.valid_flops,
        bytes=subject.compulsory_bytes,
        reference=reference_time(backend, subject),
        again=again(problem.name, json.loads(problem.asked)),
    )
    report = dumps(found.json_values())
    return Outcome({}, plan.kernel, 0.0, plan.pieces, plan.workspace_bytes, report_json=report)


def plan_report(backend: ServingBackend, subject: Problem) -> PlanReport:
    """Return `Backend.explain` as a report."""
    plan = backend.explain(subject)
    return PlanReport(
        kernel=plan.kernel,
        workspace_bytes=plan.workspace_bytes,
        pieces=plan.pieces,
        # Parts of a plan may pass over the same kernel for the same reason.
        passed_over=tuple(
            PassedOver(kernel=kernel, reason=reason)
            for kernel, reason in dict.fromkeys(plan.passed_over)
        ),
    )


def _shapes(specs: Mapping[str, TensorSpec]) -> dict[str, TensorShape]:
    return {
        name: TensorShape(shape=spec.shape, dtype=spec.dtype.value) for name, spec in specs.items()
    }


def reference_time(backend: ServingBackend, problem: Problem) -> ReferenceTime:
    """Return the roofline bound, with the overhead of a launch."""
    precision = str(getattr(problem, "precision", "highest"))
    rates = _rates(backend, problem.dtype.value, precision)  # type: ignore[arg-type] # hashable
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
def _rates(backend: ServingBackend, dtype: str, precision: str) -> Rates:
    return backend.rates(dtype, precision)
