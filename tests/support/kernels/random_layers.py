"""Checks of one random layer."""

from __future__ import annotations

from convgrad_service.backends.base import Backend
from tests.support.kernels.harness import answers, check
from tests.support.numerics.arrays import DTYPES, draw, integers, normals, rng_for
from tests.support.numerics.cases import Case
from tests.support.numerics.oracle import TF32, expected


def check_class(
    backend: Backend, case: Case, dtype: str, layout: str | None, high: bool, seed: int
) -> None:
    """Check integers for equality, and normal numbers within the error bound."""
    rng = rng_for(seed, case.id)
    c = TF32 if high and backend.name != "cpu" else 0.0
    if high and "pool" not in case.operation:
        case = case.with_params("high", precision="high")
    # silu of an integer is no integer, and neither is an average.
    inexact = "silu" in case.params.values() or "avg" in case.operation
    for gate, numbers in (("bounded" if inexact else "exact", integers), ("bounded", normals)):
        tensors = draw(case, rng, DTYPES[dtype], numbers)
        wanted = expected(case.operation, tensors, case.params)
        found = answers(backend, case, tensors, layout)
        check(found, wanted, gate, f"seed {seed}, {layout}, {dtype}, {case}", c)
