"""Transposed convolutions and second derivatives, which are compositions of passes.

The passes are tested elsewhere, so a few geometries suffice; `test_random_geometries.py` has more.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from convgrad_service.backends.base import Backend
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.fallback.gather_tile import GatherTile
from convgrad_service.backends.cuda.kernels.fallback.weight_tile import WeightTile
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.cuda_backends import dense, general
from tests.support.kernels.harness import GATES, answers, check, drawn, with_layouts
from tests.support.numerics.arrays import DTYPES
from tests.support.numerics.cases import PASSES, Case
from tests.support.numerics.nonfinite import check_rule

DOUBLE = [case for case in PASSES if "double" in case.operation]
TF32 = 2.0**-10


def check_case(backend: Backend, seed: int, case: Case, dtype: str, gate: str) -> None:
    tensors, wanted = drawn(seed, case, dtype, gate)
    for layout in with_layouts(case.ndim, grouped=True):
        found = answers(backend, case, tensors, layout)
        check(found, wanted, gate, f"seed {seed}, {case.id} {dtype} {layout}")


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", PASSES, ids=lambda case: case.id)
def test_both_gates(backend: Backend, seed: int, case: Case, dtype: str, gate: str) -> None:
    check_case(backend, seed, case, dtype, gate)


@pytest.mark.parametrize("case", PASSES, ids=lambda case: case.id)
def test_nonfinite(backend: Backend, seed: int, case: Case) -> None:
    for dtype in ("float32", "bfloat16"):
        for layout in with_layouts(case.ndim, grouped=False)[1:]:
            check_rule(backend, seed, case, dtype, layout)


@pytest.mark.parametrize("case", PASSES, ids=lambda case: case.id)
def test_same_bits_again(backend: Backend, seed: int, case: Case) -> None:
    tensors, _ = drawn(seed, case, "float32", "bounded")
    first, second = (answers(backend, case, tensors, None) for _ in range(2))
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name], err_msg=name)


@pytest.mark.parametrize(
    "given",
    [("input",), ("weight",), ("bias",), ("input", "bias"), ("input", "weight")],
    ids="+".join,
)
@pytest.mark.parametrize("case", DOUBLE[::3], ids=lambda case: case.id)
def test_what_is_not_given_counts_as_zero(
    backend: Backend, seed: int, case: Case, given: tuple[str, ...]
) -> None:
    kept = {f"grad_grad_{name}" for name in given}
    shapes = {
        name: shape
        for name, shape in case.shapes.items()
        if not name.startswith("grad_grad") or name in kept
    }
    part = replace(case, name=f"{case.name}-{'-'.join(given)}", shapes=shapes)
    check_case(backend, seed, part, "bfloat16", "bounded")


@pytest.mark.parametrize("outputs", [("grad_input",), ("grad_weight", "grad_bias")], ids="+".join)
def test_some_gradients_of_a_transposed_convolution(
    backend: Backend, seed: int, outputs: tuple[str, ...]
) -> None:
    for case in PASSES:
        if case.operation == "conv_transpose_backward":
            tensors, wanted = drawn(seed, case, "float32", "bounded")
            found = answers(backend, case.with_params("some", outputs=outputs), tensors)
            check(found, {name: wanted[name] for name in outputs}, "bounded", case.id)


def test_a_sum_of_two_products_is_rounded_once(backend: Backend) -> None:
    """2049 is not a float16: rounding each product separately would give 2048 for 2049 + 1."""
    case = next(case for case in DOUBLE if case.operation == "conv_double_backward")
    values = {
        "grad_output": [0],
        "input": [1, 0],
        "weight": [1, 1],
        "grad_grad_input": [2048, 1],
        "grad_grad_weight": [1, 0],
    }
    tensors = {
        name: np.array(each, np.float16).reshape(1, -1, 1, 1) for name, each in values.items()
    }
    shapes = {name: array.shape for name, array in tensors.items()}
    found = answers(backend, replace(case, shapes=shapes, params={}), tensors)
    assert float(found["grad_grad_output"].item()) == 2050


@pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")
class TestEmulated:
    """The launches that plans choose for a GPU."""

    @pytest.mark.parametrize("gate", GATES)
    @pytest.mark.parametrize("case", PASSES, ids=lambda case: case.id)
    def test_tiles(self, seed: int, case: Case, gate: str) -> None:
        self._check(EmulatedBackend(general(GatherTile(), WeightTile())), seed, case, gate)

    @pytest.mark.parametrize("case", DOUBLE, ids=lambda case: case.id)
    def test_as_planned(self, seed: int, case: Case) -> None:
        self._check(EmulatedBackend(FAMILIES), seed, case, "exact")

    @pytest.mark.parametrize("case", DOUBLE, ids=lambda case: case.id)
    def test_tensor_cores(self, seed: int, case: Case) -> None:
        self._check(EmulatedBackend(dense()), seed, case, "exact")

    @pytest.mark.parametrize("case", DOUBLE, ids=lambda case: case.id)
    def test_a_bias_alone(self, seed: int, case: Case) -> None:
        """A bias is broadcast over a plane, or over all pixels."""
        shapes = {
            name: shape
            for name, shape in case.shapes.items()
            if name not in ("grad_grad_input", "grad_grad_weight")
        }
        alone = replace(case, name=f"{case.name}-bias", shapes=shapes)
        self._check(EmulatedBackend(FAMILIES), seed, alone, "bounded")

    @pytest.mark.parametrize("case", DOUBLE[::2], ids=lambda case: case.id)
    def test_nonfinite(self, seed: int, case: Case) -> None:
        check_rule(EmulatedBackend(FAMILIES), seed, case, "bfloat16", None)

    def _check(self, backend: EmulatedBackend, seed: int, case: Case, gate: str) -> None:
        tensors, wanted = drawn(seed, case, "bfloat16", gate)
        for layout in with_layouts(case.ndim, grouped=False)[1:]:
            found = answers(backend, case, tensors, layout)
            check(found, wanted, gate, f"seed {seed}, {case.id} {layout}")
