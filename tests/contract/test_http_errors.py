"""Bad requests: each gets a clear 4xx as problem+json, quickly, and nothing else."""

from __future__ import annotations

import base64
import io
import json
import time
from typing import Any

import numpy as np
import pytest

from convgrad.errors import CODES, InvalidProblem
from tests.support.fake_backends import Failing
from tests.support.http_server import EXAMPLE, SAFETENSORS, LiveServer, binary_example, serving

GOOD: dict[str, Any] = json.loads(EXAMPLE)


def npy(array: np.ndarray[Any, Any], **keywords: Any) -> dict[str, str]:
    file = io.BytesIO()
    np.save(file, array, **keywords)
    return {"npy": base64.b64encode(file.getvalue()).decode()}


def npy_bytes(header: str, data: bytes = b"") -> dict[str, str]:
    text = header.encode().ljust(118) + b"\n"
    file = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data
    return {"npy": base64.b64encode(file).decode()}


def changed(**fields: Any) -> bytes:
    return json.dumps({**GOOD, **fields}).encode()


def without(name: str) -> bytes:
    return json.dumps({key: value for key, value in GOOD.items() if key != name}).encode()


DATA = {"data": base64.b64encode(bytes(16)).decode(), "dtype": "float32", "shape": [1, 1, 2, 2]}

