"""Checks every operation of the contract against the float64 reference.

An operation in the registry without a case is an error.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from convgrad import Client
from convgrad.demo.cases import CASES, Case, Draw
from convgrad.demo.errors import DemoError
from convgrad.demo.gate import worst_share

__all__ = ["CheckResult", "run_checks"]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The worst error of an operation relative to its bound, and the case that showed it."""

    operation: str
    cases: int
    elements: int
    worst_share: float
    worst_case: str

    @property
    def passed(self) -> bool:
        return self.worst_share <= 1


def run_checks(
    client: Client,
    operations: Collection[str],
    rng: np.random.Generator,
    cases: Sequence[Case] = CASES,
) -> Iterator[CheckResult]:
    """Check the named operations in order.

    Raises
        DemoError, before any check, if an operation has no case or a case no operation.
    """
    covered = {case.operation for case in cases}
    if covered != set(operations):
        missing = ", ".join(sorted(set(operations) - covered)) or "none"
        unknown = ", ".join(sorted(covered - set(operations))) or "none"
        raise DemoError(
            "every operation needs a check in the demo, and every check an operation; "
            f"operations without a check: {missing}; checks without an operation: {unknown}"
        )
    draw = Draw(rng)
    return (
        _check(client, operation, [case for case in cases if case.operation == operation], draw)
        for operation in operations
    )


def _check(client: Client, operation: str, cases: Sequence[Case], draw: Draw) -> CheckResult:
    elements, worst, worst_case = 0, -1.0, ""
    for case in cases:
        for answer, expected in case.run(client, draw):
            elements += expected.value.size
            share = float("inf") if answer is None else worst_share(answer, expected)
            if share > worst:
                worst, worst_case = share, case.title
    return CheckResult(operation, len(cases), elements, worst, worst_case)
