"""Random valid geometries through the exact gate, and random invalid ones that are rejected."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from convgrad.contract import OPERATIONS
from convgrad.contract.base import validate
from convgrad.errors import InvalidProblem, MalformedRequest
from convgrad_service.backends.base import Backend
from convgrad_service.problems import problem_from
from tests.support.kernels.harness import answers, check, with_layouts
from tests.support.numerics.arrays import DTYPES, draw, integers, normals, rng_for
from tests.support.numerics.cases import FROM_CONV, Case
from tests.support.numerics.geometries import Conv
from tests.support.numerics.oracle import expected
from tests.support.numerics.strategies import (
    conv_cases,
    convs,
    fused_cases,
    pool_cases,
    refused_cases,
    zeros,
)

# All examples intentionally share the backend and the seed.
SAME_FIXTURES = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
QUICK = settings(deadline=None, max_examples=150, suppress_health_check=SAME_FIXTURES)
LONG = settings(QUICK, max_examples=10_000, phases=[Phase.generate, Phase.shrink])

dtypes = st.sampled_from(sorted(DTYPES))
numbers = st.integers(0, 2**31)


def check_exactly(backend: Backend, case: Case, dtype: str, layout_number: int, seed: int) -> None:
    layouts = with_layouts(case.ndim, grouped=case.operation in FROM_CONV)
    if "backprop" in case.operation:
        layouts = [None]
    layout = layouts[layout_number % len(layouts)]
    rng = rng_for(seed, layout_number)
    for gate, numbers_of in (("exact", integers), ("bounded", normals)):
        tensors = draw(case, rng, DTYPES[dtype], numbers_of)
        wanted = expected(case.operation, tensors, case.params)
        if case.operation.endswith("d_fwd") or "silu" in case.params.values():
            gate = "bounded"
        check(answers(backend, case, tensors, layout), wanted, gate, f"seed {seed}, {case}")


@QUICK
@given(case=conv_cases() | pool_cases() | fused_cases(), dtype=dtypes, number=numbers)
def test_random(backend: Backend, seed: int, case: Case, dtype: str, number: int) -> None:
    check_exactly(backend, case, dtype, number, seed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@LONG
@given(case=conv_cases() | pool_cases() | fused_cases(), dtype=dtypes, number=numbers)
def test_random_at_length(backend: Backend, seed: int, case: Case, dtype: str, number: int) -> None:
    check_exactly(backend, case, dtype, number, seed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(LONG, max_examples=1500)
@given(conv=convs(), dtype=dtypes, number=numbers, channels=st.tuples(*[st.integers(1, 90)] * 2))
def test_random_channels(
    backend: Backend,
    seed: int,
    conv: Conv,
    dtype: str,
    number: int,
    channels: tuple[int, int],
) -> None:
    """More channels than in other sweeps: every remainder of a vector or a tile."""
    groups = conv.groups
    wide = replace(conv, c=groups * channels[0], k=groups * channels[1])
    for make in FROM_CONV.values():
        check_exactly(backend, make("random", wide), dtype, number, seed)


@QUICK
@given(case=refused_cases())
def test_contradictions_are_refused(case: Case) -> None:
    with pytest.raises((InvalidProblem, MalformedRequest)) as refused:
        problem_from(
            case.operation,
            validate(OPERATIONS[case.operation].request, {**zeros(case), **case.params}),
        )
    # One readable sentence with the found and the expected value.
    assert "expected" in refused.value.detail or "takes" in refused.value.detail
    assert len(refused.value.detail) < 600


@settings(QUICK, max_examples=60)
@given(case=pool_cases())
def test_the_source_of_a_pooling_backward_is_one(case: Case) -> None:
    """Either the input or indices are required, not both."""
    if case.operation.endswith("fwd"):
        return
    both = {**zeros(case), "indices": np.zeros(case.shapes["grad_output"], np.int64)}
    neither = {"grad_output": both["grad_output"]}
    model = OPERATIONS[case.operation].request
    for tensors in (both, neither):
        with pytest.raises((InvalidProblem, MalformedRequest), match=r"(?i)indices"):
            problem_from(case.operation, validate(model, {**tensors, **case.params}))
