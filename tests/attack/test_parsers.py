"""Every parser that reads what a stranger sent: it refuses, or it gives a value, and no more.

`make fuzz` sends whole bodies to a server; here the parsers are called, which is much faster.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from convgrad.contract import OPERATIONS
from convgrad.errors import ServiceError
from convgrad.wire import npy, safetensors
from convgrad_service.grpc_api.wire import cut_infer_request, read_infer_request
from convgrad_service.http_api.codecs import parse_json_body
from convgrad_service.http_api.protocol import check_head
from convgrad_service.oip.fields import array_or_blank
from convgrad_service.oip.http_json import read_infer_head
from tests.support.h2_client import large_answer, pool_request
from tests.support.http_server import EXAMPLE, binary_example

OPERATION = OPERATIONS["maxpool2d_fwd"]
OIP = (
    b'{"id": "1", "inputs": [{"name": "input", "shape": [1, 1, 2, 2], "datatype": "FP32", '
    b'"parameters": {"binary_data_size": 16}}], "parameters": {"kernel_size": 2}, '
    b'"outputs": [{"name": "output", "parameters": {"binary_data": true}}]}'
)
NPY = b"\x93NUMPY\x01\x00v\x00" + (
    b"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 2), }".ljust(117) + b"\n" + bytes(16)
)


def grpc_message(body: bytes) -> None:
    """All that is read of a message."""
    read_infer_request(cut_infer_request(body))


def safetensors_body(body: bytes) -> None:
    """A body's layout, its tensors and its parameters."""
    safetensors.layout(body)
    _, metadata = safetensors.decode(body)
    safetensors.parameters(metadata)


PARSERS: dict[str, tuple[Callable[[bytes], object], list[bytes]]] = {
    "json": (parse_json_body, [EXAMPLE]),
    "safetensors": (safetensors_body, [binary_example(), binary_example(padding=1)]),
    "npy": (lambda body: npy.decode(body, name="weight"), [NPY]),
    "grpc": (grpc_message, [pool_request(), large_answer()]),
    "oip": (lambda body: read_infer_head(memoryview(body), OPERATION, 16), [OIP]),
}


@st.composite
def mangled(draw: st.DrawFn, good: list[bytes]) -> bytes:
    """A good body with a few bytes changed, taken out, put in or said twice."""
    body = bytearray(draw(st.sampled_from(good)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(body)))
        until = min(len(body), at + draw(st.integers(0, 8)))
        if draw(st.booleans()):
            body[at:until] = draw(st.binary(max_size=8))
        else:
            body[at:at] = body[until : until + draw(st.integers(0, 64))]
    return bytes(body)


def refuses_or_reads(parse: Callable[[bytes], object], body: bytes) -> None:
    try:
        parse(body)
    except ServiceError as error:
        assert error.row.http_status < 500  # noqa: PT017


@pytest.mark.parametrize("name", PARSERS)
def test_good_bodies_are_read(name: str) -> None:
    parse, good = PARSERS[name]
    for body in good:
        parse(body)


@pytest.mark.parametrize("examples", [300, pytest.param(20_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", PARSERS)
def test_parsers_refuse_or_read(name: str, examples: int) -> None:
    parse, good = PARSERS[name]

    @settings(max_examples=examples)
    @given(st.one_of(mangled(good), st.binary(max_size=200)))
    def feed(body: bytes) -> None:
        refuses_or_reads(parse, body)

    feed()


SHAPES = [[0, 2**63, 1, 1], [2**63 - 1] * 4, [0, 2**62, 2**62, 1], [1] * 65, [0] * 65, [-1], []]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("given_as", [{"data": []}, {"data": [1.0]}, {"binary_data_size": 0}])
def test_shapes_that_numpy_cannot_hold_are_refused(
    shape: list[int], given_as: dict[str, Any]
) -> None:
    tensor: dict[str, Any] = {"name": "input", "shape": shape, "datatype": "FP32"}
    if "data" in given_as:
        tensor |= given_as
    else:
        tensor["parameters"] = given_as
    body = json.dumps({"inputs": [tensor]}).encode()
    refuses_or_reads(lambda text: read_all(read_infer_head(memoryview(text), OPERATION, 0)), body)
    message = service_pb2.ModelInferRequest(model_name=OPERATION.name)
    if all(0 <= extent < 2**63 for extent in shape):
        found = message.inputs.add(name="input", datatype="FP32", shape=shape)
        found.contents.fp32_contents.extend(given_as.get("data", []))
        refuses_or_reads(
            lambda body: read_all(read_infer_request(cut_infer_request(body))),
            message.SerializeToString(),
        )


def read_all(request: Any) -> None:
    """Reads a request's inputs as the transports do before they make a problem of them."""
    for tensor in request.inputs:
        array_or_blank(tensor)


@settings(max_examples=300)
@given(
    st.sampled_from(["1.0", "1.1", "2.0", "", "1.1.1"]),
    st.lists(
        st.tuples(
            st.sampled_from([b"host", b"transfer-encoding", b"x"]),
            st.one_of(st.binary(max_size=20), st.sampled_from([b"chunked", b"gzip, chunked"])),
        )
    ),
)
def test_heads_are_refused_or_plain(version: str, headers: list[tuple[bytes, bytes]]) -> None:
    try:
        check_head(version, headers)
    except ServiceError:
        return
    names = [name for name, _ in headers]
    assert version in ("1.0", "1.1")
    assert names.count(b"host") == 1 or (version == "1.0" and b"host" not in names)
    codings: list[Any] = [value for name, value in headers if name == b"transfer-encoding"]
    assert not b",".join(codings) or [value.strip().lower() for value in codings] == [b"chunked"]


def test_the_messages_are_those_of_the_protocol() -> None:
    """So that what is mangled above is what clients send."""
    assert service_pb2.ModelInferRequest.FromString(pool_request()).model_name == "maxpool2d_fwd"
