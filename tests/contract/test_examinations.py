"""``/verify``, ``/time``, ``/plan``, ``/layers`` on a real server, as their callers use them."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from convgrad import check, layers
from convgrad.contract import OPERATIONS
from convgrad.contract.examinations import PLANS, TIMINGS, VERIFICATIONS
from convgrad.contract.timing import PlanExplained, TimedPlan
from convgrad.contract.verification import Verification
from convgrad.wire import safetensors
from convgrad_service.backends.cpu import CpuBackend
from tests.support.http_server import JSON, SAFETENSORS, LiveServer, serving

LAYER = "mb2ic8ih9oc8oh9kh3ph1"
SMALL = {"budget_s": 0.05, "peers": "none", "standard_error": 0.5}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with serving(CpuBackend(threads=1), log_level="error", max_timings=2) as live:
        yield live


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def drawn(operation: str, words: str, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    shapes, parameters = layers.arguments(operation, layers.parse(words))
    tensors = {name: check.draw(name, shape, "float32", **more) for name, shape in shapes.items()}
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
    answer = verify(http, operation, results, layer=words, seed=5)
    assert answer.status_code == 200, answer.text
    found = Verification.model_validate(answer.json())
    assert found.passed, found.findings
    assert set(found.outputs) == set(own)
    assert all(each.bits.equal_to_ours for each in found.outputs.values())
    assert found.inputs.drawn == tuple(tensors)
    # And what is wrong is not passed.
    for array in results.values():
        array.reshape(-1)[0] += 1
    wrong = Verification.model_validate(
        verify(http, operation, results, layer=words, seed=5).json()
    )
    assert not wrong.passed
    assert len({finding.output for finding in wrong.findings}) == len(results)


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


def test_an_earlier_submission_is_compared(http: httpx.Client) -> None:
    tensors, parameters = drawn("conv_bwd_data", LAYER, seed=11)
    own = computed(http, "conv_bwd_data", tensors, parameters)["grad_input"]

    def bits(result: NDArray[Any], **more: Any) -> dict[str, Any]:
        fields = {"layer": LAYER, "seed": 11, **more}
        told = verify(
            http, "conv_bwd_data", {"result_grad_input": result}, {"x-request-id": "me"}, **fields
        )
        found: dict[str, Any] = told.json()["outputs"]["grad_input"]["bits"]
        return found

    assert bits(own)["earlier"] is None
    again = bits(own)["earlier"]
    assert (again["equal"], again["request_id"]) == (True, "me")
    own.reshape(-1)[700] = np.nextafter(own.reshape(-1)[700], np.float32(9))
    other = bits(own)["earlier"]
    assert other["equal"] is False
    first, last = other["first_difference"]
    assert first <= 700 < last
    assert bits(own, distribution="uniform")["earlier"] is None  # other inputs


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
        ({}, 400, "nothing says how large grad_output is"),
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


def test_a_deadline_ends_a_verification(http: httpx.Client, server: LiveServer) -> None:
    words = "mb8ic64ih56oc64kh5ph2"
    shape = layers.arguments("conv_fwd", layers.parse(words)).shapes["input"]
    result = {"result_grad_input": np.zeros(shape, np.float32)}
    began_s = time.monotonic()
    answer = verify(http, "conv_bwd_data", result, {"x-request-timeout": "0.7"}, layer=words)
    assert answer.status_code == 504, answer.text
    server.wait_until_idle()
    assert time.monotonic() - began_s < 15


# --- plan and layers -----------------------------------------------------------------------------


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_explains_its_plan(http: httpx.Client, operation: str) -> None:
    fields = PLANS[operation].example
    answer = http.get(f"/plan/{operation}", params={**fields, "dtype": "bfloat16"})
    assert answer.status_code == 200, answer.text
    found = PlanExplained.model_validate(answer.json())
    assert found.plan.kernel
    assert found.flops >= found.valid_flops >= 0
    assert found.reference.seconds > 0
    assert {spec.dtype for spec in found.inputs.values()} == {"bfloat16"}
    assert set(found.outputs) <= set(OPERATIONS[operation].outputs)


def test_a_plan_takes_lists_as_json(http: httpx.Client) -> None:
    query = {
        "shapes": '{"grad_output": [1, 4, 5], "weight": [4, 2, 3]}',
        "padding": "[[1, 0]]",
        "groups": "2",
    }
    found = http.get("/plan/conv_bwd_data", params=query).json()
    assert found["outputs"]["grad_input"]["shape"] == [1, 4, 6]
    for query, sentence in (
        ({"stride": "[1", "layer": LAYER}, "stride"),
        ({"result_grad_input": "1"}, "unknown field"),
    ):
        answer = http.get("/plan/conv_bwd_data", params=query)
        assert answer.status_code == 400
        assert sentence in answer.json()["detail"]
    twice = http.get("/plan/conv_bwd_data?batch=1&batch=2")
    assert "twice" in twice.json()["detail"]


def test_layers_are_said_in_every_dialect(http: httpx.Client) -> None:
    found = http.get("/layers", params={"layer": "ck_headline"}).json()
    assert found["output_size"] == [36, 36]
    for words in found["spellings"].values():
        other = http.get("/layers", params={"layer": words}).json()
        assert other["output_size"] == [36, 36]
    assert "networks" in http.get("/layers").json()["suites"]
    assert len(http.get("/layers", params={"suite": "resnet50"}).json()["layers"]) > 10
    assert http.get("/layers", params={"layer": "x"}).status_code == 400


# --- time ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_is_timed(http: httpx.Client, operation: str) -> None:
    answer = http.post(f"/time/{operation}", json={**TIMINGS[operation].example, **SMALL})
    assert answer.status_code == 200, answer.text
    found = TimedPlan.model_validate(answer.json())
    assert set(found.timings) == {"cold", "warm", "back_to_back"}
    for timed in found.timings.values():
        assert timed.samples >= 3
        assert 0 < timed.min_s <= timed.p25_s <= timed.median_s <= timed.p75_s <= timed.max_s
        assert timed.reference_share == pytest.approx(found.reference.seconds / timed.median_s)
    assert found.candidates[0].chosen
    assert found.again is not None
    assert found.again.path == f"/time/{operation}"


def events(response: httpx.Response) -> Iterator[tuple[str, Any]]:
    name = ""
    for line in response.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def test_a_timing_tells_how_it_goes(http: httpx.Client) -> None:
    headers = {"accept": "text/event-stream"}
    body = {"layer": LAYER, **SMALL}
    with http.stream("POST", "/time/conv_bwd_data", json=body, headers=headers) as response:
        assert response.status_code == 202
        assert response.headers["content-type"] == "text/event-stream"
        told = list(events(response))
    assert told[-1][0] == "result"
    TimedPlan.model_validate(told[-1][1])
    assert {name for name, _ in told[:-1]} <= {"queued", "running"}


class Waiting(threading.Thread):
    """A timing by a client of its own, with the events that it was told."""

    def __init__(self, server: LiveServer, **fields: Any) -> None:
        super().__init__(daemon=True)
        self.told: list[tuple[str, Any]] = []
        self._server, self._fields = server, fields
        self.start()

    def run(self) -> None:
        headers = {"accept": "text/event-stream"}
        body = {"layer": LAYER, "peers": "none", "standard_error": 1e-9, **self._fields}
        try:
            with (
                httpx.Client(base_url=self._server.url, timeout=60) as client,
                client.stream("POST", "/time/conv_bwd_data", json=body, headers=headers) as answer,
            ):
                self._socket = answer.extensions["network_stream"].get_extra_info("socket")
                for event in events(answer):
                    self.told.append(event)
        except httpx.HTTPError:
            self.told.append(("closed", None))

    def until(self, name: str) -> Any:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            for event, data in self.told:
                if event == name:
                    return data
            time.sleep(0.01)
        raise AssertionError(f"no {name} in {self.told}")

    def close(self) -> None:
        """Leave while the server is still at it."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self.join(30)


