"""The Open Inference Protocol over HTTP, byte by byte: what is taken, refused, counted and sent."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc

from convgrad.contract import OPERATIONS
from convgrad.errors import CODES
from tests.support.fake_backends import Blocking, Failing, Zeros
from tests.support.oip_server import OipServer, serving_oip
from tests.support.tree_server import until

_LENGTH = "Inference-Header-Content-Length"
URL = "/v2/models/conv_bwd_data/infer"
GRAD_OUTPUT = np.arange(4, dtype=np.float32).reshape(1, 1, 2, 2)
WEIGHT = np.ones((1, 1, 2, 2), np.float32)


@pytest.fixture(scope="module")
def server() -> Iterator[OipServer]:
    with serving_oip(
        Zeros(),
        max_json_bytes="256KiB",
        max_body_bytes="1MiB",
        max_problem_bytes="64MiB",
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: OipServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{server.http}", timeout=60) as connected:
        yield connected


def head(*, binary: bool = False, **fields: Any) -> bytes:
    inputs = []
    for name, array in (("grad_output", GRAD_OUTPUT), ("weight", WEIGHT)):
        tensor: dict[str, Any] = {"name": name, "shape": array.shape, "datatype": "FP32"}
        if binary:
            tensor["parameters"] = {"binary_data_size": array.nbytes}
        else:
            tensor["data"] = array.reshape(-1).tolist()
        inputs.append(tensor)
    return json.dumps({"inputs": inputs, **fields}).encode()


def binary_body(**fields: Any) -> tuple[bytes, dict[str, str]]:
    text = head(binary=True, **fields)
    return text + GRAD_OUTPUT.tobytes() + WEIGHT.tobytes(), {_LENGTH: str(len(text))}


def refused(answer: httpx.Response, code: str, sentence: str = "") -> dict[str, Any]:
    fields: dict[str, Any] = answer.json()
    assert fields["code"] == code, fields
    assert answer.status_code == fields["status"] == CODES[code].http_status
    assert answer.headers["content-type"] == "application/problem+json"
    # Where clients of the protocol read it.
    assert fields["error"] == fields["detail"]
    assert sentence in fields["detail"], fields["detail"]
    assert fields["request_id"] == answer.headers["x-request-id"]
    return fields


@pytest.mark.parametrize("path", [URL, "/v2/models/conv_bwd_data/versions/1/infer"])
def test_json_in_json_out(client: httpx.Client, path: str) -> None:
    answer = client.post(path, content=head(id="7"), headers={"X-Request-Id": "mine"})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert _LENGTH not in answer.headers
    assert answer.headers["x-request-id"] == "mine"
    assert "total;dur=" in answer.headers["server-timing"]
    fields = answer.json()
    assert (fields["id"], fields["model_name"], fields["model_version"]) == (
        "7",
        "conv_bwd_data",
        "1",
    )
    (output,) = fields["outputs"]
    assert output == {
        "name": "grad_input",
        "datatype": "FP32",
        "shape": [1, 1, 3, 3],
        "data": [0.0] * 9,
    }
    assert fields["parameters"]["backend"] == "zeros"


@pytest.mark.parametrize(
    ("fields", "binary"),
    [
        ({}, False),
        ({"parameters": {"binary_data_output": True}}, True),
        ({"outputs": [{"name": "grad_input"}]}, False),
        ({"outputs": [{"name": "grad_input", "parameters": {"binary_data": True}}]}, True),
        (
            {
                "parameters": {"binary_data_output": True},
                "outputs": [{"name": "grad_input", "parameters": {"binary_data": False}}],
            },
            False,
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("chunked", [False, True], ids=["whole", "chunked"])
def test_binary_data_in_and_out(
    client: httpx.Client, fields: dict[str, Any], binary: bool, chunked: bool
) -> None:
    body, headers = binary_body(**fields)
    parts = iter([body[:100], body[100:700], body[700:]]) if chunked else body
    answer = client.post(URL, content=parts, headers=headers)
    assert answer.status_code == 200, answer.text
    assert (_LENGTH in answer.headers) is binary
    if binary:
        assert answer.headers["content-type"] == "application/octet-stream"
        end = int(answer.headers[_LENGTH])
        (output,) = json.loads(answer.content[:end])["outputs"]
        assert output["parameters"] == {"binary_data_size": 36}
        assert answer.content[end:] == bytes(36)


def test_large_lists_of_numbers(client: httpx.Client) -> None:
    """20,000 numbers, which are parsed in blocks, and a few, which are not."""
    wide = np.zeros((1, 1, 100, 200), np.float32)
    request = json.loads(head())
    request["inputs"][0].update(shape=wide.shape, data=wide.reshape(-1).tolist())
    answer = client.post(URL, content=json.dumps(request))
    assert answer.status_code == 200, answer.text
    assert answer.json()["outputs"][0]["shape"] == [1, 1, 101, 201]
    request["inputs"][0]["data"].pop()
    refused(client.post(URL, content=json.dumps(request)), "malformed-request", "fewer numbers")


@pytest.mark.parametrize(
    ("header", "sentence"),
    [
        ("x", "expected a number of bytes"),
        ("-5", "expected a number of bytes"),
        ("0", "raw bytes alone"),
        ("100000", "more than the"),
        ("10", "not JSON"),
    ],
)
def test_header_lengths_that_are_wrong(client: httpx.Client, header: str, sentence: str) -> None:
    body, _ = binary_body()
    refused(
        client.post(URL, content=body, headers={_LENGTH: header}), "malformed-request", sentence
    )


def test_binary_data_that_do_not_add_up(client: httpx.Client) -> None:
    body, headers = binary_body()
    for wrong in (body + b"\0", body[:-1]):
        for parts in (wrong, iter([wrong[:500], wrong[500:]])):
            refused(client.post(URL, content=parts, headers=headers), "malformed-request")
    # Without the header there is no binary data.
    refused(client.post(URL, content=body), "malformed-request", f"needs the header {_LENGTH}")


def test_bodies_over_the_limits(client: httpx.Client) -> None:
    """JSON and binary data have the limits of the other routes."""
    long = head() + b" " * 300_000
    refused(client.post(URL, content=long), "payload-too-large", "262,144")
    refused(client.post(URL, content=iter([long[:200_000], long[200_000:]])), "payload-too-large")
    body, headers = binary_body()
    refused(client.post(URL, content=body + bytes(2**20), headers=headers), "payload-too-large")
    # Of a chunked body the head says how long it is to be, and it is refused there.
    grown = body.replace(b'"shape": [1, 1, 2, 2]', b'"shape": [1, 1, 2, 1000000]', 1)
    grown = grown.replace(b'"binary_data_size": 16', b'"binary_data_size": 8000000', 1)
    length = {_LENGTH: str(int(headers[_LENGTH]) + len(grown) - len(body))}
    refused(client.post(URL, content=iter([grown]), headers=length), "payload-too-large")


def test_slow_bodies_are_cut_off() -> None:
    body, headers = binary_body()

    def slow() -> Iterator[bytes]:
        yield body[:-8]
        time.sleep(0.9)
        yield body[-8:]

    with (
        serving_oip(Zeros(), body_idle_timeout_s=0.5) as server,
        httpx.Client(base_url=f"http://{server.http}", timeout=60) as client,
    ):
        refused(client.post(URL, content=slow(), headers=headers), "request-timeout")


@pytest.mark.parametrize(
    ("fields", "code", "sentence"),
    [
        ({"parameters": {"strid": 2}}, "malformed-request", 'did you mean "stride"?'),
        ({"parameters": {"stride": "2"}}, "malformed-request", "stride: expected an int"),
        ({"parameters": {"stride": 0}}, "invalid-problem", "stride"),
        ({"parameters": {"stride": 1_000_000}}, "problem-too-large", "bytes"),
        ({"outputs": [{"name": "output"}]}, "malformed-request", "has no output"),
        ({"inputs": []}, "malformed-request", 'missing field "grad_output"'),
    ],
)
def test_refusals_are_those_of_every_transport(
    client: httpx.Client, fields: Mapping[str, Any], code: str, sentence: str
) -> None:
    refused(client.post(URL, content=head(**fields)), code, sentence)


def test_dtypes_that_json_cannot_hold_are_sent_as_bytes(client: httpx.Client) -> None:
    half = json.loads(head(binary=True))
    for tensor in half["inputs"]:
        tensor["datatype"], tensor["parameters"] = "BF16", {"binary_data_size": 8}
    text = json.dumps(half).encode()
    body, headers = text + bytes(16), {_LENGTH: str(len(text))}
    refused(client.post(URL, content=body, headers=headers), "malformed-request", "BF16")
    half["parameters"] = {"binary_data_output": True}
    text = json.dumps(half).encode()
    answer = client.post(URL, content=text + bytes(16), headers={_LENGTH: str(len(text))})
    assert answer.status_code == 200, answer.text


def test_encodings_are_refused(client: httpx.Client) -> None:
    answer = client.post(URL, content=head(), headers={"Content-Encoding": "gzip"})
    refused(answer, "unsupported-media-type", "gzip")


@pytest.mark.parametrize(
    "path",
    [
        "/v2/models/resnet",
        "/v2/models/resnet/ready",
        "/v2/models/resnet/config",
        "/v2/models/resnet/stats",
        "/v2/models/conv_fwd/versions/2",
        "/v2/models/conv_fwd/versions/2/ready",
        "/v2/models/conv_fwd/versions/2/config",
        "/v2/models/conv_fwd/versions/2/stats",
    ],
)
def test_models_that_are_not_there(client: httpx.Client, path: str) -> None:
    refused(client.get(path), "not-found")


def test_no_inference_where_there_is_no_model(client: httpx.Client) -> None:
    for path in ("/v2/models/resnet/infer", "/v2/models/conv_fwd/versions/2/infer"):
        refused(client.post(path, content=head()), "not-found")
    assert client.get(URL).status_code == 405


def test_descriptions(client: httpx.Client) -> None:
    metadata = client.get("/v2").json()
    assert metadata["name"] == "convgrad"
    assert {"binary_tensor_data", "statistics"} <= set(metadata["extensions"])
    for name in OPERATIONS:
        for path in (f"/v2/models/{name}", f"/v2/models/{name}/versions/1"):
            assert client.get(path).json()["name"] == name
            assert client.get(f"{path}/config").json()["max_batch_size"] == 0
            assert client.get(f"{path}/ready").status_code == 200


def test_the_documented_example_works(client: httpx.Client) -> None:
    path = client.get("/openapi.json").json()["paths"]["/v2/models/{model}/infer"]["post"]
    assert path["parameters"][0]["schema"]["enum"] == list(OPERATIONS)
    example = path["requestBody"]["content"]["application/json"]["example"]
    answer = client.post(URL, json=example)
    assert answer.status_code == 200, answer.text
    assert answer.json()["outputs"][0]["shape"] == [1, 1, 3, 3]


def test_repository(client: httpx.Client) -> None:
    for body in (b"", b"{}", b'{"ready": true}'):
        models = client.post("/v2/repository/index", content=body).json()
        assert [model["name"] for model in models] == list(OPERATIONS)
        assert {model["state"] for model in models} == {"READY"}
    answer = client.post("/v2/repository/index", content=b'{"ready": 1}')
    refused(answer, "malformed-request", "expected true or false")
    refused(client.post("/v2/repository/index", content=bytes(10_000)), "payload-too-large")
    for action in ("load", "unload"):
        answer = client.post(f"/v2/repository/models/conv_fwd/{action}")
        refused(answer, "unsupported-problem", "cannot be loaded or unloaded")


def test_shared_memory_is_not_enabled(client: httpx.Client) -> None:
    request = json.loads(head())
    region = {"shared_memory_region": "r", "shared_memory_byte_size": 16}
    request["inputs"][0] = {**request["inputs"][0], "parameters": region}
    del request["inputs"][0]["data"]
    answer = client.post(URL, content=json.dumps(request))
    refused(answer, "unsupported-problem", "shared memory is not enabled")
    outputs = [{"name": "grad_input", "parameters": {**region, "shared_memory_byte_size": 36}}]
    answer = client.post(URL, content=head(outputs=outputs))
    refused(answer, "unsupported-problem", "shared memory is not enabled")


def test_statistics_count_every_transport(client: httpx.Client) -> None:
    def counted() -> dict[str, Any]:
        (model,) = client.get("/v2/models/conv_bwd_data/stats").json()["model_stats"]
        return dict(model)

    def settled() -> dict[str, Any]:
        # What an answer adds is there a moment after it.
        until(lambda: counted() == (time.sleep(0.1), counted())[1])
        return counted()

    before = settled()
    assert client.post(URL, content=head()).status_code == 200
    plain = json.dumps(OPERATIONS["conv_bwd_data"].example)
    json_type = {"Content-Type": "application/json"}
    assert client.post("/conv_bwd_data", content=plain, headers=json_type).status_code == 200
    assert client.post(URL, content=b"{}").status_code == 400
    until(lambda: counted()["inference_count"] - before["inference_count"] == 2)
    after = settled()
    stats = {name: after["inference_stats"][name] for name in ("success", "queue", "fail")}
    assert stats["success"]["count"] - before["inference_stats"]["success"]["count"] == 2
    assert stats["success"]["ns"] > before["inference_stats"]["success"]["ns"]
    assert stats["fail"] == before["inference_stats"]["fail"]
    assert after["last_inference"] >= before["last_inference"]
    everything = client.get("/v2/models/stats").json()["model_stats"]
    assert [model["name"] for model in everything] == list(OPERATIONS)


def test_timeouts_and_cancellation_free_the_work() -> None:
    backend = Blocking()
    with serving_oip(backend, compute_slots=1) as server:
        with httpx.Client(base_url=f"http://{server.http}", timeout=60) as client:
            # A deadline so short may pass before the work begins, where much else is to be done.
            for ms in (600, 6000, 60_000):
                parameters = {"timeout": 1000 * ms}
                answer = client.post(URL, content=head(parameters=parameters))
                refused(answer, "deadline-exceeded", f"{ms / 1000:g} s")
                if backend.runs >= 1:
                    break
            body, headers = binary_body()
            for ms in (600, 6000, 60_000):
                headers["X-Request-Timeout"] = str(ms / 1000)
                answer = client.post(URL, content=body, headers=headers)
                refused(answer, "deadline-exceeded", f"{ms / 1000:g} s")
                if backend.runs >= 2:
                    break
            for read_s in (0.6, 6):
                with pytest.raises(httpx.ReadTimeout):
                    client.post(URL, content=head(), timeout=httpx.Timeout(60, read=read_s))
                if backend.runs >= 3:
                    break
        assert backend.runs >= 3
        until(lambda: backend.cancelled == backend.runs)


def test_what_the_server_failed_at_counts_as_failed() -> None:
    with (
        serving_oip(Failing(ZeroDivisionError("secret"))) as server,
        httpx.Client(base_url=f"http://{server.http}", timeout=60) as client,
    ):
        answer = client.post(URL, content=head())
        assert "secret" not in refused(answer, "internal")["detail"]

        def counted() -> Any:
            (model,) = client.get("/v2/models/conv_bwd_data/stats").json()["model_stats"]
            return model

        until(lambda: counted()["inference_stats"]["fail"]["count"] == 1)
        assert counted()["inference_count"] == 0


def test_a_server_that_is_not_ready_says_so() -> None:
    backend = Zeros()
    with (
        serving_oip(backend, service_name="gradients") as server,
        httpx.Client(base_url=f"http://{server.http}", timeout=60) as client,
        triton_grpc.InferenceServerClient(server.grpc) as grpc_client,
    ):
        # As KServe asks: by the name of its service, which is no model's.
        assert client.get("/v2/models/gradients/ready").json() == {
            "name": "gradients",
            "ready": True,
        }
        assert grpc_client.is_model_ready("gradients")
        refused(client.get("/v2/models/gradients"), "not-found")
        backend.fault = "an illegal address"
        assert client.get("/v2/health/live").status_code == 200
        assert not grpc_client.is_model_ready("gradients")
        for path in ("/v2/health/ready", "/v2/models/conv_fwd/ready", "/v2/models/gradients/ready"):
            refused(client.get(path), "device-unavailable", "illegal address")
        refused(client.post(URL, content=head()), "device-unavailable")
        models = client.post("/v2/repository/index").json()
        assert {model["state"] for model in models} == {"UNAVAILABLE"}
        assert client.post("/v2/repository/index", content=b'{"ready": true}').json() == []
