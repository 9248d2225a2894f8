"""The registry says what the models say, and what a request accepts comes out as it went in."""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from convgrad.contract import OPERATIONS, Operation, Report, validate
from convgrad.dtypes import FLOATING
from convgrad.errors import MalformedRequest
from convgrad.wire.json_tensors import decode_tensor

DESIGN_ORDER = [
    "conv_bwd_data",
    "grouped_conv_bwd_weight",
    "maxpool2d_bwd",
    "maxpool3d_bwd",
    "conv3d_backprop_input",
    "grouped_conv_conv_fwd",
    "conv3d_transpose",
    "conv_fwd",
    "maxpool2d_fwd",
    "maxpool3d_fwd",
    "conv_backward",
]

operations = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=list(OPERATIONS))


def decoded(operation: Operation) -> dict[str, Any]:
    """The fields of an operation's example, tensors as arrays."""
    return {
        name: decode_tensor(value, name=name) if name in operation.tensors else value
        for name, value in operation.example.items()
    }


def test_the_operations_of_the_design_are_there_in_its_order_before_those_added_since() -> None:
    assert list(OPERATIONS)[: len(DESIGN_ORDER)] == DESIGN_ORDER
    assert all(operation.name == name for name, operation in OPERATIONS.items())


@operations
def test_the_registry_agrees_with_the_model(operation: Operation) -> None:
    assert set(operation.required_tensors) <= set(operation.tensors)
    assert set(operation.tensors) <= set(operation.request.model_fields)
    assert operation.summary.endswith(".")
    assert operation.dtypes == FLOATING
    assert ("layout" in operation.request.model_fields) == bool(operation.layouts)


@operations
def test_the_example_is_a_valid_request(operation: Operation) -> None:
    fields = decoded(operation)
    request = validate(operation.request, fields)
    assert set(operation.required_tensors) <= set(request.tensors())
    assert json.loads(json.dumps(operation.example)) == operation.example


@operations
def test_the_schema_describes_every_field_for_a_reader(operation: Operation) -> None:
    schema = operation.request.model_json_schema()
    assert schema["additionalProperties"] is False
    assert set(schema["required"]) >= set(operation.required_tensors)
    for name, field in schema["properties"].items():
        assert field["description"], name
    for name in operation.required_tensors:
        forms = [form["title"] for form in schema["properties"][name]["oneOf"]]
        assert forms == ["npy", "data", "values", "stored"]
        assert all(form["description"] for form in schema["properties"][name]["oneOf"])


@operations
def test_tensors_and_parameters_make_the_same_request_again(operation: Operation) -> None:
    request = validate(operation.request, decoded(operation))
    parameters = json.loads(json.dumps(request.parameters()))
    again = validate(operation.request, {**request.tensors(), **parameters})
    assert again.parameters() == request.parameters()
    assert again.tensors().keys() == request.tensors().keys()


def test_sequences_become_tuples_and_numpy_ints_plain_ones() -> None:
    tensor = np.ones((1, 1, 2, 2), ml_dtypes.bfloat16)
    request = validate(
        OPERATIONS["conv_bwd_data"].request,
        {
            "grad_output": tensor,
            "weight": tensor,
            "stride": [np.int64(2), 1],
            "dilation": np.array([1, 2]),
            "padding": [[0, 1], 2],
            "input_size": (3, 4),
            "alpha": np.float32(0.5),
        },
    )
    values = {name: getattr(request, name) for name in ("stride", "dilation", "padding")}
    assert values == {"stride": (2, 1), "dilation": (1, 2), "padding": ((0, 1), 2)}
    assert type(request.model_dump()["stride"][0]) is int
    assert request.model_dump()["input_size"] == (3, 4)
    assert request.parameters() == {
        "stride": [2, 1],
        "dilation": [1, 2],
        "padding": [[0, 1], 2],
        "input_size": [3, 4],
        "alpha": 0.5,
    }
    assert request.tensors()["weight"] is tensor


def test_numpy_bools_become_plain_ones() -> None:
    request = validate(
        OPERATIONS["maxpool2d_fwd"].request,
        {"input": np.ones((1, 1, 2, 2)), "kernel_size": 2, "ceil_mode": np.bool_(True)},
    )
    assert request.parameters()["ceil_mode"] is True
    with pytest.raises(MalformedRequest, match="ceil_mode: expected true or false, got 1"):
        validate(
            OPERATIONS["maxpool2d_fwd"].request,
            {"input": np.ones((1, 1, 2, 2)), "kernel_size": 2, "ceil_mode": np.int64(1)},
        )


def test_geometry_is_left_to_the_problem_to_judge() -> None:
    tensor = np.ones((1, 1, 0), np.float32)
    for stride in (0, -3, 10**30, [], [1, 2, 3, 4, 5]):
        validate(
            OPERATIONS["conv_bwd_data"].request,
            {"grad_output": tensor, "weight": tensor, "stride": stride},
        )


def test_a_request_is_frozen_hashable_and_equal_to_itself_alone() -> None:
    tensor = np.ones((1, 1, 2, 2), np.float32)
    model = OPERATIONS["conv_bwd_data"].request
    first, second = (validate(model, {"grad_output": tensor, "weight": tensor}) for _ in range(2))
    assert len({first, second, first}) == 2
    assert first != second
    with pytest.raises(ValueError, match="frozen"):
        first.stride = 3  # type: ignore[attr-defined]


def test_defaults_are_pytorchs() -> None:
    tensor = np.ones((1, 1, 2, 2), np.float32)
    pool = validate(OPERATIONS["maxpool2d_fwd"].request, {"input": tensor, "kernel_size": 2})
    assert pool.model_dump(exclude={"input"}) == {
        "deterministic": True,
        "response": "npy",
        "stored": {},
        "store": {},
        "kernel_size": 2,
        "stride": None,
        "padding": 0,
        "dilation": 1,
        "ceil_mode": False,
        "layout": None,
        "return_indices": False,
        "index_dtype": "int64",
    }
    assert pool.parameters() == {"kernel_size": 2}


def test_a_report_of_a_newer_server_is_still_read() -> None:
    report = Report.model_validate(
        {"backend": "cpu", "kernel": "k", "flops": 1, "bytes": 2, "compute_s": 0.1, "new": 3}
    )
    assert (report.pieces, report.workspace_bytes) == (1, 0)
