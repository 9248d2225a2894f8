"""Models as the protocol describes them, answers as its JSON has them, and the statistics."""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from convgrad.contract import OPERATIONS, Report, validate
from convgrad.errors import MalformedRequest, ProblemTooLarge
from convgrad_service.engine.telemetry.record import Record, RequestMetrics
from convgrad_service.oip.http_json import binary_outputs, encode_answer, refuse_in_json
from convgrad_service.oip.models import (
    model_config,
    model_metadata,
    model_statistics,
    repository_index,
    server_metadata,
)
from convgrad_service.oip.request import InferOutput, InferRequest
from convgrad_service.problems import problem_from

REPORT = Report(backend="cpu", kernel="k", flops=8, bytes=9, compute_s=0.5)


@pytest.mark.parametrize("name", OPERATIONS)
def test_metadata_lists_all_inputs_and_outputs(name: str) -> None:
    metadata = model_metadata(name)
    operation = OPERATIONS[name]
    inputs, outputs = metadata["inputs"], metadata["outputs"]
    names = tuple(tensor["name"] for tensor in inputs)
    assert names[: len(operation.required_tensors)] == operation.required_tensors
    assert set(names) == set(operation.tensors)
    assert tuple(tensor["name"] for tensor in outputs) == operation.outputs
    for tensor in (*inputs, *outputs):
        assert set(tensor["shape"]) == {-1}
        assert tensor["datatype"] == ("INT64" if tensor["name"] == "indices" else "FP32")
        ndim = next((ndim for ndim in (1, 3) if f"{ndim}d" in name), 2)
        ranks = {1} if "bias" in tensor["name"] else {ndim + 2}
        assert len(tensor["shape"]) in ranks


@pytest.mark.parametrize("name", OPERATIONS)
def test_configuration_agrees_with_metadata(name: str) -> None:
    config, metadata = model_config(name), model_metadata(name)
    assert config["max_batch_size"] == 0
    assert config["model_transaction_policy"] == {"decoupled": False}
    for listed, tensors in (("input", metadata["inputs"]), ("output", metadata["outputs"])):
        assert [(item["name"], item["data_type"], item["dims"]) for item in config[listed]] == [
            (tensor["name"], f"TYPE_{tensor['datatype']}", tensor["shape"]) for tensor in tensors
        ]
    required = [item["name"] for item in config["input"] if not item["optional"]]
    assert tuple(required) == OPERATIONS[name].required_tensors
    assert config["parameters"]["dtypes"] == {"string_value": "FP16,BF16,FP32,FP64"}
    layouts = config["parameters"].get("layouts", {"string_value": ""})["string_value"]
    assert tuple(filter(None, layouts.split(","))) == OPERATIONS[name].layouts
    json.dumps(config, allow_nan=False)


def test_configuration_has_what_lists_of_tensors_cannot_say() -> None:
    def said(name: str) -> dict[str, str]:
        parameters = model_config(name)["parameters"]
        return {key: value["string_value"] for key, value in parameters.items()}

    assert said("conv_fwd")["ranks"] == "3,4,5,6"
    assert said("maxpool2d_bwd")["ranks"] == "4"
    assert said("maxpool2d_bwd")["index_dtypes"] == "INT64,INT32"
    assert "index_dtypes" not in said("avg_pool_bwd")
    assert said("conv3d_backprop_input")["weight_formats"] == "NCDHW,NDHWC,FRACTAL_Z_3D"


def test_server_metadata_names_what_is_switched_on() -> None:
    assert "binary_tensor_data" in server_metadata()["extensions"]
    assert "system_shared_memory" not in server_metadata()["extensions"]
    assert "system_shared_memory" in server_metadata(("system_shared_memory",))["extensions"]


def test_repository_index() -> None:
    assert {model["state"] for model in repository_index(None, only_ready=True)} == {"READY"}
    assert repository_index("no device", only_ready=True) == []
    unready = repository_index("no device", only_ready=False)
    assert {(model["state"], model["reason"]) for model in unready} == {
        ("UNAVAILABLE", "no device")
    }
    assert [model["name"] for model in unready] == list(OPERATIONS)


def request(*outputs: InferOutput, operation: str = "conv_backward", binary: bool) -> InferRequest:
    return InferRequest(OPERATIONS[operation], "7", (), outputs, binary_by_default=binary)