def test_two_clients_time_one_after_the_other(server: LiveServer, http: httpx.Client) -> None:
    first = Waiting(server, budget_s=2.0)
    first.until("running")
    second = Waiting(server, budget_s=0.05)
    assert second.until("queued") == {"position": 0}
    # A third is one too many, and is told so before its body is read.
    refused = http.post("/time/conv_bwd_data", json={"layer": LAYER, **SMALL})
    assert refused.status_code == 429
    assert "2 timings wait or run already" in refused.json()["detail"]
    assert "retry-after" in refused.headers
    # Nothing else computes meanwhile either, and all of it does afterwards.
    tensors, parameters = drawn("conv_bwd_data", LAYER)
    assert computed(http, "conv_bwd_data", tensors, parameters)
    assert any(name == "result" for name, _ in first.told)
    second.until("result")
    first.join(30)
    second.join(30)
    names = [name for name, _ in second.told]
    assert names[-2:] == ["running", "result"]
    server.wait_until_idle()


def test_who_leaves_cancels_a_timing(server: LiveServer, http: httpx.Client) -> None:
    running = Waiting(server, budget_s=5.0)
    running.until("running")
    waiting = Waiting(server, budget_s=5.0)
    waiting.until("queued")
    began_s = time.monotonic()
    waiting.close()
    running.close()
    server.wait_until_idle()
    assert time.monotonic() - began_s < 4
    assert http.post("/time/conv_bwd_data", json={"layer": LAYER, **SMALL}).status_code == 200


@pytest.mark.parametrize(
    ("fields", "status", "sentence"),
    [
        ({"budget_s": 1e3}, 400, "times for at most 5 s"),
        ({"budget_s": 0}, 400, "budget_s"),
        ({"standard_error": 0}, 400, "standard_error"),
        ({"grad_output": {"values": [1], "dtype": "float32"}}, 400, "unknown field"),
        ({"layer": "mb1000ic512ih512oc512kh3ph1"}, 413, "at most"),
        ({"layer": "mb1ic2048ih2048oc2048kh3ph1"}, 413, "at most"),
    ],
)
def test_what_cannot_be_timed_is_refused(
    http: httpx.Client, fields: dict[str, Any], status: int, sentence: str
) -> None:
    answer = http.post("/time/conv_bwd_data", json={"layer": LAYER, **fields})
    assert answer.status_code == status, answer.text
    assert sentence in answer.json()["detail"]


def test_what_fails_after_the_events_began_is_an_event(http: httpx.Client) -> None:
    headers = {"accept": "text/event-stream", "x-request-timeout": "0.3"}
    body = {"layer": "mb8ic64ih56oc64kh5ph2", "budget_s": 5, "standard_error": 1e-9}
    with http.stream("POST", "/time/conv_bwd_data", json=body, headers=headers) as response:
        assert response.status_code == 202
        told = list(events(response))
    assert told[-1][0] == "error"
    assert told[-1][1]["code"] == "deadline-exceeded"


def test_openapi_describes_all_of_it(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    for operation in OPERATIONS:
        assert "post" in document["paths"][f"/verify/{operation}"]
        assert "202" in document["paths"][f"/time/{operation}"]["post"]["responses"]
        assert "get" in document["paths"][f"/plan/{operation}"]
    assert "Verification" in document["components"]["schemas"]
