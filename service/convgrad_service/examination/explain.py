"""The plan of a problem, and what it cannot be faster than, in words."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any

from convgrad.contract.again import again
from convgrad.contract.timing import (
    PassedOver,
    PlanExplained,
    PlanReport,
    TensorShape,
)
from convgrad_service.backends.base import Outcome, ServingBackend
from convgrad_service.examination.roofline import reference_time
from convgrad_service.problems.base import Problem, TensorSpec
from convgrad_service.problems.examinations import Explain

__all__ = ["explain", "plan_report"]


def explain(
    backend: ServingBackend,
    problem: Explain,
    tensors: Mapping[str, Any],
    cancelled: threading.Event | None,
    out: Mapping[str, Any],
) -> Outcome:
    """Which kernel would compute the subject, and why no other."""
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
    said = {"answer": found.model_dump(mode="json")}
    return Outcome({}, plan.kernel, 0.0, plan.pieces, plan.workspace_bytes, words=json.dumps(said))


def plan_report(backend: ServingBackend, subject: Problem) -> PlanReport:
    """What `Backend.explain` says."""
    plan = backend.explain(subject)
    return PlanReport(
        kernel=plan.kernel,
        workspace_bytes=plan.workspace_bytes,
        pieces=plan.pieces,
        passed_over=tuple(
            PassedOver(kernel=kernel, reason=reason) for kernel, reason in plan.passed_over
        ),
    )


def _shapes(specs: Mapping[str, TensorSpec]) -> dict[str, TensorShape]:
    return {
        name: TensorShape(shape=spec.shape, dtype=spec.dtype.value) for name, spec in specs.items()
    }
