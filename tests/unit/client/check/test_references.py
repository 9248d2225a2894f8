"""`convgrad.check` against the plain reference of the tests: values, magnitudes, terms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from convgrad.check.convolve import NumpyConvolver
from convgrad.check.operations import targets
from convgrad.check.references import Target
from convgrad.demo import reference as demo
from tests.support.numerics import arrays, cases, oracle, window_cases
from tests.support.numerics.bounds import rounded
from tests.support.numerics.reference import Reference

CONVOLUTIONS = (*cases.FROM_CONV, *cases.FROM_PASSES, *cases.FROM_CONV3D)
CASES = [
    *(case for each in CONVOLUTIONS for case in cases.conv_cases(each)),
    *(
        case
        for n in "123"
        for way in ("fwd", "bwd")
        for case in cases.pool_cases(f"maxpool{n}d_{way}")
    ),
    *(case for name in window_cases.OPERATIONS for case in window_cases.window_cases(name)),
    *window_cases.UNEVEN,
    *cases.EPILOGUES,
    *cases.FUSED,
]


def whole(target: Target) -> Reference:
    """All parts of a target as one reference."""
    parts = [target.part(span) for span in target.spans]
    joined = [
        np.concatenate([np.broadcast_to(getattr(part, name), part.value.shape) for part in parts])
        for name in ("value", "magnitude", "terms", "slack")
    ]
    return Reference(*joined)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_references_are_those_of_the_plain_loops(
    case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("convgrad.check.references.PART_ELEMENTS", 400)
    dtype = arrays.DTYPES["float32"]
    numbers = arrays.draw(case, arrays.rng_for(1, case.id), dtype, arrays.normals)
    params = {**case.params}
    expected = oracle.expected(case.operation, numbers, params)
    found = targets(case.operation, numbers, params, NumpyConvolver())
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        target = found[name]
        reference = whole(target)
        assert reference.value.shape == target.shape
        if not isinstance(wanted, Reference):
            assert target.is_integer
            np.testing.assert_array_equal(reference.value.reshape(wanted.shape), wanted)
            continue
        value = reference.value.reshape(wanted.value.shape)
        np.testing.assert_allclose(value, wanted.value, rtol=1e-12, atol=1e-10)
        close = reference.magnitude.reshape(wanted.value.shape)
        np.testing.assert_allclose(close, wanted.magnitude, rtol=1e-12, atol=1e-10)
        np.testing.assert_array_equal(reference.terms.reshape(value.shape), wanted.terms)
        slack = np.broadcast_to(reference.slack, reference.value.shape).reshape(value.shape)
        np.testing.assert_allclose(slack, np.broadcast_to(wanted.slack, value.shape), rtol=1e-9)
        assert np.isfinite(rounded(value, dtype)).all()


@pytest.mark.parametrize("layout", ["NHWC", "NGCHW", "NHWGC", "GNHWC"])
@pytest.mark.parametrize("operation", ["conv_fwd", "conv_bwd_data", "grouped_conv_bwd_weight"])
def test_elements_are_seen_and_named_in_every_layout(operation: str, layout: str) -> None:
    (case,) = (each for each in cases.conv_cases(operation) if each.name == "groups_4")
    numbers = arrays.draw(case, arrays.rng_for(2, layout), np.dtype(np.float32), arrays.integers)
    expected = oracle.expected(operation, numbers, case.params)
    given = arrays.request_arrays(case, numbers, layout)
    params = {**case.params, "layout": layout}
    for name, target in targets(operation, given, params, NumpyConvolver()).items():
        wanted = expected[name]
        assert isinstance(wanted, Reference)
        sent = arrays.laid_out(operation, name, wanted.value, layout, case.groups)
        seen = target.see(sent)
        np.testing.assert_array_equal(seen.array, whole(target).value)
        for flat in (0, 7, seen.array.size - 1):
            place = np.unravel_index(flat, seen.array.shape)
            assert sent[seen.index([int(i) for i in place])] == seen.array[place]


@pytest.mark.parametrize("formats", cases.BACKPROP_FORMATS)
def test_packed_formats_are_unpacked(formats: tuple[str, str, str]) -> None:
    of_grad, of_weight, of_output = formats
    (case,) = (
        each for each in cases.conv_cases("conv3d_backprop_input") if each.name == "3d_groups_2"
    )
    numbers = arrays.draw(case, arrays.rng_for(3), np.dtype(np.float32), arrays.integers)
    (wanted,) = oracle.expected(case.operation, numbers, case.params).values()
    assert isinstance(wanted, Reference)
    groups = case.groups
    packed = {
        "NCDHW": lambda array: array,
        "NDHWC": lambda array: np.moveaxis(array, 1, -1),
        "NDC1HWC0": lambda array: demo.ndc1hwc0(array, 8),
        "FRACTAL_Z_3D": lambda array: np.concatenate(
            [demo.fractal_z_3d(part, 8) for part in np.split(array, groups)]
        ),
    }
    given = {
        "grad_output": packed[of_grad](numbers["grad_output"]),
        "weight": packed[of_weight](numbers["weight"]),
    }
    params = {
        **case.params,
        "grad_output_format": of_grad,
        "weight_format": of_weight,
        "output_format": of_output,
        "weight_size": numbers["weight"].shape,
    }
    (target,) = targets(case.operation, given, params, NumpyConvolver()).values()
    sent = packed[of_output](wanted.value)
    seen = target.see(sent)
    np.testing.assert_array_equal(seen.array, whole(target).value)
    for flat in (0, 11, seen.array.size - 1):
        place = np.unravel_index(flat, seen.array.shape)
        assert sent[seen.index([int(i) for i in place])] == seen.array[place]
