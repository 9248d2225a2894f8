"""Examinations in a worker: verifying, timing and explaining another problem.

`examined` is `Backend.run` extended by these.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from convgrad_service.backends.base import Outcome, ServingBackend
from convgrad_service.examination.explain import explain
from convgrad_service.examination.timing import time_it
from convgrad_service.examination.verifying import verify
from convgrad_service.problems.base import Problem
from convgrad_service.problems.examinations import Explain, TimeIt, Verify

Arrays = Mapping[str, Any]
_EXAMINERS: Mapping[type[Problem], Callable[..., Outcome]] = {
    Verify: verify,
    TimeIt: time_it,
    Explain: explain,
}


def examined(
    backend: ServingBackend,
    problem: Problem,
    tensors: Arrays,
    cancelled: threading.Event | None = None,
    out: Arrays | None = None,
) -> Outcome:
    """See `Backend.run`; the report of an examination is in its ``report_json``."""
    examiner = _EXAMINERS.get(type(problem))
    if examiner is None:
        return backend.run(problem, tensors, cancelled, out)
    places = dict(out or {})
    # The examiner has written those that are needed.
    return replace(examiner(backend, problem, tensors, cancelled, places), outputs=places)
