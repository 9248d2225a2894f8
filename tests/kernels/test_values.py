"""Special values (infinities, NaNs, overflow, subnormals), and adjointness of gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from convgrad_service.backends.base import Backend
from tests.support.kernels.harness import answers, check, drawn, with_layouts
from tests.support.numerics.arrays import DTYPES, draw, normals, rng_for
from tests.support.numerics.bounds import U, limits
from tests.support.numerics.cases import EPILOGUES, FROM_CONV, FROM_CONV3D, FUSED, Case, conv_cases
from tests.support.numerics.geometries import CONVS
from tests.support.numerics.nonfinite import check_rule
from tests.support.numerics.oracle import expected

# All code paths: dense, strided, padded beyond the kernel, grouped, depthwise, remainders.
NAMES = (
    "plain",
    "pointwise",
    "first_layer_7x7",
    "stride_beyond_kernel",
    "stride_shares_factor_with_dilation",
    "padding_beyond_the_kernel",
    "channels_67",
    "depthwise",
    "depthwise_multiplier_2",
    "groups_3_odd",
    "groups_4",
    "1d_k31",
    "1d_groups_4",
    "3d_plain",
    "3d_groups_2",
)
CONVOLUTIONS = [
    case
    for operation in (*FROM_CONV, *FROM_CONV3D)
    for case in conv_cases(operation)
    if case.name in NAMES
]
# Without silu: its formula gives NaN for minus infinity, although the limit is zero.
CASES = [*CONVOLUTIONS, *(case for case in FUSED if "silu" not in case.params.values())]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_non_finite_inputs_reach_what_they_feed_and_no_more(
    backend: Backend, seed: int, case: Case, dtype: str
) -> None:
    """Outputs that must be non-finite are, and those that must be finite are, in every layout."""
    layouts = [None] if "backprop" in case.operation else with_layouts(case.ndim, grouped=False)
    for layout in layouts:
        check_rule(backend, seed, case, dtype, layout)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", EPILOGUES, ids=lambda case: case.id)
def test_non_finite_epilogues(backend: Backend, seed: int, case: Case, dtype: str) -> None:
    """alpha = 0 times an infinite gradient is NaN; beta = 0 ignores accumulate."""
    check_rule(backend, seed, case, dtype)


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=lambda case: case.id)
def test_float16_overflows_to_infinity(backend: Backend, seed: int, case: Case) -> None:
    """Sums beyond 65504 are infinite; others are not, even if partial sums exceed it."""
    tensors = draw(case, rng_for(seed, case.id), DTYPES["float16"], normals)
    first = tensors[min(tensors)]
    first *= np.float16(100)
    wanted = expected(case.operation, tensors, case.params)
    check(answers(backend, case, tensors), wanted, "bounded", f"seed {seed}, {case.id}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CONVOLUTIONS, ids=lambda case: case.id)
def test_subnormals_survive(backend: Backend, seed: int, case: Case, dtype: str) -> None:
    """Sums of multiples of the smallest subnormal are exact, and not flushed to zero."""
    tensors, _ = drawn(seed, case, dtype, "exact")
    tiny = DTYPES[dtype].type(limits(DTYPES[dtype]).smallest_subnormal)
    linear = [name for name in ("grad_output", "bias", "input") if name in tensors]
    # grad_weight of conv_backward would multiply two tiny tensors, so only the gradient is tiny.
    for name in linear[:1] if case.operation == "conv_backward" else linear:
        if case.operation == "grouped_conv_bwd_weight" and name == "input":
            continue
        tensors[name] = tensors[name] * tiny
        assert (tensors[name] != 0).any()
    wanted = expected(case.operation, tensors, case.params)
    for output, array in answers(backend, case, tensors).items():
        reference = wanted[output]
        assert not isinstance(reference, np.ndarray)
        assert (array.astype(np.float64) == reference.value).all(), (
            f"seed {seed}, {case.id} {output}"
        )
        assert not reference.value.any() or array.any()


@pytest.mark.parametrize(
    ("least", "most", "both"),
    [(-144, -125, False), (-125, -105, False), (-80, -50, True), (40, 58, True)],
    ids=["subnormal_factors", "small_factors", "subnormal_products", "large"],
)
@pytest.mark.parametrize("case", CONVOLUTIONS, ids=lambda case: case.id)
def test_float32_of_every_magnitude(
    backend: Backend, seed: int, case: Case, least: int, most: int, both: bool
) -> None:
    """Split or scaled factors lose no precision at the ends of the range."""
    rng = rng_for(seed, case.id, str(least))
    tensors = draw(case, rng, DTYPES["float32"], normals)
    factors = [name for name in ("grad_output", "input", "weight") if name in tensors]
    # conv_backward multiplies grad_output with both other tensors.
    for name in factors if both else factors[:1]:
        powers = rng.integers(least, most, tensors[name].shape).astype(np.float64)
        tensors[name] = (tensors[name] * np.exp2(powers)).astype(np.float32)
    wanted = expected(case.operation, tensors, case.params)
    check(answers(backend, case, tensors), wanted, "bounded", f"seed {seed}, {case.id}")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", CONVS)
def test_adjointness(backend: Backend, seed: int, name: str, dtype: str) -> None:
    """<dy, conv(x, w)> = <bwd_data(dy, w), x> = <bwd_weight(x, dy), w>, computed by the backend."""
    conv, of = CONVS[name], DTYPES[dtype]
    rng = rng_for(seed, name)
    x, w = normals(rng, conv.input_shape, of), normals(rng, conv.weight_shape, of)
    dy = normals(rng, conv.output_shape, of)
    tensors = {"input": x, "weight": w, "grad_output": dy}

    def answer(operation: str, output: str) -> NDArray[Any]:
        shapes = {k: v for k, v in FROM_CONV[operation](name, conv).shapes.items() if k != "bias"}
        case = Case(name, operation, shapes, FROM_CONV[operation](name, conv).params)
        given = {tensor: tensors[tensor] for tensor in shapes}
        return answers(backend, case, given)[output].astype(np.float64)

    def product(a: NDArray[Any], b: NDArray[Any]) -> float:
        return float((a * b.astype(np.float64)).sum())

    case = FROM_CONV["conv_fwd"](name, conv)
    forward = expected("conv_fwd", {"input": x, "weight": w}, case.params)["output"]
    assert not isinstance(forward, np.ndarray)
    # Each of the three rounds every term at most n times in total.
    terms = int(forward.terms.max()) + conv.n * int(np.prod(conv.output_size))
    scale = float((forward.magnitude * np.abs(dy.astype(np.float64))).sum())
    allowed = 2 * (terms + 2) * U[dtype] * scale
    by_output = product(answer("conv_fwd", "output"), dy)
    assert abs(by_output - product(answer("conv_bwd_data", "grad_input"), x)) <= allowed
    assert abs(by_output - product(answer("grouped_conv_bwd_weight", "grad_weight"), w)) <= allowed
