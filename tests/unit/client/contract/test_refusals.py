"""Every request that cannot be read is refused in one short sentence that names the field."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convgrad.contract import OPERATIONS, validate
from convgrad.contract.examinations import TIMINGS
from convgrad.errors import MalformedRequest

TENSOR = np.ones((1, 1, 2, 2), np.float32)
PAIR = {"grad_output": TENSOR, "weight": TENSOR}
FUSED = {"input": TENSOR, "weight0": TENSOR, "weight1": TENSOR}
THREE = {"grad_output": TENSOR, "input": TENSOR, "weight": TENSOR}
POOL = {"grad_output": TENSOR, "input": TENSOR}

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "conv_bwd_data",
        {"grad_output": TENSOR},
        'missing field "weight"; conv_bwd_data needs grad_output, weight',
    ),
    (
        "conv_bwd_data",
        PAIR | {"strid": 2},
        'unknown field "strid", did you mean "stride"?; conv_bwd_data takes grad_output, weight',
    ),
    ("conv_bwd_data", PAIR | {"\ud800\n": 1}, r'unknown field "\ud800\n"; conv_bwd_data takes'),
    ("conv_bwd_data", PAIR | {"stride": "2"}, 'stride: expected an int or a list of ints, got "2"'),
    ("conv_bwd_data", PAIR | {"stride": True}, "stride: expected an int or a list of ints, got tr"),
    ("conv_bwd_data", PAIR | {"stride": 2.0}, "stride: expected an int or a list of ints, got 2.0"),
    ("conv_bwd_data", PAIR | {"stride": None}, "stride: expected an int or a list of ints, got nu"),
    ("conv_bwd_data", PAIR | {"stride": [1, None]}, "ints, got [1, null]"),
    ("conv_bwd_data", PAIR | {"stride": [[1]]}, "ints, got [[…]]"),
    ("conv_bwd_data", PAIR | {"stride": [1] * 9}, "ints, got a list of 9 items"),
    ("conv_bwd_data", PAIR | {"stride": 10**100}, "ints, got an int of 333 bits"),
    ("conv_bwd_data", PAIR | {"stride": float("nan")}, "ints, got nan"),
    ("conv_bwd_data", PAIR | {"groups": [1]}, "groups: expected an int, got [1]"),
    ("conv_bwd_data", PAIR | {"input_size": 5}, "input_size: expected a list of ints, at most 8"),
    ("conv_bwd_data", PAIR | {"padding": [[1, 2, 3]]}, "padding: expected an int or a list of int"),
    ("conv_bwd_data", PAIR | {"padding": {"a": 1}}, "pairs of ints, got an object"),
    ("conv_bwd_data", PAIR | {"alpha": float("inf")}, "alpha: expected a finite number, got inf"),
    ("conv_bwd_data", PAIR | {"alpha": False}, "alpha: expected a finite number, got false"),
    ("conv_bwd_data", PAIR | {"alpha": 10**400}, "alpha: expected a finite number, got an int of"),
    ("conv_bwd_data", PAIR | {"beta": "1"}, 'beta: expected a finite number, got "1"'),
    ("conv_bwd_data", PAIR | {"layout": 3}, "layout: expected the name of a layout such as"),
    ("conv_bwd_data", PAIR | {"layout": "N" * 99}, "layout: expected the name of a layout such"),
    ("conv_bwd_data", PAIR | {"precision": "low"}, 'precision: expected "highest" or "high", got'),
    ("conv_bwd_data", PAIR | {"response": []}, 'response: expected "npy", "data" or "values", got'),
    ("conv_bwd_data", PAIR | {"deterministic": 1}, "deterministic: expected true or false, got 1"),
    ("conv_bwd_data", PAIR | {"weight": [1, 2]}, "weight: expected a tensor (float16, bfloat16, "),
    (
        "conv_bwd_data",
        PAIR | {"weight": TENSOR.astype(np.int8)},
        "got an array of int8 and shape (1, 1, 2, 2)",
    ),
    ("conv_bwd_data", PAIR | {"weight": TENSOR.astype(">f4")}, "got an array of >f4 and shape"),
    ("conv_bwd_data", PAIR | {"weight": TENSOR > 0}, "got an array of bool and shape"),
    ("conv_bwd_data", PAIR | {"weight": TENSOR * 1j}, "got an array of complex64 and shape"),
    ("grouped_conv_bwd_weight", POOL | {"split_k": "all"}, 'split_k: expected "auto" or an int'),
    ("grouped_conv_bwd_weight", POOL | {"weight_dtype": "int8"}, "weight_dtype: expected "),
    ("conv_backward", THREE | {"outputs": []}, "outputs: expected a list of one or more of"),
    ("conv_backward", THREE | {"outputs": ["grad_bias"] * 2}, "each at most once, got"),
    ("conv_backward", THREE | {"outputs": "grad_bias"}, 'each at most once, got "grad_bias"'),
    ("conv_backward", THREE | {"outputs": [["grad_bias"]]}, "each at most once, got [[…]]"),
    ("grouped_conv_conv_fwd", FUSED | {"conv0": 5}, "conv0: expected an object, got 5"),
    ("grouped_conv_conv_fwd", FUSED | {"conv0": None}, "conv0: expected an object, got null"),
    (
        "grouped_conv_conv_fwd",
        FUSED | {"conv1": {"pading": 5}},
        'conv1: unknown field "pading", did you mean "padding"?; this object takes stride',
    ),
    (
        "grouped_conv_conv_fwd",
        FUSED | {"conv1": {"stride": "a"}},
        'conv1.stride: expected an int or a list of ints, got "a"',
    ),
    ("grouped_conv_conv_fwd", FUSED | {"activation0": "gelu"}, "activation0: expected "),
    ("conv3d_backprop_input", PAIR | {"region": {"d": [1]}}, "region.d: expected a list of two"),
    ("conv3d_backprop_input", PAIR | {"layout": "NCDHW"}, 'unknown field "layout"'),
    ("conv3d_backprop_input", PAIR | {"weight_format": "NC"}, "weight_format: expected "),
    (
        "maxpool2d_bwd",
        {"grad_output": TENSOR, "kernel_size": 2},
        'missing field "input" or "indices"; maxpool2d_bwd needs one of them',
    ),
    (
        "maxpool3d_bwd",
        POOL,
        'missing field "kernel_size"; maxpool3d_bwd needs grad_output, kernel_size',
    ),
    ("maxpool2d_fwd", {"input": TENSOR, "kernel_size": 2, "index_dtype": "int8"}, "index_dtype: "),
    ("maxpool2d_fwd", {"input": TENSOR, "kernel_size": 2, "ceil_mode": "no"}, "ceil_mode: expect"),
]


@pytest.mark.parametrize(("operation", "fields", "sentence"), REFUSED)
def test_one_sentence_names_the_field(
    operation: str, fields: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(MalformedRequest) as refused:
        validate(OPERATIONS[operation].request, fields)
    assert sentence in refused.value.detail
    assert len(refused.value.detail) < 500
    assert "\n" not in refused.value.detail
    assert "pydantic" not in refused.value.detail


def test_what_was_sent_is_never_echoed_whole() -> None:
    huge = "x" * 1_000_000
    for fields in (
        PAIR | {huge: 1},
        PAIR | {"stride": huge},
        PAIR | {"layout": huge},
        PAIR | {"precision": huge},
        PAIR | {"stride": [huge]},
        PAIR | {"weight": {"npy": huge}},
        PAIR | {f"field{i}": i for i in range(100_000)},
    ):
        with pytest.raises(MalformedRequest) as refused:
            validate(OPERATIONS["conv_bwd_data"].request, fields)
        assert len(refused.value.detail) < 500


def test_unknown_fields_inside_objects_cost_one_error_not_a_million() -> None:
    many = {f"field{i}": i for i in range(100_000)}
    with pytest.raises(MalformedRequest, match="conv0: unknown field"):
        validate(OPERATIONS["grouped_conv_conv_fwd"].request, FUSED | {"conv0": many})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=50),
    lambda inner: st.lists(inner, max_size=10) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=20,
)


@given(
    operation=st.sampled_from(list(OPERATIONS.values())),
    data=st.data(),
)
def test_any_json_value_is_accepted_or_refused_in_a_sentence(
    operation: Any, data: st.DataObject
) -> None:
    names = st.sampled_from(list(operation.request.model_fields)) | st.text(max_size=12)
    fields = data.draw(st.dictionaries(names, json_values, max_size=6))
    fields |= {name: TENSOR for name in operation.required_tensors if name not in fields}
    try:
        outcome = str(type(validate(operation.request, fields)))
    except MalformedRequest as refused:
        outcome = refused.detail
    assert 0 < len(outcome) < 600


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("budget_s", 0, "budget_s: expected a number above 0, got 0"),
        ("budget_s", 1e9, "budget_s: expected at most 3600, got 1000000000.0"),
        ("standard_error", 0.9, "standard_error: expected at most 0.5, got 0.9"),
        ("layer", "x" * 5000, "layer: expected at most 4096 characters, got "),
    ],
)
def test_a_number_out_of_range_is_refused_with_the_range(field: str, value: Any, said: str) -> None:
    with pytest.raises(MalformedRequest) as refused:
        validate(TIMINGS["conv_bwd_data"].request, {field: value})
    assert str(refused.value).startswith(said)
