"""Random geometries of each class of layer that has kernels of its own, through both gates."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convgrad_service.backends.base import Backend
from tests.arrays import DTYPES, draw, integers, normals, rng_for
from tests.cases import FROM_CONV, Case
from tests.class_strategies import CLASSES
from tests.kernels.harness import answers, check, with_layouts
from tests.kernels.test_random_geometries import QUICK
from tests.oracle import expected

# Rounding both factors to TF32.
TF32 = 2.0**-10

# What networks are trained in comes up most.
dtypes = st.sampled_from(["bfloat16", "bfloat16", "float16", "float32", "float64"])


def check_class(
    backend: Backend, case: Case, dtype: str, layout: str | None, high: bool, seed: int
) -> None:
    """Integers to the bit, normal numbers within the arithmetic's own error."""
    rng = rng_for(seed, case.id)
    c = TF32 if high and backend.name == "cuda" else 0.0
    if high and "pool" not in case.operation:
        case = case.with_params("high", precision="high")
    # exp is no integer's, and indices are compared as they are.
    inexact = "silu" in case.params.values()
    for gate, numbers in (("bounded" if inexact else "exact", integers), ("bounded", normals)):
        tensors = draw(case, rng, DTYPES[dtype], numbers)
        wanted = expected(case.operation, tensors, case.params)
        found = answers(backend, case, tensors, layout)
        check(found, wanted, gate, f"seed {seed}, {layout}, {dtype}, {case}", c)


def _layout(case: Case, number: int) -> str | None:
    """Channels last twice as often as any other."""
    layouts = with_layouts(case.ndim, grouped=case.operation in FROM_CONV)
    last = {1: "NWC", 2: "NHWC", 3: "NDHWC"}[case.ndim]
    return [last, *layouts][number % (len(layouts) + 1)]


@pytest.mark.parametrize("name", CLASSES)
@settings(QUICK, max_examples=100)
@given(data=st.data(), dtype=dtypes, number=st.integers(0, 2**16), high=st.booleans())
def test_class(
    backend: Backend, seed: int, name: str, data: st.DataObject, dtype: str, number: int, high: bool
) -> None:
    case = data.draw(CLASSES[name])
    check_class(backend, case, dtype, _layout(case, number), high and dtype == "float32", seed)