OUTPUTS: dict[str, Any] = {
    "grad_input": np.array([[1.5, np.nan], [-np.inf, 0.1]], np.float32),
    "grad_weight": np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3)[:, ::2],
    "grad_bias": np.arange(9000, dtype=np.int64),
}


def test_answers_with_numbers_and_binary_data() -> None:
    wanted = [
        InferOutput("grad_weight", True),
        InferOutput("grad_input", False),
        InferOutput("grad_bias", False),
    ]
    asked = request(*wanted, binary=False)
    binary = binary_outputs(asked, OUTPUTS)
    head = json.loads(encode_answer(asked, OUTPUTS, REPORT))
    assert head["id"] == "7"
    assert (head["model_name"], head["model_version"]) == ("conv_backward", "1")
    assert head["parameters"]["kernel"] == "k"
    weight, grad_input, bias = head["outputs"]
    assert weight["name"] == "grad_weight"
    assert (weight["datatype"], weight["shape"]) == ("BF16", [2, 2])
    assert weight["parameters"] == {"binary_data_size": 8}
    assert b"".join(binary) == OUTPUTS["grad_weight"].tobytes()
    assert grad_input["data"] == [1.5, "NaN", "-Infinity", float(np.float32(0.1))]
    assert bias["data"] == list(range(9000))


def test_answers_without_binary_data_are_json_alone() -> None:
    text = encode_answer(request(binary=False), {"grad_bias": OUTPUTS["grad_bias"]}, REPORT)
    assert json.loads(text)["outputs"][0]["shape"] == [9000]
    empty = encode_answer(request(binary=False), {"grad_bias": np.empty(0, np.int32)}, REPORT)
    assert json.loads(empty)["outputs"][0]["data"] == []


def problem(dtype: Any, size: int) -> Any:
    fields = {
        "input": np.zeros((1, 1, size, size), dtype),
        "kernel_size": 1,
        "return_indices": True,
    }
    operation = OPERATIONS["maxpool2d_fwd"]
    return problem_from(operation.name, validate(operation.request, fields))


def test_what_json_cannot_hold_is_refused_before_it_is_computed() -> None:
    by_default = request(operation="maxpool2d_fwd", binary=False)
    refuse_in_json(by_default, problem(np.float32, 8))
    with pytest.raises(MalformedRequest, match="output output is FP16, which cannot be sent"):
        refuse_in_json(by_default, problem(np.float16, 8))
    with pytest.raises(ProblemTooLarge, match="1,050,625 elements"):
        refuse_in_json(by_default, problem(np.float32, 1025))
    refuse_in_json(request(operation="maxpool2d_fwd", binary=True), problem(np.float16, 1025))
    only = request(InferOutput("indices", False), operation="maxpool2d_fwd", binary=True)
    refuse_in_json(only, problem(np.float16, 8))


def record(code: str) -> Record:
    stages = {"decode": 0.1, "upload": 0.2, "queue": 0.4, "compute": 0.8, "encode": 1.6}
    return Record("conv_fwd", "http", code, 4.0, stages, 10, 20)


def test_statistics_count_as_triton_does() -> None:
    metrics = RequestMetrics()
    for code in ("ok", "ok", "overloaded", "invalid-problem", "cancelled", "malformed-request"):
        metrics.count(record(code))
    models = model_statistics(metrics.statistics(), ["conv_fwd", "conv_bwd_data"])["model_stats"]
    counted, untouched = models
    assert (counted["inference_count"], counted["execution_count"]) == (2, 2)
    stats = counted["inference_stats"]
    # What was refused for what it asked is no inference; what the server failed at is.
    assert stats["success"] == {"count": 2, "ns": 8_000_000_000}
    assert stats["fail"] == {"count": 2, "ns": 8_000_000_000}
    assert stats["queue"] == {"count": 2, "ns": 800_000_000}
    assert stats["compute_input"] == {"count": 2, "ns": 600_000_000}
    assert stats["compute_infer"] == {"count": 2, "ns": 1_600_000_000}
    assert stats["compute_output"] == {"count": 2, "ns": 3_200_000_000}
    assert counted["last_inference"] > 1.7e12
    (batch,) = counted["batch_stats"]
    assert batch["batch_size"] == 1
    assert batch["compute_infer"] == stats["compute_infer"]
    assert untouched["inference_count"] == untouched["last_inference"] == 0
    assert untouched["batch_stats"] == []
