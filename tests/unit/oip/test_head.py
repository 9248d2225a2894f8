"""An HTTP inference request's JSON: what is read from it, and every refusal with its sentence."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from convgrad.contract import OPERATIONS
from convgrad.errors import MalformedRequest, NotFound
from convgrad_service.engine.shm.registry import RegionPart
from convgrad_service.oip.fields import operation_named, request_fields
from convgrad_service.oip.http_json import read_infer_head
from convgrad_service.oip.request import InferRequest, Span

CONV = OPERATIONS["conv_bwd_data"]
INPUT: dict[str, Any] = {"name": "weight", "shape": [1, 1, 2, 2], "datatype": "FP32"}
BINARY: dict[str, Any] = {**INPUT, "parameters": {"binary_data_size": 16}}
NUMBERS: dict[str, Any] = {**INPUT, "data": [1, 2.5, -3, 4e3]}


def head(data_bytes: int | None = 0, operation: Any = CONV, **fields: Any) -> InferRequest:
    text = json.dumps({"inputs": [NUMBERS], **fields}).encode()
    return read_infer_head(memoryview(text), operation, data_bytes)


def refused(sentence: str, data_bytes: int | None = 0, **fields: Any) -> None:
    with pytest.raises(MalformedRequest, match=sentence):
        head(data_bytes, **fields)


def test_numbers_nested_and_flat() -> None:
    flat = head().inputs[0].source
    nested = head(inputs=[{**INPUT, "data": [[[[1, 2.5], [-3, 4e3]]]]}]).inputs[0].source
    assert isinstance(flat, np.ndarray)
    assert flat.dtype == np.float32
    np.testing.assert_array_equal(flat, np.array([[[[1, 2.5], [-3, 4000]]]], np.float32))
    np.testing.assert_array_equal(flat, nested)


def test_non_finite_numbers_are_strings() -> None:
    array = head(inputs=[{**INPUT, "data": ["NaN", "Infinity", "-Infinity", 0]}]).inputs[0].source
    np.testing.assert_array_equal(
        array, np.array([np.nan, np.inf, -np.inf, 0], np.float32).reshape(1, 1, 2, 2)
    )


def test_binary_data_lie_one_after_another() -> None:
    other = {**BINARY, "name": "grad_output", "shape": [1, 1, 1, 2]}
    other["parameters"] = {"binary_data_size": 8}
    request = head(24, inputs=[BINARY, other])
    assert [tensor.source for tensor in request.inputs] == [Span(0, 16), Span(16, 8)]
    # Of a chunked body the length is not known; that the inputs' bytes come is checked as they do.
    assert head(None, inputs=[BINARY, other]).inputs == request.inputs


@pytest.mark.parametrize("data_bytes", [0, 15, 17])
def test_binary_data_that_do_not_add_up(data_bytes: int) -> None:
    refused("name 16 bytes of binary data", data_bytes, inputs=[BINARY])


def test_shared_memory_regions() -> None:
    region = {"shared_memory_region": "r", "shared_memory_byte_size": 16}
    at_7 = {**region, "shared_memory_offset": 7}
    request = head(
        inputs=[{**INPUT, "parameters": at_7}],
        outputs=[{"name": "grad_input", "parameters": region}],
    )
    assert request.inputs[0].source == RegionPart("", "r", 7, 16)
    assert request.outputs[0].region == RegionPart("", "r", 0, 16)
    size_left_out = {"shared_memory_region": "r"}
    refused("shared_memory_byte_size", inputs=[{**INPUT, "parameters": size_left_out}])


def test_outputs_are_binary_where_asked_for() -> None:
    outputs = [{"name": "grad_weight"}, {"name": "grad_bias", "parameters": {"binary_data": False}}]
    operation = OPERATIONS["grouped_conv_bwd_weight"]
    parameters = {"binary_data_output": True}
    inputs = [{**NUMBERS, "name": "input"}]
    for given, wanted in (({}, [False, False]), (parameters, [True, False])):
        request = head(operation=operation, parameters=given, outputs=outputs, inputs=inputs)
        assert [output.binary for output in request.outputs] == wanted
        assert [request.wants_binary(output["name"]) for output in outputs] == wanted
        assert head(parameters=given).wants_binary("grad_input") is bool(given)


def test_parameters_are_the_operations_and_the_protocols() -> None:
    request = head(
        id="mine",
        model_name="conv_bwd_data",
        parameters={"timeout": 2_500_000, "priority": 1, "sequence_id": 3, "stride": "[2, 1]"},
    )
    assert request.id == "mine"
    assert request.timeout_s == 2.5
    assert request.parameters == {"stride": "[2, 1]"}
    assert head(parameters={"timeout": 0}).timeout_s is None


def test_parameters_of_other_servers_clients_have_no_effect() -> None:
    np_codec = {"content_type": "np"}
    request = head(
        parameters=np_codec,
        inputs=[{**NUMBERS, "parameters": np_codec}],
        outputs=[{"name": "grad_input", "parameters": np_codec}],
    )
    assert (request.parameters, request.outputs[0].binary) == ({}, False)
    refused("content_type: expected a string, got 3", parameters={"content_type": 3})


def test_the_version_is_that_of_the_model() -> None:
    assert head(model_version="1").operation is head(model_version="").operation is CONV
    refused("model_version: expected a string, got 1", model_version=1)
    with pytest.raises(NotFound, match='has no version "9"'):
        head(model_version="9")


def test_a_long_flat_list_is_not_parsed_at_once() -> None:
    rng = np.random.default_rng(5)
    values = rng.standard_normal((3, 5, 50, 60)).astype(np.float32)
    tensor = {"name": "weight", "shape": values.shape, "datatype": "FP32"}
    numbers = [float(value) for value in values.reshape(-1)]
    other = {**NUMBERS, "name": "grad_output"}
    source = head(inputs=[{**tensor, "data": numbers}, other]).inputs[0].source
    assert callable(source)
    target = np.empty(values.shape, np.float32)
    source(target)
    np.testing.assert_array_equal(target, values)
    for wrong in ((3, 5, 50, 61), (3, 5, 50, 59)):
        with pytest.raises(MalformedRequest, match="numbers than the"):
            source(np.empty(wrong, np.float32))
    refused("fewer numbers", inputs=[{**tensor, "shape": [2**40, 2**20], "data": numbers}])


@pytest.mark.parametrize("broken", ["1,", ",1", "1,,2", "1 2", "[1]", "NaN", '"x"', "1}{"])
def test_a_long_list_that_is_no_list_of_numbers(broken: str) -> None:
    long = ",".join(["0.25"] * 40_000)
    for text in (f"{broken},{long}", f"{long},{broken}", f"{long},{broken},{long}"):
        whole = json.dumps({"inputs": [{**INPUT, "data": "@"}]}).replace('"@"', f"[{text}]")
        with pytest.raises(MalformedRequest):  # noqa: PT012 - by one of the two
            request = read_infer_head(memoryview(whole.encode()), CONV, 0)
            source = request.inputs[0].source
            assert callable(source)
            source(np.empty(text.count(",") + 1, np.float32))


def test_long_nested_lists_are_bounded() -> None:
    nested = [[0.25] * 8] * 70_000
    refused("as one flat list", inputs=[{**INPUT, "shape": [70_000, 8], "data": nested}])


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"inputs": None}, "inputs: expected a list of objects, got null"),
        ({"inputs": [3]}, "expected an object, got 3"),
        ({"inputs": [{**NUMBERS, "name": 3}]}, "expected a string, got 3"),
        ({"inputs": [{**NUMBERS, "name": "bias"}]}, "no input .bias.; its inputs are grad_output"),
        ({"inputs": [NUMBERS, NUMBERS]}, "is repeated"),
        ({"inputs": [{**NUMBERS, "datatype": "FP8"}]}, "expected datatype to be one of FP16"),
        ({"inputs": [{**NUMBERS, "datatype": None}]}, "got null"),
        ({"inputs": [{**NUMBERS, "shape": [-1, 4]}]}, "expected ints >= 0 in shape, got -1"),
        ({"inputs": [{**NUMBERS, "shape": [4.0]}]}, "got 4.0"),
        ({"inputs": [{**NUMBERS, "shape": [1, 1, 2, 3]}]}, "data has the shape"),
        ({"inputs": [{**NUMBERS, "data": [[1, 2], [3, 4]]}]}, "data has the shape"),
        ({"inputs": [{**NUMBERS, "data": [[1, 2], [3]]}]}, "ragged"),
        ({"inputs": [{**NUMBERS, "data": 4}]}, "expected data to be a list"),
        ({"inputs": [{**NUMBERS, "data": [1, 2, 3, "4"]}]}, 'got "4"'),
        ({"inputs": [{**NUMBERS, "data": [1, 2, 3, True]}]}, "got true"),
        ({"inputs": [{**NUMBERS, "datatype": "INT32"}]}, "expected ints"),
        ({"inputs": [{**NUMBERS, "datatype": "FP16"}]}, "FP16 cannot be sent as JSON"),
        ({"inputs": [{**NUMBERS, "datatype": "BF16"}]}, "BF16 cannot be sent as JSON"),
        ({"inputs": [INPUT]}, "got none of them"),
        ({"inputs": [{**BINARY, "data": [1, 2, 3, 4]}]}, "got data and binary_data_size"),
        ({"inputs": [{**INPUT, "parameters": {"binary_data_size": 15}}]}, "takes 16 bytes, got 15"),
        ({"inputs": [{**INPUT, "parameters": {"binary_data_size": "16"}}]}, 'got "16"'),
        ({"inputs": [{**INPUT, "parameters": {"binary_data_size": -16}}]}, "got -16"),
        ({"inputs": [{**NUMBERS, "parameters": {"x": 1}}]}, 'unknown field "x"'),
        ({"inputs": [{**NUMBERS, "strides": [1]}]}, 'unknown field "strides"'),
        ({"outputs": [{"name": "weight"}]}, "no output .weight.; its outputs are grad_input"),
        ({"outputs": [{"name": "grad_input"}] * 2}, "is repeated"),
        ({"outputs": [{"name": "grad_input", "data": []}]}, 'unknown field "data"'),
        (
            {"outputs": [{"name": "grad_input", "parameters": {"classification": 3}}]},
            "no classification extension",
        ),
        (
            {"outputs": [{"name": "grad_input", "parameters": {"binary_data": 1}}]},
            "expected binary_data to be a bool, got 1",
        ),
        ({"id": 7}, "id: expected a string, got 7"),
        ({"model_name": "conv_fwd"}, "the path names conv_bwd_data"),
        ({"input": []}, 'unknown field "input"'),
        ({"parameters": []}, "parameters: expected an object"),
        ({"parameters": {"timeout": -1}}, "timeout: expected an int >= 0, in microseconds"),
        ({"parameters": {"timeout": 1.5}}, "got 1.5"),
        ({"parameters": {"priority": "high"}}, "priority: expected an int"),
        ({"parameters": {"sequence_start": 1}}, "sequence_start: expected true or false"),
        ({"parameters": {"binary_data_output": "yes"}}, "expected true or false"),
        ({"parameters": {"triton_x": 1}}, "reserved"),
        ({"parameters": {"triton_enable_empty_final_response": True}}, "for streams"),
    ],
    ids=str,
)
def test_refusals(fields: dict[str, Any], sentence: str) -> None:
    refused(sentence, **fields)


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b'{"id": "a", "id": "b"}', b'{"id": NaN}'])
def test_text_that_is_no_request(text: bytes) -> None:
    with pytest.raises(MalformedRequest):
        read_infer_head(memoryview(text), CONV, 0)


def fields_of(request: InferRequest) -> dict[str, Any]:
    return request_fields(request, lambda tensor: np.zeros(tensor.shape, tensor.dtype.numpy))


def test_fields_hold_lists_and_objects_that_came_as_text() -> None:
    parameters = {"stride": "[2, 2]", "padding": "[[1, 0], 1]", "alpha": 0.5, "layout": "NHWC"}
    found = fields_of(head(parameters=parameters))
    assert found.pop("weight").shape == (1, 1, 2, 2)
    assert found == {"stride": [2, 2], "padding": [[1, 0], 1], "alpha": 0.5, "layout": "NHWC"}


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"stride": [2, 2]}, "a list is written as JSON text"),
        ({"stride": None}, "got null"),
        ({"stride": "[2, 2"}, 'the parameter "stride" is not JSON'),
        ({"weight": 3}, '"weight" is given as a parameter'),
        ({"stride": "[" + "2," * 50_000 + "2]"}, "expected at most 65,536 characters"),
    ],
)
def test_parameters_that_cannot_be_read(parameters: dict[str, Any], sentence: str) -> None:
    with pytest.raises(MalformedRequest, match=sentence):
        fields_of(head(parameters=parameters))


def test_named_outputs_become_what_the_operation_is_asked_for() -> None:
    operation = OPERATIONS["conv_backward"]
    outputs = [{"name": "grad_bias"}, {"name": "grad_input"}]
    found = fields_of(head(operation=operation, outputs=outputs))
    assert found["outputs"] == ["grad_bias", "grad_input"]
    agreeing = {"outputs": '["grad_input", "grad_bias"]'}
    assert fields_of(head(operation=operation, outputs=outputs, parameters=agreeing))
    contradicting = {"outputs": '["grad_weight"]'}
    with pytest.raises(MalformedRequest, match="expected them to agree"):
        fields_of(head(operation=operation, outputs=outputs, parameters=contradicting))


def test_indices_come_when_they_are_named() -> None:
    operation = OPERATIONS["maxpool2d_fwd"]
    inputs = [{**NUMBERS, "name": "input"}]
    both = [{"name": "output"}, {"name": "indices"}]
    assert fields_of(head(operation=operation, inputs=inputs, outputs=both))["return_indices"]
    only = fields_of(head(operation=operation, inputs=inputs, outputs=both[:1]))
    assert "return_indices" not in only


def test_models_and_versions() -> None:
    assert operation_named("conv_fwd") is operation_named("conv_fwd", "1")
    with pytest.raises(NotFound, match='no model "resnet"; the models are conv_bwd_data'):
        operation_named("resnet")
    with pytest.raises(NotFound, match='conv_fwd has no version "2"; it has 1'):
        operation_named("conv_fwd", "2")