MALFORMED_JSON: dict[str, bytes] = {
    "empty": b"",
    "not JSON": b"{",
    "not UTF-8": b'{"weight": "\xff\xfe"}',
    "UTF-16": EXAMPLE.decode().encode("utf-16"),
    "a list": b"[1, 2]",
    "a number": b"17",
    "null": b"null",
    "nested deep": b"[" * 100_000,
    "nested deep and closed": b'{"weight":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "objects nested deep": b'{"a":' * 30_000,
    "values nested deep": changed(weight={"values": "@", "dtype": "float32"}).replace(
        b'"@"', b"[" * 50_000 + b"]" * 50_000
    ),
    "an int of thousands of digits": changed(stride="@").replace(b'"@"', b"9" * 10_000),
    "NaN literal": changed(stride="@").replace(b'"@"', b"NaN"),
    "a key twice": b'{"stride": 1, "stride": 1, ' + EXAMPLE[1:],
    "unknown field": changed(strides=2),
    "missing field": without("weight"),
    "tensor is a number": changed(weight=3),
    "tensor is null": changed(weight=None),
    "tensor is empty": changed(weight={}),
    "two forms": changed(weight={**DATA, "values": [1]}),
    "unknown key in a tensor": changed(weight={**DATA, "order": "F"}),
    "unknown dtype": changed(weight={**DATA, "dtype": "float8"}),
    "int8": changed(weight={**DATA, "dtype": "int8", "shape": [1, 1, 4, 4]}),
    "shape unlike the bytes": changed(weight={**DATA, "shape": [1, 1, 2, 3]}),
    "negative shape": changed(weight={**DATA, "shape": [-1, 1, 2, 2]}),
    "enormous shape": changed(weight={**DATA, "shape": [2**62, 2**62, 2, 2]}),
    "rubbish in base64": changed(weight={**DATA, "data": "AAAA*AAA"}),
    "base64 cut short": changed(weight={**DATA, "data": DATA["data"][:-3]}),
    "base64 with line breaks": changed(weight={**DATA, "data": "AAAA\nAAAA"}),
    "pickled npy": changed(weight=npy(np.array([{}], dtype=object), allow_pickle=True)),
    "structured npy": changed(weight=npy(np.zeros(2, [("a", "f4")]))),
    "boolean npy": changed(weight=npy(np.zeros((1, 1, 2, 2), bool))),
    "complex npy": changed(weight=npy(np.zeros((1, 1, 2, 2), np.complex64))),
    "int8 npy": changed(weight=npy(np.zeros((1, 1, 2, 2), np.int8))),
    "npy header that lies": changed(
        weight=npy_bytes("{'descr': '<f4', 'fortran_order': False, 'shape': (9, 9), }", bytes(16))
    ),
    "npy header that is code": changed(
        weight=npy_bytes("__import__('os').system('false')", bytes(16))
    ),
    "npy of nothing": changed(weight={"npy": ""}),
    "ragged values": changed(weight={"values": [[1, 2], [3]], "dtype": "float32"}),
    "values without dtype": changed(weight={"values": [[1]]}),
    "text in values": changed(weight={"values": [["x"]], "dtype": "float32"}),
    "stride as text": changed(stride="2"),
    "stride as a float": changed(stride=1.0),
    "stride as a bool": changed(stride=True),
    "infinite alpha": changed(alpha="@").replace(b'"@"', b"1e999"),
    "response of no form": changed(response="csv"),
}

INVALID_PROBLEM: dict[str, bytes] = {
    "stride zero": changed(stride=0),
    "stride negative": changed(stride=-1),
    "padding negative": changed(padding=-1),
    "too many strides": changed(stride=[1, 1, 1]),
    "groups that do not divide": changed(groups=3),
    "input_size that contradicts": changed(input_size=[99, 99]),
    "integer tensors": changed(
        weight={**DATA, "dtype": "int32"}, grad_output={**DATA, "dtype": "int32"}
    ),
    "dtypes that differ": changed(weight={**DATA, "dtype": "float16", "shape": [1, 1, 2, 4]}),
    "no elements": changed(weight={"values": [], "dtype": "float32"}),
    "beta without accumulate": changed(beta=1.0),
    "unknown layout": changed(layout="NCHWX"),
    "dilation enormous": changed(dilation=2**200),
}


@pytest.mark.parametrize("name", MALFORMED_JSON)
def test_malformed_json(live: LiveServer, name: str) -> None:
    assert refused(live, MALFORMED_JSON[name]) == "malformed-request"


@pytest.mark.parametrize("body", [b"", b" \r\n"], ids=["nothing", "spaces"])
def test_an_empty_body_is_called_empty(live: LiveServer, body: bytes) -> None:
    assert live.post(body).json()["detail"] == "the body is empty; expected JSON"


@pytest.mark.parametrize("name", INVALID_PROBLEM)
def test_invalid_problems(live: LiveServer, name: str) -> None:
    # A size out of all proportion may be refused as such.
    assert refused(live, INVALID_PROBLEM[name]) in ("invalid-problem", "problem-too-large")


WHOLE = binary_example()
MALFORMED_BINARY: dict[str, bytes] = {
    "empty": b"",
    "seven bytes": b"1234567",
    "header cut": WHOLE[:20],
    "data cut": WHOLE[:-1],
    "a byte too many": WHOLE + b"\0",
    "header length of 2**63": (2**63).to_bytes(8, "little") + b"{}",
    "header is no object": (2).to_bytes(8, "little") + b"[]",
    "parameters are no JSON": WHOLE.replace(b'"{}"', b'"{]"'),
    "parameters are a list": WHOLE.replace(b'"{}"', b'"[]"'),
    "parameters nested deep": binary_example().replace(b'"{}"', b'"[["'),
    "dtype of no operation": WHOLE.replace(b'"F32"', b'"F8X"'),
    "offsets that overlap": WHOLE.replace(b"[16,32]", b"[15,31]"),
    "JSON": EXAMPLE,
}


@pytest.mark.parametrize("name", MALFORMED_BINARY)
def test_malformed_binary(live: LiveServer, name: str) -> None:
    code = refused(live, MALFORMED_BINARY[name], {"Content-Type": SAFETENSORS})
    assert code == "malformed-request"


def test_a_parameter_that_is_also_a_tensor(live: LiveServer) -> None:
    body = binary_example(weight=3)
    assert refused(live, body, {"Content-Type": SAFETENSORS}) == "malformed-request"


def test_a_tiny_body_cannot_ask_for_a_huge_problem(live: LiveServer) -> None:
    body = changed(stride=40_000)  # grad_input of 6.4 GB from 32 bytes
    answer = live.post(body)
    assert answer.status_code == 413
    assert answer.json()["code"] == "problem-too-large"
    assert "6,400" in answer.json()["detail"]


@pytest.mark.parametrize("header", ["", "abc", "0", "-1", "nan", "inf", "1e999"])
def test_a_timeout_must_be_a_number(live: LiveServer, header: str) -> None:
    assert refused(live, EXAMPLE, {"X-Request-Timeout": header}) == "malformed-request"


def refused(live: LiveServer, body: bytes, headers: dict[str, str] | None = None) -> str:
    """The code of the refusal, once everything all refusals share has been checked."""
    started = time.monotonic()
    answer = live.post(body, headers=headers)
    assert time.monotonic() - started < 10
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    fields = answer.json()
    row = CODES[fields["code"]]
    assert fields["status"] == answer.status_code == row.http_status
    assert fields["title"] == row.title
    assert fields["error"] == fields["detail"]
    assert 10 < len(fields["detail"]) < 1000, fields["detail"]
    assert fields["request_id"] == answer.headers["x-request-id"]
    assert fields["type"].endswith(row.code)
    code: str = fields["code"]
    return code


@pytest.mark.parametrize("path", ["/maxpool2d_forward", "/MaxPool2d_fwd", "/maxpool2d_fwd/"])
def test_a_path_that_is_almost_an_operation_is_answered_with_it(
    live: LiveServer, path: str
) -> None:
    answer = live.post(path=path)
    assert answer.status_code == 404
    assert f"no resource at '{path}', did you mean '/maxpool2d_fwd'?" in answer.json()["detail"]


def test_an_unexpected_failure_tells_its_request_id_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving(Failing(ZeroDivisionError("the secret of /etc"))) as server:
        answer = server.post(headers={"X-Request-Id": "mine"})
        assert answer.status_code == 500
        assert answer.json()["code"] == "internal"
        assert answer.json()["request_id"] == answer.headers["x-request-id"] == "mine"
        assert "secret" not in answer.text
        assert "ZeroDivision" not in answer.text
        assert "the secret of /etc" in caplog.text  # with its traceback, for us
        assert "request_id=mine" in caplog.text


def test_what_a_backend_refuses_is_answered_as_such() -> None:
    error = InvalidProblem("index 9 of indices is outside of its plane; expected 0 to 3")
    with serving(Failing(error)) as server:
        answer = server.post()
        assert answer.status_code == 400
        assert answer.json()["detail"] == error.detail


def test_memory_that_the_machine_has_not_is_503() -> None:
    with serving(Failing(MemoryError())) as server:
        answer = server.post()
        assert (answer.status_code, answer.json()["code"]) == (503, "device-out-of-memory")
        assert answer.headers["retry-after"] == "1"
