"""`convgrad.check`: planted errors are found and named, and what is right passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from convgrad import check
from convgrad.check.bounds import allowed_error, rounded
from convgrad.contract.verification import Verification
from convgrad.errors import ConvgradError, InvalidProblem, MalformedRequest
from tests.support.numerics import reference, reference_pool

Array = NDArray[Any]
GEOMETRY = {"padding": 1, "groups": 2}
SIZE = (14, 14)
W = (64, 16, 3, 3)


def tensors(dtype: str = "float32", distribution: str = "normal") -> tuple[Array, Array]:
    return (
        check.draw("grad_output", (2, 64, *SIZE), dtype, 1, distribution),
        check.draw("weight", W, dtype, 1, distribution),
    )


def right(dy: Array, w: Array, dtype: Any = np.float32) -> Array:
    """grad_input as a careful kernel computes it."""
    value = reference.conv_bwd_data(dy, w, SIZE, **GEOMETRY).value
    return rounded(value, np.dtype(dtype)).astype(dtype)


def verified(result: Array, dy: Array, w: Array, **more: Any) -> Verification:
    return check.bounded("conv_bwd_data", result, grad_output=dy, weight=w, **GEOMETRY, **more)


def codes(found: Verification) -> list[str]:
    return [finding.code for finding in found.findings]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("distribution", ["normal", "uniform", "integers"])
def test_a_right_result_passes(dtype: str, distribution: str) -> None:
    dy, w = tensors(dtype, distribution)
    found = verified(right(dy, w, dy.dtype), dy, w)
    assert found.passed, found.findings
    output = found.outputs["grad_input"]
    assert output.exact.applies == (distribution == "integers")
    assert sum(output.shares.counts) == output.elements == 2 * 32 * 14 * 14
    assert output.ulps is not None
    assert sum(output.ulps.histogram.counts) == output.elements
    if dtype != "float64":  # there the reference rounds as well
        assert output.ulps.max <= 1
    adjoint = found.adjointness["grad_input"]
    assert adjoint.applies
    assert adjoint.passed


def test_one_element_off_by_twice_its_bound_is_found_and_named() -> None:
    dy, w = tensors()
    good = right(dy, w)
    bounds = verified(good, dy, w).outputs["grad_input"]
    assert bounds.worst is not None
    at = bounds.worst.index
    off = good.copy()
    off[at] += np.float32(2.1 * bounds.worst.bound)
    found = verified(off, dy, w)
    assert codes(found) == ["single-element"]
    output = found.outputs["grad_input"]
    assert output.exceeding == 1
    assert output.worst is not None
    assert output.worst.index == at
    assert 1.9 < output.worst.share < 2.3
    assert output.heat_map is not None
    assert max(max(row) for row in output.heat_map.values) == pytest.approx(
        output.worst.share, rel=1e-3
    )


def without_tap(dy: Array, w: Array) -> Array:
    w = w.copy()
    w[:, :, 0, 2] = 0
    return right(dy, w)


def without_row(dy: Array, w: Array) -> Array:
    w = w.copy()
    w[:, :, 2] = 0
    return right(dy, w)


def without_last_channel(dy: Array, w: Array) -> Array:
    w = w.copy()
    w[31] = w[63] = 0
    return right(dy, w)


def twice_a_tap(dy: Array, w: Array) -> Array:
    w = w.copy()
    w[:, :, 1, 1] *= 2
    return right(dy, w)


def swapped_groups(dy: Array, w: Array) -> Array:
    good = right(dy, w)
    return np.concatenate([good[:, 16:], good[:, :16]], axis=1)


def swapped_channels(dy: Array, w: Array) -> Array:
    good = right(dy, w)
    good[:, [3, 4]] = good[:, [4, 3]]
    return good


def flipped(dy: Array, w: Array) -> Array:
    return right(dy, w[:, :, ::-1, ::-1])


def halved(dy: Array, w: Array) -> Array:
    return right(dy, w) / 2


def last_row_missing(dy: Array, w: Array) -> Array:
    good = right(dy, w)
    good[:, :, -1] = 0
    return good


def in_tf32(dy: Array, w: Array) -> Array:
    def cut(array: Array) -> Array:
        bits = array.view(np.uint32).astype(np.uint64) + 0x1000
        return (bits & 0xFFFFE000).astype(np.uint32).view(np.float32)

    return right(cut(dy), cut(w))


@pytest.mark.parametrize(
    ("plant", "code", "words"),
    [
        (without_tap, "dropped-terms", "tap (0, 2) is missing from the sum"),
        (without_row, "dropped-terms", "row 2 of the kernel is missing from the sum"),
        (without_last_channel, "dropped-terms", "channel 31 is missing"),
        (twice_a_tap, "repeated-terms", "tap (1, 1) is in the sum twice"),
        (swapped_groups, "permuted-channels", "groups 0 and 1 are swapped"),
        (swapped_channels, "permuted-channels", "channels 3 and 4 are swapped"),
        (flipped, "flipped-kernel", "a kernel turned round"),
        (halved, "scaled", "times 0.5"),
        (last_row_missing, "zeros", "in row 13"),
        (in_tf32, "low-precision", "rounded to TF32 would explain"),
    ],
)
def test_a_planted_error_is_found_and_named(
    plant: Callable[[Array, Array], Array], code: str, words: str
) -> None:
    dy, w = tensors()
    found = verified(plant(dy, w), dy, w)
    assert not found.passed
    assert codes(found) == [code], found.findings
    assert words in found.findings[0].sentence


@pytest.mark.parametrize("times", [0, 2])
def test_a_bias_that_is_not_added_once_is_named(times: int) -> None:
    x, w = tensors()
    bias = check.draw("bias", (32,), "float32", 1)
    good = right(x, w).astype(np.float64)
    result = (good + times * bias.reshape(-1, 1, 1)).astype(np.float32)
    arguments = {"input": x, "weight": w, "bias": bias, **GEOMETRY}
    found = check.bounded("conv_transpose_fwd", result, **arguments)
    assert codes(found) == ["repeated-terms" if times else "dropped-terms"]
    assert "the bias or the accumulated tensor is" in found.findings[0].sentence


def test_coarse_arithmetic_near_the_bound_is_not_called_scaled() -> None:
    """As cuDNN's TF32 is, on sums of 576 terms: found where it first ran on a GPU."""
    dy, w = tensors()
    wanted = reference.conv_bwd_data(dy, w, SIZE, **GEOMETRY)
    rng = np.random.default_rng(1)
    signs = rng.choice([-1.0, 1.0], wanted.value.shape)
    errors = signs * rng.uniform(1.1, 1.8, signs.shape)
    off = wanted.value + errors * allowed_error(wanted, np.dtype(np.float32))
    found = verified(off.astype(np.float32), dy, w)
    assert codes(found) == ["low-precision"]


