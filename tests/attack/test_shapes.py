"""Shapes and parameters that are empty, huge, negative or nonsense, in every form of request."""

from __future__ import annotations

import base64
import itertools
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from tritonclient.grpc import service_pb2

from convgrad.contract import OPERATIONS
from tests.attack.served import MIB, attacked, processes
from tests.support.h2_client import INFER, STREAM_INFER, H2Client, connected, grpc_message
from tests.support.http_server import JSON, SAFETENSORS

LONGEST_S = 5.0
UNKNOWN, INTERNAL = "2", "13"

SHAPES: list[Any] = [
    *([], [0], [0, 0, 0, 0], [1, 1, 0, 1], [0, 2**63 - 1, 1, 1]),
    *([2**62, 4, 1, 1], [2**31, 2**31, 1, 1], [2**63 - 1] * 4, [1, 1, 1, 2**40], [2**64, 1, 1, 1]),
    *([1] * 33, [1] * 65, [-1, 1, 1, 1]),
    *([1.5, 1, 1, 1], ["1", 1, 1, 1], [True, 1, 1, 1], [[1]], [float("inf")], None, "x", {}),
]
EXTENTS = [[0, 0], [0, 4], [4, 0], [0, 2**63], [-1, 4], [2**64, 2**64 + 4]]
OIP_DATA: list[dict[str, Any]] = [
    *({"data": data} for data in ([], [1.0], None, "x", [[1], [2, 3]])),
    *({"parameters": {"binary_data_size": size}} for size in (0, -1, 2**63)),
    {"parameters": {"shared_memory_region": "q", "shared_memory_byte_size": 2**63}},
]
VALUES: list[Any] = [
    *(2**63, 2**31, -1, 0, 1e308, [2**62] * 2, [0, 0], [[2**40, 2**40]] * 2),
    *("x", "9" * 5000, None, True, {}),
]
PARAMETERS = ["stride", "padding", "dilation", "groups", "input_size", "kernel_size"]
PARAMETERS += ["output_padding", "beta", "alpha", "split_k"]


class Request(NamedTuple):
    """A request over HTTP; with a message instead of a body, over gRPC."""

    path: str
    body: bytes
    content_type: str = JSON
    method: str = "POST"


def npy(shape: Any) -> bytes:
    shown = f"({','.join(map(str, shape))},)" if isinstance(shape, list) else str(shape)
    head = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shown}, }}".encode()
    head = head.ljust(((len(head) + 10) // 64 + 1) * 64 - 11) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head


def of_shape(operation: str, name: str, shape: Any) -> Iterator[Request]:
    """A tensor of this shape in each form; its data is none, or has another size."""
    example = OPERATIONS[operation].example
    for tensor in (
        {"data": "", "dtype": "float32", "shape": shape},
        {"values": shape, "dtype": "float32"},
        {"npy": base64.b64encode(npy(shape)).decode()},
    ):
        yield Request(f"/{operation}", json.dumps({**example, name: tensor}).encode())
    yield Request("/tensors/x", npy(shape), "application/x-npy", "PUT")
    for extent in EXTENTS:
        placed = {"dtype": "F32", "shape": shape, "data_offsets": extent}
        head = json.dumps({name: placed, "__metadata__": {"parameters": "{}"}}).encode()
        body = len(head).to_bytes(8, "little") + head + bytes(4)
        yield Request(f"/{operation}", body, SAFETENSORS)
        yield Request("/tensors/x", body, SAFETENSORS, "PUT")
    for data in OIP_DATA:
        described = {"name": name, "shape": shape, "datatype": "FP32", **data}
        body = json.dumps({"inputs": [described]}).encode()
        yield Request(f"/v2/models/{operation}/infer", body)


def messages(operation: str, names: list[str]) -> Iterator[Request]:
    """Messages with the shapes that can be in one."""
    for shape in SHAPES:
        if not isinstance(shape, list) or not all(type(extent) is int for extent in shape):
            continue
        if not all(-(2**63) <= extent < 2**63 for extent in shape):
            continue
        for data, path in itertools.product((None, b"", bytes(4)), (INFER, STREAM_INFER)):
            message = service_pb2.ModelInferRequest(model_name=operation)
            for name in names:
                message.inputs.add(name=name, datatype="FP32", shape=shape)
                if data is not None:
                    message.raw_input_contents.append(data)
            for parameter in ("kernel_size", "padding"):
                message.parameters[parameter].int64_param = 2**62
            yield Request(path, message.SerializeToString())


def requests() -> Iterator[Request]:
    for operation in OPERATIONS.values():
        example = operation.example
        names = [name for name in operation.tensors if name in example]
        for name, shape in itertools.product(names, SHAPES):
            yield from of_shape(operation.name, name, shape)
        given = [name for name in example if name not in operation.tensors]
        for parameter, value in itertools.product([*given, *PARAMETERS], VALUES):
            body = json.dumps({**example, parameter: value}).encode()
            yield Request(f"/{operation.name}", body)
        yield from messages(operation.name, names)


def status_of(request: Request, http: httpx.Client, grpc: H2Client) -> str:
    if request.path in (INFER, STREAM_INFER):
        stream = grpc.open(request.path, grpc_message(request.body), last=True)
        answer = grpc.answer(stream)
        assert answer.status not in ("", UNKNOWN, INTERNAL), (request, answer)
        assert b"(internal)" not in answer.data, (request, answer)
        return f"gRPC {answer.status}"
    headers = {"Content-Type": request.content_type}
    found = http.request(request.method, request.path, content=request.body, headers=headers)
    assert found.status_code < 500, (request, found.text)
    return f"HTTP {found.status_code}"


@pytest.mark.slow
@pytest.mark.timeout(1500)  # some 33,600 requests: minutes, and more on a busy machine
def test_no_shape_and_no_parameter_is_an_error_of_the_server(tmp_path: Path) -> None:
    limits = {"max_problem_bytes": "64MiB", "max_inflight_bytes": "128MiB"}
    seen: Counter[str] = Counter()
    with (
        processes(tmp_path, **limits) as server,
        attacked(server, more_bytes=200 * MIB),
        httpx.Client(base_url=server.http, timeout=60) as http,
        connected(server.grpc) as grpc,
    ):
        for request in requests():
            began_s = time.monotonic()
            seen[status_of(request, http, grpc)] += 1
            assert time.monotonic() - began_s < LONGEST_S, request
    print(f"{seen.total():,} requests: {dict(sorted(seen.items()))}")
    assert seen["HTTP 400"] > seen.total() / 3
