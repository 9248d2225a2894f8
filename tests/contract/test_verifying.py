"""``/verify`` on a real server, as its callers use it."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from convgrad import check, layers
from convgrad.contract import OPERATIONS
from convgrad.contract.examinations import VERIFICATIONS
from convgrad.contract.judged_results import judged_results
from convgrad.contract.verification import Verification
from convgrad.wire import safetensors
from convgrad_service.backends.cpu import CpuBackend
from tests.support.http_server import JSON, SAFETENSORS, LiveServer, serving

LAYER = "mb2ic8ih9oc8oh9kh3ph1"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with serving(CpuBackend(threads=1), log_level="error") as live:
        yield live


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def drawn(operation: str, words: str, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    layer = layers.parse(words)
    shapes, parameters = layers.arguments(operation, layer)
    tensors: dict[str, Any] = {
        name: check.spread_indices(shape, math.prod(layer.input_size))
        if name == "indices"
        else check.draw(name, shape, "float32", **more)
        for name, shape in shapes.items()
    }
    return tensors, parameters


def computed(
    http: httpx.Client, operation: str, tensors: Mapping[str, Any], parameters: Mapping[str, Any]
) -> dict[str, NDArray[Any]]:
    """The server's own result, in memory that may be written."""
    body = encoded(tensors, parameters)
    found = http.post(f"/{operation}", content=body, headers={"content-type": SAFETENSORS})
    assert found.status_code == 200, found.text
    outputs, _ = safetensors.decode(found.content)
    return {name: np.array(array) for name, array in outputs.items()}


def encoded(tensors: Mapping[str, Any], parameters: Mapping[str, Any]) -> bytes:
    chunks = safetensors.encode(dict(tensors), {"parameters": json.dumps(parameters)})
    return b"".join(bytes(chunk) for chunk in chunks)


def verify(
    http: httpx.Client,
    operation: str,
    results: Mapping[str, Any],
    headers: Mapping[str, str] | None = None,
    **fields: Any,
) -> httpx.Response:
    tensors = {name: each for name, each in fields.items() if isinstance(each, np.ndarray)}
    parameters = {name: each for name, each in fields.items() if name not in tensors}
    body = encoded({**results, **tensors}, parameters)
    sent = {"content-type": SAFETENSORS, **(headers or {})}
    return http.post(f"/verify/{operation}", content=body, headers=sent)


# --- verify --------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_verifies_its_own_result(http: httpx.Client, operation: str) -> None:
    words = VERIFICATIONS[operation].example["layer"]
    tensors, parameters = drawn(operation, words, seed=5)
    own = computed(http, operation, tensors, parameters)
    results = {f"result_{name}": array for name, array in own.items()}
    linear: dict[str, NDArray[Any]] = {}
    for each in judged_results(operation):
        if each.tensor in tensors and each.output in own:
            changed = check.linear_pair(each.tensor, tensors[each.tensor], 5)[each.role == "sum"]
            other = computed(http, operation, {**tensors, each.tensor: changed}, parameters)
            linear[each.name] = other[each.output]
    answer = verify(http, operation, {**results, **linear}, layer=words, seed=5)
    assert answer.status_code == 200, answer.text
    found = Verification.model_validate(answer.json())
    assert found.passed, found.findings
    assert set(found.outputs) == set(own)
    assert all(each.bits.equal_to_ours for each in found.outputs.values())
    assert found.inputs.drawn == tuple(tensors)
    assert 2 * sum(len(each) for each in found.linearity.values()) == len(linear)
    # And what is wrong is not passed.
    for array in results.values():
        array.reshape(-1)[0] += 1
    wrong = Verification.model_validate(
        verify(http, operation, results, layer=words, seed=5).json()
    )
    assert not wrong.passed
    assert len({finding.output for finding in wrong.findings}) == len(results)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_example_in_openapi_is_answered(http: httpx.Client, operation: str) -> None:
    document = http.get("/openapi.json").json()
    content = document["paths"][f"/verify/{operation}"]["post"]["requestBody"]["content"]
    answer = http.post(f"/verify/{operation}", json=content[JSON]["example"])
    assert answer.status_code == 200, answer.text
    # Its results are zeros.
    assert not Verification.model_validate(answer.json()).passed


