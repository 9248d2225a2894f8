"""Two convolutions in one: activations, biases, groups, strides, through both gates."""

from __future__ import annotations

import pytest

from convgrad_service.backends.base import Backend
from tests.arrays import DTYPES
from tests.cases import FUSED, Case
from tests.kernels.harness import GATES, answers, check, drawn, with_layouts

# silu of an integer is no integer, so nothing of it is exact.
GATED = [
    pytest.param(case, gate, id=f"{case.id}-{gate}")
    for case in FUSED
    for gate in GATES
    if gate == "bounded" or "silu" not in case.params.values()
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("case", "gate"), GATED)
def test_fused(backend: Backend, seed: int, case: Case, dtype: str, gate: str) -> None:
    """The intermediate is rounded once to the input's dtype, after activation0."""
    tensors, wanted = drawn(seed, case, dtype, gate)
    for layout in with_layouts(case.ndim, grouped=False):
        found = answers(backend, case, tensors, layout)
        check(found, wanted, gate, f"seed {seed}, {case.id} {dtype} {layout}")
