"""Tensors that stay: put, named and made by requests in every form, fetched, dropped, expired."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from numpy.typing import NDArray

from convgrad.wire import json_tensors, safetensors
from convgrad_service.backends.cpu import CpuBackend
from tests.support.fake_backends import Failing
from tests.support.http_server import JSON, SAFETENSORS, serving_process
from tests.support.oip_server import OipServer, serving_oip
from tests.support.tree_server import until

X = np.arange(64, dtype=np.float32).reshape(1, 1, 8, 8)
POOLED = X.reshape(4, 2, 4, 2).max((1, 3)).reshape(1, 1, 4, 4)


@pytest.fixture(scope="module")
def server() -> Iterator[OipServer]:
    with serving_oip(
        CpuBackend(), max_stored_bytes="1MiB", stored_longest_s=100, system_shared_memory=True
    ) as server:
        yield server


@pytest.fixture
def client(server: OipServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{server.http}", timeout=60) as client:
        yield client
        for tensor in client.get("/tensors").json()["tensors"]:
            client.delete(f"/tensors/{tensor['name']}")
    # A request lets go of what it used a moment after its answer.
    until(lambda: server.pipeline.engine.tensors.used_bytes == 0)  # type: ignore[attr-defined]


def put(client: httpx.Client, name: str, array: NDArray[Any], **headers: str) -> httpx.Response:
    body = b"".join(safetensors.encode({"any": array}, {}))
    return client.put(
        f"/tensors/{name}", content=body, headers={"Content-Type": SAFETENSORS, **headers}
    )


def get(client: httpx.Client, name: str) -> NDArray[Any]:
    answer = client.get(f"/tensors/{name}").raise_for_status()
    tensors, _ = safetensors.decode(answer.content)
    (array,) = tensors.values()
    return array


def pool(client: httpx.Client, source: Any, **fields: Any) -> httpx.Response:
    return client.post("/maxpool2d_fwd", json={"input": source, "kernel_size": 2, **fields})


def named(name: str) -> dict[str, str]:
    return {"stored": name}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int32", "int64"])
@pytest.mark.parametrize("form", [JSON, SAFETENSORS])
def test_what_is_put_is_got(client: httpx.Client, dtype: str, form: str) -> None:
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    array = np.arange(60_000).reshape(2, 3, -1).astype(kind)
    if form == JSON:
        tensor = json_tensors.encode_tensor(array, "npy")
        told = client.put("/tensors/a", json=tensor)
    else:
        told = put(client, "a", array)
    assert told.status_code == httpx.codes.OK, told.text
    assert told.json() == {"name": "a", "dtype": dtype, "shape": [2, 3, 10_000]}
    np.testing.assert_array_equal(get(client, "a"), array)
    as_json = client.get("/tensors/a", headers={"Accept": JSON}).json()
    np.testing.assert_array_equal(json_tensors.decode_tensor(as_json, name="a"), array)
    (listed,) = client.get("/tensors").json()["tensors"]
    assert listed["name"] == "a"
    assert listed["dtype"] == dtype
    assert listed["shape"] == [2, 3, 10_000]
    assert listed["bytes"] == array.nbytes
    assert 60 < listed["expires_in_s"] <= 100


def test_a_request_in_json_names_and_makes_them(client: httpx.Client) -> None:
    put(client, "x", X)
    answer = pool(client, named("x"), store={"output": "y"}).raise_for_status().json()
    assert answer["output"] == {"stored": "y", "dtype": "float32", "shape": [1, 1, 4, 4]}
    np.testing.assert_array_equal(get(client, "y"), POOLED)
    again = pool(client, named("y"), response="values").raise_for_status().json()
    assert again["output"]["values"] == [[[[27, 31], [59, 63]]]]
    # over itself
    pool(client, named("y"), store={"output": "y"}).raise_for_status()
    assert get(client, "y").shape == (1, 1, 2, 2)


def test_a_request_in_safetensors_names_and_makes_them(client: httpx.Client) -> None:
    put(client, "x", X)
    parameters = {
        "kernel_size": 2,
        "return_indices": True,
        "stored": {"input": "x"},
        "store": {"output": "y"},
    }
    body = b"".join(safetensors.encode({}, {"parameters": json.dumps(parameters)}))
    answer = client.post("/maxpool2d_fwd", content=body, headers={"Content-Type": SAFETENSORS})
    tensors, metadata = safetensors.decode(answer.raise_for_status().content)
    assert tensors.keys() == {"indices"}
    assert json.loads(metadata["stored"]) == {
        "output": {"stored": "y", "dtype": "float32", "shape": [1, 1, 4, 4]}
    }
    np.testing.assert_array_equal(get(client, "y"), POOLED)


@pytest.mark.parametrize("way", ["http", "grpc"])
def test_tritonclient_names_and_makes_them(
    client: httpx.Client, server: OipServer, way: str
) -> None:
    put(client, "x", X)
    module = http_client if way == "http" else grpc_client
    grads = np.ones((1, 1, 4, 4), np.float32)
    with module.InferenceServerClient(getattr(server, way)) as triton:
        given = module.InferInput("grad_output", grads.shape, "FP32").set_data_from_numpy(grads)
        result = triton.infer(
            "maxpool2d_bwd",
            [given],
            parameters={
                "kernel_size": 2,
                "stored": '{"input": "x"}',
                "store": '{"grad_input": "g"}',
            },
        )
        told = result.get_output("grad_input")
        told = told["parameters"] if way == "http" else told.parameters["stored"].string_param
        assert told == ({"stored": "g"} if way == "http" else "g")
    kept = get(client, "g")
    np.testing.assert_array_equal(kept, (X % 2 == 1) & (X // 8 % 2 == 1))


def test_indices_are_checked_when_they_are_stored_too(client: httpx.Client) -> None:
    indices = np.array([9, 11, 13, 15, 25, 27, 29, 31, 41, 43, 45, 47, 57, 59, 61, 63])
    grads = json_tensors.encode_tensor(np.ones((1, 1, 4, 4), np.float32), "npy")
    fields = {"grad_output": grads, "kernel_size": 2, "input_size": [8, 8]}
    put(client, "good", indices.reshape(1, 1, 4, 4))
    answer = client.post("/maxpool2d_bwd", json={**fields, "indices": named("good")})
    assert answer.status_code == httpx.codes.OK, answer.text
    put(client, "bad", np.full((1, 1, 4, 4), 2**40))
    answer = client.post("/maxpool2d_bwd", json={**fields, "indices": named("bad")})
    assert answer.json()["code"] == "invalid-problem"


@pytest.mark.parametrize(
    ("fields", "code", "sentence"),
    [
        ({"input": {"stored": "none"}}, "not-found", 'no stored tensor "none"'),
        ({"input": {"stored": 7}}, "malformed-request", '"stored" to be the name'),
        ({"input": {"stored": "x", "dtype": "float32"}}, "malformed-request", "no other key"),
        ({"stored": {"inptu": "x"}}, "malformed-request", 'no tensor "inptu"'),
        ({"stored": ["x"]}, "malformed-request", "an object of names"),
        ({"input": {"stored": "x"}, "store": {"ouptut": "y"}}, "invalid-problem", '"ouptut"'),
        ({"input": {"stored": "x"}, "store": {"output": ".y"}}, "malformed-request", "called"),
        ({"input": {"stored": "x"}, "store": "y"}, "malformed-request", "an object of names"),
        (
            {"input": {"stored": "x"}, "store": {"output": "y", "indices": "y"}},
            "invalid-problem",
            "indices",
        ),
    ],
)
def test_refusals(client: httpx.Client, fields: dict[str, Any], code: str, sentence: str) -> None:
    put(client, "x", X)
    answer = client.post("/maxpool2d_fwd", json={"kernel_size": 2, **fields})
    assert answer.json()["code"] == code
    assert sentence in answer.json()["detail"]
    assert len(client.get("/tensors").json()["tensors"]) == 1


def test_refusals_of_put(client: httpx.Client) -> None:
    def refused(answer: httpx.Response) -> str:
        return str(answer.json()["code"])

    assert refused(put(client, ".x", X)) == "malformed-request"
    assert refused(put(client, "x", X, **{"X-Time-To-Live": "soon"})) == "malformed-request"
    assert refused(put(client, "x", np.zeros((0, 3), np.float32))) == "malformed-request"
    assert refused(put(client, "x", np.zeros(2**19, np.float32))) == "problem-too-large"
    assert put(client, "x", np.zeros(2**17, np.float32)).status_code == httpx.codes.OK
    full = put(client, "y", np.zeros(2**17 + 1, np.float32))
    assert refused(full) == "overloaded"
    assert "Retry-After" in full.headers
    two = b"".join(safetensors.encode({"a": X, "b": X}, {}))
    answer = client.put("/tensors/z", content=two, headers={"Content-Type": SAFETENSORS})
    assert "got 2 tensors" in answer.json()["detail"]
    assert refused(client.put("/tensors/z", content=b"x")) == "unsupported-media-type"
    assert refused(client.put("/tensors/z", json=[1])) == "malformed-request"
    assert refused(client.get("/tensors/z")) == "not-found"
    assert refused(client.delete("/tensors/z")) == "not-found"


def test_time_ends(client: httpx.Client) -> None:
    put(client, "x", X, **{"X-Time-To-Live": "50"})
    (listed,) = client.get("/tensors").json()["tensors"]
    assert 30 < listed["expires_in_s"] <= 50
    assert get(client, "x").shape == X.shape
    put(client, "x", X, **{"X-Time-To-Live": "0.2"})
    until(lambda: client.get("/tensors").json() == {"tensors": []})
    assert client.get("/tensors/x").json()["code"] == "not-found"


def test_what_was_not_computed_is_not_kept() -> None:
    with (
        serving_oip(Failing(RuntimeError("broken"))) as server,
        httpx.Client(base_url=f"http://{server.http}", timeout=60) as client,
    ):
        put(client, "x", X)
        answer = pool(client, named("x"), store={"output": "y"})
        assert answer.json()["code"] == "internal"
        assert [each["name"] for each in client.get("/tensors").json()["tensors"]] == ["x"]
        stored = server.pipeline.engine.tensors  # type: ignore[attr-defined]
        until(lambda: stored.used_bytes == X.nbytes)


def test_all_processes_know_them(tmp_path: Path) -> None:
    settings = {"CONVGRAD_BACKEND": "cpu", "CONVGRAD_GRPC_PORT": "0", "CONVGRAD_HTTP_WORKERS": "2"}
    with serving_process(tmp_path, settings) as (url, _):
        for turn in range(6):  # a connection each: either front end may answer
            with httpx.Client(base_url=url, timeout=60) as client:
                if turn == 0:
                    put(client, "x", X).raise_for_status()
                pool(client, named("x"), store={"output": "y"}).raise_for_status()
                np.testing.assert_array_equal(get(client, "y"), POOLED)
