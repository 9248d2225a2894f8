"""Every refusal says what was found and what was expected, and comes before any work."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from convgrad.contract import OPERATIONS, validate
from convgrad.errors import InvalidProblem, MalformedRequest
from convgrad_service.problems import Problem, problem_from
from tests.support.numerics import strategies
from tests.support.numerics.cases import Case
from tests.support.refusals_conv import CONV_REFUSALS
from tests.support.refusals_layout import LAYOUT_REFUSALS
from tests.support.refusals_pool import POOL_REFUSALS

REFUSALS = [*CONV_REFUSALS, *POOL_REFUSALS, *LAYOUT_REFUSALS]


def problem(operation: str, **fields: Any) -> Problem:
    return problem_from(operation, validate(OPERATIONS[operation].request, fields))


@pytest.mark.parametrize(("operation", "fields", "sentence"), REFUSALS)
def test_what_was_found_and_what_was_expected(
    operation: str, fields: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidProblem) as refusal:
        problem(operation, **fields)
    assert refusal.value.detail == sentence


def test_a_refusal_takes_no_time() -> None:
    """Nothing here may depend on the sizes that a request states."""
    start = time.perf_counter()
    for operation, fields, _ in REFUSALS:
        with pytest.raises(InvalidProblem):
            problem(operation, **fields)
    assert time.perf_counter() - start < 20


@given(strategies.refused_cases())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_random_contradictions_are_refused(case: Case) -> None:
    with pytest.raises((InvalidProblem, MalformedRequest)) as refusal:
        problem(case.operation, **strategies.zeros(case), **case.params)
    assert "expected" in refusal.value.detail
