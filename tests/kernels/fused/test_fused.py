"""Two fused convolutions: activations, biases, groups and strides, through both gates."""

from __future__ import annotations

import pytest

from convgrad_service.backends.base import Backend
from tests.support.kernels.fused_cases import LAYOUT, POINTWISE, SEPARABLE
from tests.support.kernels.harness import GATES, answers, check, drawn, with_layouts
from tests.support.numerics.arrays import DTYPES
from tests.support.numerics.cases import FUSED, Case

# silu of an integer is not an integer, so only the bounded gate applies.
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


# Cases of the GPU's fused kernels: contiguous channels, in whole 16-byte vectors.
TAKEN = [
    pytest.param(case, gate, id=f"{case.id}-{gate}")
    for case in (*SEPARABLE, *POINTWISE)
    for gate in GATES
    if gate == "bounded" or "silu" not in case.params.values()
]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("case", "gate"), TAKEN)
def test_channels_in_whole_vectors(
    backend: Backend, seed: int, case: Case, dtype: str, gate: str
) -> None:
    tensors, wanted = drawn(seed, case, dtype, gate)
    for layout in (LAYOUT[case.ndim], None):
        found = answers(backend, case, tensors, layout)
        check(found, wanted, gate, f"seed {seed}, {case.id} {dtype} {layout}")
