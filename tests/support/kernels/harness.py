"""Running one case on a backend: request, problem, kernel, and the answer back as the case is."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from convgrad.contract import OPERATIONS
from convgrad.contract.base import validate
from convgrad_service.backends.base import Backend, Outcome
from convgrad_service.problems import Problem, problem_from
from tests.support.numerics.arrays import (
    DTYPES,
    LAYOUTS,
    Arrays,
    canonical,
    draw,
    integers,
    normals,
    request_arrays,
    rng_for,
)
from tests.support.numerics.bounds import assert_bounded, assert_exact
from tests.support.numerics.cases import (
    Case,
)
from tests.support.numerics.larger_cases import LARGER as LARGER
from tests.support.numerics.oracle import Answer, expected
from tests.support.numerics.reference import Reference

LAYOUTS_OF_GROUPS = {False: 2, True: 5}
GATES = {"exact": integers, "bounded": normals}


def run(backend: Backend, operation: str, arrays: Arrays, params: Mapping[str, Any]) -> Outcome:
    """A request's arrays and parameters through the backend, as a server would send them."""
    request = validate(OPERATIONS[operation].request, {**arrays, **params})
    return backend.run(problem_from(operation, request), request.tensors())


def answers(backend: Backend, case: Case, tensors: Arrays, layout: str | None = None) -> Arrays:
    """The outputs of a case in canonical order, from canonical tensors, by way of a layout."""
    problem, arrays = problem_and_tensors(case, tensors, layout)
    outcome = backend.run(problem, arrays)
    return {
        name: canonical(case.operation, name, array, layout, case.groups)
        for name, array in outcome.outputs.items()
    }


def check(found: Arrays, wanted: Answer, gate: str, what: str, c: float = 0.0) -> float:
    """Every output through a gate; returns the largest share of the allowed error.

    ``c`` is what rounding the factors costs.
    """
    assert set(found) == set(wanted), f"{what}: outputs {sorted(found)}, expected {sorted(wanted)}"
    shares = [0.0]
    for name, reference in wanted.items():
        label = f"{what} {name}"
        if not isinstance(reference, Reference):
            np.testing.assert_array_equal(found[name], reference, err_msg=label)
        elif gate == "exact":
            assert_exact(found[name], reference, label)
        else:
            shares.append(assert_bounded(found[name], reference, label, c))
    return max(shares)


def drawn(seed: int, case: Case, dtype: str, gate: str) -> tuple[Arrays, Answer]:
    """A case's canonical tensors in `dtype`, and what they must give."""
    # The exact gate's integers and sums are the same in every dtype, so one reference serves all;
    # but the fused forward rounds its intermediate to the dtype.
    shared = gate == "exact" and case.operation != "grouped_conv_conv_fwd"
    tensors, answer = _drawn(seed, case, "float64" if shared else dtype, gate)
    given = {
        name: array if name == "indices" else array.astype(DTYPES[dtype])
        for name, array in tensors.items()
    }
    return given, answer


@lru_cache(maxsize=32)
def _drawn(seed: int, case: Case, dtype: str, gate: str) -> tuple[Arrays, Answer]:
    tensors = draw(case, rng_for(seed, case.id, dtype, gate), DTYPES[dtype], GATES[gate])
    return tensors, expected(case.operation, tensors, case.params)


def with_layouts(ndim: int, *, grouped: bool) -> list[str | None]:
    """No layout, and each one by name."""
    return [None, *LAYOUTS[ndim][: LAYOUTS_OF_GROUPS[grouped]]]


# What rounding both factors to TF32 costs.
ROUNDED = 2.0**-10


def gates(backend: Backend, seed: int, case: Case, dtype: str, layouts: list[str | None]) -> None:
    """Both gates; ``tf32`` is float32 with ``precision: high``."""
    asked = case
    rounded = 0.0
    if dtype == "tf32":
        asked, dtype, rounded = case.with_params("high", precision="high"), "float32", ROUNDED
    for gate in ("exact", "bounded"):
        tensors, wanted = drawn(seed, asked, dtype, gate)
        for layout in layouts:
            found = answers(backend, asked, tensors, layout)
            what = f"seed {seed}, {case.id} {dtype} {layout}"
            check(found, wanted, gate, what, rounded)


def problem_and_tensors(case: Case, tensors: Arrays, layout: str | None) -> tuple[Problem, Arrays]:
    """A case as a problem in a layout, and its canonical tensors in that layout."""
    params = dict(case.params) if layout is None else {**case.params, "layout": layout}
    arrays = request_arrays(case, tensors, layout)
    request = validate(OPERATIONS[case.operation].request, {**arrays, **params})
    return problem_from(case.operation, request), request.tensors()
