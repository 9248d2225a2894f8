"""Which form goes in and which comes out: every operation, both media types, negotiation."""

from __future__ import annotations

import json
import subprocess

import numpy as np
import pytest

from convgrad.contract import OPERATIONS
from convgrad.wire import safetensors
from convgrad.wire.json_tensors import decode_tensor
from tests.support.http_server import EXAMPLE, JSON, SAFETENSORS, LiveServer, binary_example

FIRST_OUTPUT = {name: operation.outputs[0] for name, operation in OPERATIONS.items()}


def as_binary(operation: str) -> bytes:
    """The operation's example as a safetensors body."""
    fields = dict(OPERATIONS[operation].example)
    tensors = {
        name: decode_tensor(fields.pop(name), name=name)
        for name in OPERATIONS[operation].tensors
        if name in fields
    }
    return b"".join(safetensors.encode(tensors, {"parameters": json.dumps(fields)}))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_example_works_as_json(live: LiveServer, operation: str) -> None:
    body = json.dumps(OPERATIONS[operation].example).encode()
    answer = live.post(body, path=f"/{operation}")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == JSON
    fields = answer.json()
    assert FIRST_OUTPUT[operation] in fields
    assert fields["report"]["backend"] == "zeros"


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_example_works_as_safetensors(live: LiveServer, operation: str) -> None:
    headers = {"Content-Type": SAFETENSORS}
    answer = live.post(as_binary(operation), path=f"/{operation}", headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == SAFETENSORS
    tensors, metadata = safetensors.decode(answer.content)
    assert FIRST_OUTPUT[operation] in tensors
    assert json.loads(metadata["report"])["backend"] == "zeros"


@pytest.mark.parametrize(
    ("came_in", "accept", "goes_out"),
    [
        (JSON, SAFETENSORS, SAFETENSORS),
        (SAFETENSORS, JSON, JSON),
        (SAFETENSORS, "*/*", SAFETENSORS),
        (JSON, "application/*", JSON),
        (JSON, f"{JSON};q=0.5, {SAFETENSORS};q=0.9", SAFETENSORS),
        (JSON, f"text/html, {SAFETENSORS};q=0.1, {JSON};q=0", SAFETENSORS),
        (JSON, f"*/*;q=0.8, {JSON};q=0.1", SAFETENSORS),
        (JSON, "APPLICATION/JSON ; q=1.0", JSON),
    ],
)
def test_accept_picks_the_form_out(
    live: LiveServer, came_in: str, accept: str, goes_out: str
) -> None:
    body = EXAMPLE if came_in == JSON else binary_example()
    answer = live.post(body, headers={"Content-Type": came_in, "Accept": accept})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == goes_out
    assert answer.headers["vary"] == "accept"


@pytest.mark.parametrize("accept", ["text/html", "image/*", f"{JSON};q=0", "*/*;q=0", "rubbish"])
def test_nothing_acceptable_is_406(live: LiveServer, accept: str) -> None:
    answer = live.post(headers={"Accept": accept})
    assert answer.status_code == 406
    assert answer.json()["code"] == "not-acceptable"
    assert SAFETENSORS in answer.json()["detail"]


@pytest.mark.parametrize(
    "content_type",
    [
        "application/json; charset=utf-8",
        'application/json;charset="UTF-8"',
        "Application/JSON",
        "application/json ; profile=x",
    ],
)
def test_content_type_parameters_are_read(live: LiveServer, content_type: str) -> None:
    assert live.post(headers={"Content-Type": content_type}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "application/json; charset=latin-1"},
        {"Content-Type": "rubbish"},
        {"Content-Type": ""},
        {"Content-Encoding": "gzip"},
        {"Content-Encoding": "br, gzip"},
    ],
)
def test_what_cannot_be_read_is_415(live: LiveServer, headers: dict[str, str]) -> None:
    answer = live.post(headers=headers)
    assert answer.status_code == 415
    assert answer.json()["code"] == "unsupported-media-type"
    # RFC 9110, 12.5.3: only where the encoding is what was wrong.
    encoded = "Content-Encoding" in headers
    assert answer.headers.get("Accept-Encoding") == ("identity" if encoded else None)


@pytest.mark.parametrize("path", ["/conv_bwd_data", "/v2/models/conv_bwd_data/infer"])
@pytest.mark.parametrize("query", ["stride=2", "a=1&weight=", "str%69de=2"])
def test_parameters_in_the_query_are_refused(live: LiveServer, path: str, query: str) -> None:
    """They would be silently replaced by the defaults."""
    answer = live.post(path=f"{path}?{query}")
    assert answer.status_code == 400
    assert answer.json()["code"] == "malformed-request"
    assert "conv_bwd_data reads its parameters from the body" in answer.json()["detail"]


def test_other_queries_are_ignored(live: LiveServer) -> None:
    assert live.post(path="/conv_bwd_data?trace=7&strides&%ff").status_code == 200


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_every_dtype_comes_back_as_it_went(live: LiveServer, dtype: str) -> None:
    array = np.ones((1, 1, 2, 2)).astype(np.dtype(dtype))
    body = binary_example({"grad_output": array, "weight": array})
    answer = live.post(body, headers={"Content-Type": SAFETENSORS})
    tensors, _ = safetensors.decode(answer.content)
    assert tensors["grad_input"].dtype == np.dtype(dtype)


def test_values_of_a_large_answer_are_refused_before_it_is_computed(live: LiveServer) -> None:
    one = {"values": [[[[1]]]], "dtype": "float32"}
    fields = {"input": one, "weight": one, "padding": 600, "response": "values"}
    answer = live.post(json.dumps(fields).encode(), path="/conv_fwd")
    assert answer.status_code == 413
    assert answer.json()["code"] == "problem-too-large"
    assert answer.json()["detail"] == (
        'response "values" is for at most 1,048,576 elements and the answer has 1,442,401; ask for '
        '"npy" or "data"'
    )
    assert "compute" not in answer.headers["server-timing"]
    binary = live.post(
        json.dumps(fields).encode(), path="/conv_fwd", headers={"Accept": SAFETENSORS}
    )
    assert binary.status_code == 200


def test_curl(live: LiveServer) -> None:
    command = ["curl", "-sS", "--fail-with-body", "-H", f"Content-Type: {JSON}", "--data-binary"]
    done = subprocess.run(
        [*command, "@-", f"{live.url}/conv_bwd_data"],
        input=EXAMPLE,
        capture_output=True,
        timeout=20,
    )
    assert done.returncode == 0, done
    assert "grad_input" in json.loads(done.stdout)