def test_tf32_passes_where_it_is_said() -> None:
    dy, w = tensors()
    assert verified(in_tf32(dy, w), dy, w, factors="tf32").passed


def test_a_dropped_term_of_integers_is_not_exact() -> None:
    """In bfloat16 a dropped term is within the bound, and the exact gate sees it."""
    x = check.draw("input", (8, 4, 32, 32), "float32", 1, "integers")
    dy = check.draw("grad_output", (8, 4, 32, 32), "float32", 1, "integers")
    good = reference.conv_bwd_weight(x, dy, (1, 1)).value.astype(np.float32)
    wrong = good.copy()
    wrong[2, 1] += 1
    found = check.bounded(
        "grouped_conv_bwd_weight",
        wrong,
        input=x,
        grad_output=dy,
        weight_size=(1, 1),
        sums="tensor_core",
        factors="bfloat16",
    )
    assert codes(found) == ["not-exact"], found.findings
    exact = found.outputs["grad_weight"].exact
    assert exact.differing == 1
    assert exact.first is not None
    assert exact.first.index == (2, 1, 0, 0)


def test_nan_for_an_infinity_is_found_and_named() -> None:
    dy, w = tensors()
    dy[0, 0, 7, 7] = np.inf
    w[0, 0] = np.abs(w[0, 0])
    good = right(dy, w)
    assert verified(good, dy, w).passed
    at = tuple(np.argwhere(np.isinf(good))[0])
    good[at] = np.nan
    found = verified(good, dy, w)
    assert codes(found) == ["non-finite"]
    assert "NaN where" in found.findings[0].sentence
    output = found.outputs["grad_input"].non_finite
    assert output.mismatches == 1
    assert output.expected == output.found > 1
    assert output.first is not None
    assert output.first.index == at


