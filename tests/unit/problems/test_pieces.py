"""A problem computed whole and in pieces gives the definition's answer, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from convgrad.contract import OPERATIONS, validate
from convgrad.dtypes import DType
from convgrad_service.problems import Problem, problem_from, run_in_pieces
from tests.support.numerics import problem_loops, strategies
from tests.support.numerics.arrays import (
    LAYOUTS,
    canonical,
    draw,
    integers,
    request_arrays,
    rng_for,
)
from tests.support.numerics.cases import BACKPROP_FORMATS, EPILOGUES, FUSED, Case, maxpool_fwd
from tests.support.numerics.geometries import CONVS
from tests.support.numerics.oracle import expected
from tests.support.numerics.reference import Reference

FLOAT64 = np.dtype(np.float64)
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def problem_of(
    case: Case, tensors: dict[str, NDArray[Any]], layout: str | None = None, **more: Any
) -> tuple[Problem, dict[str, NDArray[Any]]]:
    """The problem and the request's arrays of a case."""
    params = {**case.params, **more} | ({} if layout is None else {"layout": layout})
    arrays = request_arrays(case, tensors, layout)
    request = validate(OPERATIONS[case.operation].request, {**arrays, **params})
    return problem_from(case.operation, request), request.tensors()


def check(case: Case, layout: str | None, parts: int, seed: int = 0) -> None:
    tensors = draw(case, rng_for(seed, case.id), FLOAT64, integers)
    problem, arrays = problem_of(case, tensors, layout)
    answer = expected(case.operation, tensors, case.params)
    found = run_in_pieces(problem, arrays, parts, problem_loops.run)
    if isinstance(answer.get("indices"), np.ndarray) and "indices" not in problem.outputs:
        del answer["indices"]
    assert list(found) == list(problem.outputs)
    assert set(found) == set(answer)
    for name, array in found.items():
        wanted = answer[name]
        exact = wanted.value if isinstance(wanted, Reference) else wanted
        plain = canonical(case.operation, name, array, layout, case.groups)
        if "silu" in str(case.params):
            np.testing.assert_allclose(plain, exact, rtol=1e-12, atol=1e-12)
        else:
            np.testing.assert_array_equal(plain, exact, err_msg=name)


@given(strategies.conv_cases(), st.integers(1, 9), st.data())
@QUICK
def test_convolutions_in_any_layout_and_number_of_pieces(
    case: Case, parts: int, data: st.DataObject
) -> None:
    named = [] if case.operation == "conv3d_backprop_input" else LAYOUTS[case.ndim]
    check(case, data.draw(st.sampled_from([None, *named])), parts)


@given(strategies.pool_cases(), st.integers(1, 9), st.booleans())
@QUICK
def test_poolings_in_any_layout_and_number_of_pieces(
    case: Case, parts: int, channels_last: bool
) -> None:
    check(case, LAYOUTS[case.ndim][channels_last], parts)


@given(strategies.pools(), st.integers(1, 9), st.sampled_from(["int32", "int64"]))
@QUICK
def test_pool_gradients_from_indices_in_pieces(pool: Any, parts: int, index_dtype: str) -> None:
    forward = maxpool_fwd("random", pool)
    tensors = draw(forward, rng_for(0, forward.id), FLOAT64, integers)
    problem, arrays = problem_of(forward, tensors, index_dtype=index_dtype)
    indices = run_in_pieces(problem, arrays, parts, problem_loops.run)["indices"]
    assert indices.dtype == index_dtype
    operation = forward.operation.replace("fwd", "bwd")
    grad_output = integers(rng_for(1), indices.shape, FLOAT64)
    params = {**pool.params, "input_size": pool.size}
    backward = Case("indices", operation, {}, params)
    tensors = {"grad_output": grad_output, "indices": indices}
    problem, arrays = problem_of(backward, tensors)
    found = run_in_pieces(problem, arrays, parts, problem_loops.run)["grad_input"]
    wanted = expected(operation, tensors, params)["grad_input"]
    assert isinstance(wanted, Reference)
    np.testing.assert_array_equal(found, wanted.value)


@pytest.mark.parametrize("parts", [1, 2, 7])
@pytest.mark.parametrize("case", FUSED, ids=lambda case: case.name)
def test_fused_forward_in_pieces(case: Case, parts: int) -> None:
    check(case, LAYOUTS[case.ndim][parts % 2], parts)


@pytest.mark.parametrize("parts", [1, 5])
@pytest.mark.parametrize("case", EPILOGUES, ids=lambda case: case.id)
def test_epilogues_in_pieces(case: Case, parts: int) -> None:
    check(case, None, parts)


@pytest.mark.parametrize("formats", BACKPROP_FORMATS, ids="-".join)
@pytest.mark.parametrize("name", [name for name, conv in CONVS.items() if conv.ndim == 3])
def test_backprop_input_in_every_format(name: str, formats: tuple[str, str, str]) -> None:
    """A region of it too, in pieces; the padded channels of grad_output hold rubbish."""
    from convgrad_service.problems.formats3d import ACTIVATION_FORMATS, WEIGHT_FORMATS

    conv = CONVS[name]
    (depth, height, _), rng = conv.size, rng_for(3, name)
    region = {"d": (depth // 3, depth), "h": (0, max(1, height // 2))}
    dy = integers(rng, conv.output_shape, np.dtype(np.float32))
    w = integers(rng, conv.weight_shape, np.dtype(np.float32))
    dy_format, w_format = ACTIVATION_FORMATS[formats[0]], WEIGHT_FORMATS[formats[1]]
    dtype = DType.FLOAT32
    packed_dy = np.empty(dy_format.shape(dtype, conv.n, conv.k, conv.output_size), np.float32)
    dy_format.pack(dy, packed_dy)
    if formats[0] == "NDC1HWC0" and conv.k % 8:
        packed_dy[:, :, -1, :, :, conv.k % 8 :] = np.nan
    packed_w = np.empty(w_format.shape(dtype, conv.groups, conv.weight_shape), np.float32)
    w_format.pack(w, conv.groups, packed_w)
    params = {
        **conv.params,
        "input_size": conv.size,
        "weight_size": conv.weight_shape,
        "region": region,
        "grad_output_format": formats[0],
        "weight_format": formats[1],
        "output_format": formats[2],
    }
    request = validate(
        OPERATIONS["conv3d_backprop_input"].request,
        {"grad_output": packed_dy, "weight": packed_w, **params},
    )
    problem = problem_from("conv3d_backprop_input", request)
    answer = expected("conv3d_backprop_input", {"grad_output": dy, "weight": w}, params)
    wanted = answer["grad_input"]
    assert isinstance(wanted, Reference)
    for parts in (1, 4):
        found = run_in_pieces(problem, request.tensors(), parts, problem_loops.run)["grad_input"]
        plain = ACTIVATION_FORMATS[formats[2]].unpack(found, conv.c)
        np.testing.assert_array_equal(plain, wanted.value)
        if formats[2] == "NDC1HWC0" and conv.c % 8:
            assert not found[:, :, -1, :, :, conv.c % 8 :].any()