@pytest.mark.parametrize("wrong", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_json_lacks_are_strings(http: httpx.Client, wrong: str) -> None:
    one = {"values": [[[[1.0]]]], "dtype": "float32"}
    result = {"values": [[[[wrong]]]], "dtype": "float32"}
    body = {"input": one, "weight": one, "result_output": result}
    answer = http.post("/verify/conv_fwd", json=body)
    assert answer.status_code == 200, answer.text
    worst = answer.json()["outputs"]["output"]["worst"]
    assert (worst["value"], worst["share"]) == (wrong, "Infinity")
    found = Verification.model_validate(answer.json()).outputs["output"].worst
    assert found is not None
    assert str(found.value) == str(float(wrong))


def test_tensors_may_be_sent_drawn_or_stored(http: httpx.Client) -> None:
    tensors, parameters = drawn("conv_bwd_data", LAYER, seed=2)
    result = {
        "result_grad_input": computed(http, "conv_bwd_data", tensors, parameters)["grad_input"]
    }
    told = [verify(http, "conv_bwd_data", result, **tensors, **parameters)]
    told.append(verify(http, "conv_bwd_data", result, layer=LAYER, seed=2))
    told.append(
        verify(http, "conv_bwd_data", result, layer=LAYER, seed=2, weight=tensors["weight"])
    )
    body = encoded({"tensor": tensors["weight"]}, {})
    put = http.put("/tensors/w", content=body, headers={"content-type": SAFETENSORS})
    assert put.status_code == 200
    told.append(verify(http, "conv_bwd_data", result, layer=LAYER, seed=2, stored={"weight": "w"}))
    answers = [Verification.model_validate(each.json()) for each in told]
    assert all(answer.passed for answer in answers)
    assert len({answer.inputs.digest for answer in answers}) == 1
    assert [answer.inputs.drawn for answer in answers] == [
        (), ("grad_output", "weight"), ("grad_output",), ("grad_output",),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("shared", "sentence"),
    [
        ({"result_output": {"region": "r", "dtype": "float32"}}, "expected an object such as"),
        ({"result_output": {"region": "r", "dtype": "int8", "shape": [1]}}, "expected an object"),
        ({"result": {"region": "r", "dtype": "float32", "shape": [1]}}, 'names "result"'),
        ({"input": {"region": "r", "dtype": "float32", "shape": [1]}}, 'names "input"'),
        (
            {"result_output": {"region": "r", "dtype": "float32", "shape": [2, 8, 9, 9]}},
            "shared memory is not enabled on this server",
        ),
    ],
)
def test_shared_memory_is_refused(http: httpx.Client, shared: Any, sentence: str) -> None:
    x = np.zeros((2, 8, 9, 9), np.float32)
    found = verify(http, "conv_fwd", {}, layer=LAYER, input=x, shared_memory=shared)
    assert found.status_code in (400, 422)
    assert sentence in found.json()["detail"]


def test_json_and_multipart_bodies(http: httpx.Client) -> None:
    tensors, parameters = drawn("conv_fwd", LAYER, seed=0)
    result = computed(http, "conv_fwd", tensors, parameters)["output"]
    body = {
        "layer": LAYER,
        "result_output": {"values": result.tolist(), "dtype": "float32"},
        "second_output": {"values": result.tolist(), "dtype": "float32"},
    }
    found = http.post("/verify/conv_fwd", json=body)
    assert found.status_code == 200, found.text
    assert found.headers["content-type"] == JSON
    assert found.json()["outputs"]["output"]["bits"]["equal_to_second"] is True


def test_the_answer_asks_the_same_again(http: httpx.Client) -> None:
    tensors, parameters = drawn("conv_bwd_data", LAYER, seed=3)
    result = {
        "result_grad_input": computed(http, "conv_bwd_data", tensors, parameters)["grad_input"]
    }
    first = verify(http, "conv_bwd_data", result, layer=LAYER, seed=3, factors="tf32").json()
    again = first["again"]
    assert again["method"] == "POST"
    second = http.post(
        again["path"],
        content=encoded(result, again["fields"]),
        headers={"content-type": SAFETENSORS},
    ).json()
    assert second["again"] == again
    assert second["inputs"] == first["inputs"]
    assert "--layer mb2ic8ih9oc8oh9kh3ph1 --seed 3 --factors tf32" in again["command"]


@pytest.mark.parametrize(
    ("fields", "status", "sentence"),
    [
        ({"layer": LAYER}, 400, "there is no result to verify; expected result_grad_input"),
        ({"layer": LAYER, "strides": 1}, 400, 'unknown field "strides"'),
        ({"layer": "nonsense"}, 400, "the layer 'nonsense' is not known"),
        ({}, 400, "the size of grad_output is not known"),
        ({"layer": LAYER, "seed": -1}, 400, "expected an integer from 0 to 2"),
        ({"layer": LAYER, "distribution": "cauchy"}, 400, "distribution"),
        ({"layer": LAYER, "dtype": "int8"}, 400, "dtype"),
        ({"layer": "--pool mb1ic4ih8kh2sh2"}, 400, "conv_bwd_data does not take max pooling"),
        ({"layer": LAYER, "layout": "NHCW"}, 400, "layout"),
        ({"shapes": {"grad_output": [2, 8, 9, 9], "weights": [3]}}, 400, "shapes names 'weights'"),
        ({"shapes": {"grad_output": "all"}}, 400, "an object of shapes"),
        (
            {"shapes": {"grad_output": [2**40, 8, 9, 9], "weight": [8, 8, 3, 3]}},
            400,
            "expected at most|at most|too large",
        ),
        ({"layer": LAYER, "store": {"grad_input": "x"}}, 400, "stored"),
    ],
)
def test_what_cannot_be_verified_is_refused(
    http: httpx.Client, fields: dict[str, Any], status: int, sentence: str
) -> None:
    result = {"result_grad_input": np.zeros((2, 8, 9, 9), np.float32)}
    if "no result" in sentence:
        result = {}
    answer = verify(http, "conv_bwd_data", result, **fields)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert re.search(sentence, answer.json()["detail"]), answer.json()["detail"]


@pytest.mark.parametrize(
    ("name", "array", "sentence"),
    [
        ("result_grad_input", np.zeros((2, 8, 9, 8), np.float32), "expected float32 of shape"),
        ("result_grad_input", np.zeros((2, 8, 9, 9), np.float16), "is float16"),
        ("second_grad_input", np.zeros((2, 8, 9, 9), np.float32), "without result_grad_input"),
        ("sum_weight_grad_input", np.zeros((2, 8, 9, 9), np.float32), "without result_grad_input"),
        ("result_grad_weight", np.zeros((8, 8, 3, 3), np.float32), "unknown field"),
    ],
)
def test_a_result_that_is_none_is_refused(
    http: httpx.Client, name: str, array: NDArray[Any], sentence: str
) -> None:
    answer = verify(http, "conv_bwd_data", {name: array}, layer=LAYER)
    assert answer.status_code == 400
    assert sentence in answer.json()["detail"]


def test_a_reference_over_the_budget_is_refused_with_what_would_fit() -> None:
    with (
        serving(CpuBackend(threads=1), log_level="error", max_verify_flops=1.6e6) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        result = {"result_grad_input": np.zeros((8, 8, 9, 9), np.float32)}
        answer = verify(http, "conv_bwd_data", result, layer=LAYER, batch=8)
        assert answer.status_code == 413
        assert "a batch of 4 instead of 8 would fit" in answer.json()["detail"]
        assert "CONVGRAD_MAX_VERIFY_FLOPS" in answer.json()["detail"]
        fits = {"result_grad_input": np.zeros((4, 8, 9, 9), np.float32)}
        assert verify(http, "conv_bwd_data", fits, layer=LAYER, batch=4).status_code == 200
        assert server.held_bytes == 0


def test_a_sample_whose_reference_takes_too_much_memory_is_refused() -> None:
    with (
        serving(CpuBackend(threads=1), log_level="error", max_inflight_bytes=8 * 2**20) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        words = "mb1ic8ih96oc8oh96kh3ph1"
        result = {"result_grad_input": np.zeros((1, 8, 96, 96), np.float32)}
        answer = verify(http, "conv_bwd_data", result, layer=words)
        assert answer.status_code == 413
        assert "the float64 reference of one sample takes some 9,437,184" in answer.text
        assert "convgrad.check.bounded" in answer.text


def test_a_deadline_ends_a_verification(http: httpx.Client, server: LiveServer) -> None:
    words = "mb8ic64ih56oc64kh5ph2"
    shape = layers.arguments("conv_fwd", layers.parse(words)).shapes["input"]
    result = {"result_grad_input": np.zeros(shape, np.float32)}
    began_s = time.monotonic()
    answer = verify(http, "conv_bwd_data", result, {"x-request-timeout": "0.7"}, layer=words)
    assert answer.status_code == 504, answer.text
    server.wait_until_idle()
    assert time.monotonic() - began_s < 15