def test_overflow_of_float16_is_right() -> None:
    dy, w = tensors("float16")
    big = (dy * np.float16(100)), (w * np.float16(100))
    good = right(*big, np.float16)
    assert np.isinf(good).any()
    assert verified(good, *big).passed


def test_a_second_run_with_other_bits_is_named() -> None:
    dy, w = tensors()
    good = right(dy, w)
    other = good.copy()
    other[1, 2, 3, 4] = np.nextafter(other[1, 2, 3, 4], np.float32(1e9))
    assert verified(good, dy, w, second=good.copy()).passed
    found = verified(good, dy, w, second=other)
    assert codes(found) == ["nondeterministic"]
    assert found.outputs["grad_input"].bits.differing_from_second == 1


def test_what_does_not_double_is_not_linear() -> None:
    dy, w = tensors()
    good = right(dy, w)
    assert verified(good, dy, w, doubled=2 * good).passed
    assert codes(verified(good, dy, w, doubled=good)) == ["not-linear"]


@pytest.mark.parametrize(
    ("linear", "sentence"),
    [
        ({"input_size": (1, 1)}, "is not linear in input_size; it is in grad_output, weight"),
        ({"weight": ({}, 1)}, "are needed together"),
        ({"weight": (1, 1)}, "addend_weight_grad_input has shape"),
    ],
)
def test_results_that_show_no_linearity_are_refused(linear: Any, sentence: str) -> None:
    dy, w = tensors()
    with pytest.raises(ConvgradError, match=sentence):
        verified(right(dy, w), dy, w, linear=linear)


def test_pooling_and_its_indices() -> None:
    x = check.draw("input", (2, 3, 9, 9), "float32", 4, "integers")
    geometry = {"kernel_size": 3, "stride": 2, "padding": 1}
    output, indices = reference_pool.maxpool_fwd(x, **geometry)
    arguments = {"input": x, **geometry, "return_indices": True}
    both = {"output": output.astype(np.float32), "indices": indices}
    assert check.bounded("maxpool2d_fwd", both, **arguments).passed
    both["indices"] = indices.copy()
    both["indices"][1, 2, 3, 1] += 1
    found = check.bounded("maxpool2d_fwd", both, **arguments)
    assert codes(found) == ["wrong-values"]
    assert found.findings[0].output == "indices"
    dy = check.draw("grad_output", output.shape, "float32", 4)
    grad = reference_pool.maxpool_bwd(dy, indices, x.shape[2:]).value.astype(np.float32)
    assert check.bounded("maxpool2d_bwd", grad, grad_output=dy, input=x, **geometry).passed


def test_the_worst_element_is_told_in_the_layout_that_was_sent() -> None:
    dy, w = tensors()
    wrong = right(dy, w)
    wrong[1, 17, 4, 9] += 1
    last = (np.ascontiguousarray(np.moveaxis(each, 1, -1)) for each in (wrong, dy, w))
    result, dy_last, w_last = last
    found = check.bounded(
        "conv_bwd_data", result, grad_output=dy_last, weight=w_last, layout="NHWC", **GEOMETRY
    )
    assert found.outputs["grad_input"].worst is not None
    assert found.outputs["grad_input"].worst.index == (1, 4, 9, 17)


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ({"operation": "conv_bwd"}, MalformedRequest, "there is no operation"),
        ({"grad_output": None}, MalformedRequest, "needs grad_output"),
        ({"result": np.zeros((2, 32, 14, 13), np.float32)}, InvalidProblem, "has shape"),
        ({"result": {"grad_weight": np.zeros(3)}}, InvalidProblem, "is not computed"),
        ({"strides": 2}, MalformedRequest, "has no argument 'strides'"),
    ],
)
def test_what_cannot_be_verified_is_said(
    arguments: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    dy, w = tensors()
    given = {"operation": "conv_bwd_data", "result": right(dy, w), "grad_output": dy, "weight": w}
    with pytest.raises(error, match=sentence):
        check.bounded(**{**GEOMETRY, **given, **arguments})


def test_the_report_says_it_to_people() -> None:
    dy, w = tensors()
    text = check.report(verified(without_tap(dy, w), dy, w))
    assert "FAILED" in text.splitlines()[0]
    assert "tap (0, 2) is missing" in text
    assert "PASSED" in check.report(verified(right(dy, w), dy, w))
