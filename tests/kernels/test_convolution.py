"""All convolutions, dtypes, layouts and difficult geometries, through both gates."""

from __future__ import annotations

import pytest

from convgrad_service.backends.base import Backend
from tests.support.kernels.harness import GATES, answers, check, drawn, with_layouts
from tests.support.numerics.arrays import DTYPES
from tests.support.numerics.cases import EPILOGUES, FROM_CONV, FROM_CONV3D, Case, conv_cases

CASES = [case for operation in (*FROM_CONV, *FROM_CONV3D) for case in conv_cases(operation)]
# A few geometries, for tests that do not depend on the geometry.
FEW = ("plain", "stride_beyond_kernel", "depthwise", "groups_3_odd", "1d_causal", "3d_plain")


def few(operation: str) -> list[Case]:
    return [case for case in conv_cases(operation) if case.name in FEW]


def check_case(backend: Backend, seed: int, case: Case, dtype: str, gate: str) -> None:
    tensors, wanted = drawn(seed, case, dtype, gate)
    layouts = with_layouts(case.ndim, grouped=True)
    if case.operation == "conv3d_backprop_input":
        layouts = [None]  # it has formats instead: test_formats.py
    for layout in layouts:
        found = answers(backend, case, tensors, layout)
        check(found, wanted, gate, f"seed {seed}, {case.id} {dtype} {layout}")


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_named_geometry(backend: Backend, seed: int, case: Case, dtype: str, gate: str) -> None:
    check_case(backend, seed, case, dtype, gate)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", EPILOGUES, ids=lambda case: case.id)
def test_epilogue(backend: Backend, seed: int, case: Case, dtype: str, gate: str) -> None:
    """alpha*grad + beta*accumulate is rounded once."""
    check_case(backend, seed, case, dtype, gate)


@pytest.mark.parametrize("operation", ["conv_bwd_data", "grouped_conv_bwd_weight"])
def test_beta_zero_never_reads_accumulate(backend: Backend, seed: int, operation: str) -> None:
    case = next(c for c in EPILOGUES if c.operation == operation and c.name.endswith("beta_zero"))
    tensors, wanted = drawn(seed, case, "float32", "bounded")
    tensors["accumulate"][...] = float("nan")
    check(answers(backend, case, tensors), wanted, "bounded", case.id)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("case", few("grouped_conv_bwd_weight"), ids=lambda case: case.id)
def test_weight_dtype(backend: Backend, seed: int, case: Case, dtype: str, gate: str) -> None:
    """float32 gradients of 16-bit inputs are not rounded to 16 bits first."""
    tensors, wanted = drawn(seed, case, dtype, gate)
    asking = case.with_params("weight_dtype", weight_dtype="float32")
    found = answers(backend, asking, tensors)
    assert {array.dtype.name for array in found.values()} == {"float32"}
    check(found, wanted, gate, asking.id)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("split_k", [1, 2, 7, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_split_k(backend: Backend, seed: int, dtype: str, split_k: int, gate: str) -> None:
    """Partial sums stay in float32 for any split."""
    for case in few("grouped_conv_bwd_weight"):
        tensors, wanted = drawn(seed, case, dtype, gate)
        found = answers(backend, case.with_params("split", split_k=split_k), tensors)
        check(found, wanted, gate, f"{case.id} split_k {split_k}")


@pytest.mark.parametrize(
    "outputs",
    [("grad_input",), ("grad_weight",), ("grad_bias",), ("grad_bias", "grad_input")],
    ids="+".join,
)
def test_some_of_the_three_gradients(backend: Backend, seed: int, outputs: tuple[str, ...]) -> None:
    for case in few("conv_backward"):
        tensors, wanted = drawn(seed, case, "float32", "bounded")
        found = answers(backend, case.with_params("some", outputs=outputs), tensors)
        check(found, {name: wanted[name] for name in outputs}, "bounded", case.id)


@pytest.mark.parametrize("operation", ["conv_fwd", "conv3d_transpose"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_without_bias(backend: Backend, seed: int, operation: str, dtype: str) -> None:
    for case in few(operation):
        shapes = {name: shape for name, shape in case.shapes.items() if name != "bias"}
        plain = Case(f"{case.name}-no_bias", operation, shapes, case.params)
        tensors, wanted = drawn(seed, plain, dtype, "bounded")
        check(answers(backend, plain, tensors), wanted, "bounded", plain.id)


@pytest.mark.parametrize("operation", [*FROM_CONV, *FROM_CONV3D])
def test_precision_high_is_float32_or_tf32(backend: Backend, seed: int, operation: str) -> None:
    tf32 = 2.0**-10 if backend.name == "cuda" else 0.0
    for case in few(operation):
        tensors, wanted = drawn(seed, case, "float32", "bounded")
        high = case.with_params("high", precision="high")
        check(answers(backend, high, tensors), wanted, "bounded", high.id, tf32)


@pytest.mark.parametrize("operation", [*FROM_CONV, *FROM_CONV3D])
def test_where_the_order_of_sums_is_free(backend: Backend, seed: int, operation: str) -> None:
    for case in few(operation):
        tensors, wanted = drawn(seed, case, "bfloat16", "bounded")
        free = case.with_params("free", deterministic=False)
        check(answers(backend, free, tensors), wanted, "bounded", free.id)


@pytest.mark.parametrize("operation", ["conv_bwd_data", "grouped_conv_bwd_weight"])
def test_full_shapes_for_sizes(backend: Backend, seed: int, operation: str) -> None:
    """input_size and weight_size may be full shapes, in the order of the layout."""
    for case in few(operation):
        tensors, wanted = drawn(seed, case, "float32", "bounded")
        (first,) = (ref for name, ref in wanted.items() if name != "grad_bias")
        name = "input_size" if operation == "conv_bwd_data" else "weight_size"
        full = case.with_params("full_shape", **{name: first.value.shape})  # type: ignore[union-attr]
        check(answers(backend, full, tensors), wanted, "bounded", full.id)
