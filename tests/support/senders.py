"""One request as every transport says it, and what its client gets."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2

from convgrad.wire import safetensors
from convgrad_service.engine.hub import Hub
from tests.support.numerics.arrays import Arrays
from tests.support.tree_server import until

__all__ = ["TRANSPORTS", "Asked", "Sender"]

TRANSPORTS = ("json", "safetensors", "oip-http", "oip-grpc", "shm-http", "shm-grpc")

_PROTOCOL = {"float32": "FP32", "float64": "FP64", "int64": "INT64", "int32": "INT32"}
_REPORTED = ("backend", "kernel", "flops", "bytes", "pieces", "workspace_bytes")


@dataclass(frozen=True)
class Asked:
    """A request as every transport can say it. ``timeout_s`` is the client's own deadline."""

    operation: str
    tensors: Arrays
    parameters: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None
    outputs: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """Dtype and shape of each, for those that go to shared memory."""


@dataclass
class Sender:
    """Sends requests to one server, whose hub lies in this process."""

    http: tuple[str, int]
    hub: Hub
    client: httpx.Client
    stub: Any

    def send(
        self, transport: str, identity: str, asked: Asked, *, leave: bool = False
    ) -> dict[str, Any]:
        """What the client got; with ``leave`` it goes away once the request is being computed."""
        send = {
            "json": self._json,
            "safetensors": self._safetensors,
            "oip-http": self._oip_http,
            "oip-grpc": self._oip_grpc,
            "shm-http": self._shm_http,
            "shm-grpc": self._shm_grpc,
        }[transport]
        return send(identity, asked, leave)

    def begin(self, identity: str, asked: Asked) -> socket.socket:
        """Send a request as JSON; the connection on which its answer comes."""
        return self._sent(*_json_request(identity, asked))

    def _sent(self, path: str, headers: Mapping[str, str], body: bytes) -> socket.socket:
        # Head and body in one write, as clients that care for latency send them.
        lines = {"Host": "test", "Content-Length": str(len(body)), **headers}
        head = f"POST {path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in lines.items())
        connection = socket.create_connection(self.http, 60)
        connection.sendall(head.encode() + b"\r\n" + body)
        return connection

    def _post(
        self, path: str, headers: Mapping[str, str], body: bytes, leave: bool
    ) -> tuple[int, list[tuple[str, str]], bytes] | None:
        connection = self._sent(path, headers, body)
        with contextlib.closing(connection):
            if leave:
                until(lambda: self.hub.scheduler.running > 0)
                return None
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            return answer.status, answer.getheaders(), answer.read()

    def _over_http(
        self,
        path: str,
        headers: Mapping[str, str],
        body: bytes,
        leave: bool,
        read: Callable[[Mapping[str, str], bytes], dict[str, Any]],
    ) -> dict[str, Any]:
        answer = self._post(path, headers, body, leave)
        if answer is None:
            return {}
        status, pairs, content = answer
        given = {name.lower(): value for name, value in pairs}
        assert given["x-request-id"] == headers["X-Request-Id"]
        names = sorted(name for name, _ in pairs)
        kept = {name: given[name] for name in ("content-type", "vary") if name in given}
        found: dict[str, Any] = {"surface": (status, names, kept)}
        found["stages"] = _stages(given["server-timing"])
        found["sent_bytes"] = len(content)
        if status == 200:
            return found | read(given, content)
        problem = json.loads(content)
        assert problem["status"] == status
        return found | {
            "code": problem["code"],
            "detail": problem["detail"],
            "comes_again": "retry-after" in given,
        }

    def _json(self, identity: str, asked: Asked, leave: bool) -> dict[str, Any]:
        def read(_: Mapping[str, str], content: bytes) -> dict[str, Any]:
            answer = json.loads(content)
            outputs = {
                name: _array(np.array(value["values"], value["dtype"]))
                for name, value in answer.items()
                if isinstance(value, dict) and "values" in value
            }
            return {"outputs": outputs, "report": _report(answer["report"])}

        return self._over_http(*_json_request(identity, asked), leave, read)

    def _safetensors(self, identity: str, asked: Asked, leave: bool) -> dict[str, Any]:
        def read(_: Mapping[str, str], content: bytes) -> dict[str, Any]:
            size = int.from_bytes(content[:8], "little")
            head = json.loads(content[8 : 8 + size])
            report = json.loads(head.pop("__metadata__")["report"])
            names = {"F32": "float32", "F64": "float64", "I64": "int64", "I32": "int32"}
            outputs = {}
            for name, each in head.items():
                start, end = each["data_offsets"]
                raw = content[8 + size + start : 8 + size + end]
                outputs[name] = (names[each["dtype"]], tuple(each["shape"]), raw)
            return {"outputs": outputs, "report": _report(report)}

        headers = {**_headers(identity, asked), "Content-Type": safetensors.MEDIA_TYPE}
        metadata = {"parameters": json.dumps(dict(asked.parameters))}
        body = b"".join(safetensors.encode(asked.tensors, metadata))
        return self._over_http(f"/{asked.operation}", headers, body, leave, read)

    def _oip_http(self, identity: str, asked: Asked, leave: bool) -> dict[str, Any]:
        described, data = [], []
        for name, array in asked.tensors.items():
            raw = np.ascontiguousarray(array).tobytes()
            tensor = _described(name, array) | {"parameters": {"binary_data_size": len(raw)}}
            described.append(tensor)
            data.append(raw)
        parameters = {"binary_data_output": True, **_oip_parameters(asked)}
        return self._infer_http(identity, asked, described, data, parameters, [], leave)

    def _infer_http(
        self,
        identity: str,
        asked: Asked,
        inputs: list[Any],
        data: list[bytes],
        parameters: Mapping[str, Any],
        outputs: list[Any],
        leave: bool,
    ) -> dict[str, Any]:
        def read(given: Mapping[str, str], content: bytes) -> dict[str, Any]:
            size = int(given.get("inference-header-content-length", len(content)))
            head, at = json.loads(content[:size]), size
            assert head["id"] == identity
            outputs = {}
            for tensor in head["outputs"]:
                length = tensor.get("parameters", {}).get("binary_data_size", 0)
                kind = _numpy_name(tensor["datatype"])
                outputs[tensor["name"]] = (kind, tuple(tensor["shape"]), content[at : at + length])
                at += length
            return {"outputs": outputs, "report": _report(head["parameters"])}

        message: dict[str, Any] = {"id": identity, "inputs": inputs, "parameters": parameters}
        if outputs:
            message["outputs"] = outputs
        text = json.dumps(message, separators=(",", ":")).encode()
        headers = _headers(identity, asked)
        if data:
            headers["Inference-Header-Content-Length"] = str(len(text))
        path = f"/v2/models/{asked.operation}/infer"
        return self._over_http(path, headers, text + b"".join(data), leave, read)

    def _oip_grpc(self, identity: str, asked: Asked, leave: bool) -> dict[str, Any]:
        message = service_pb2.ModelInferRequest(model_name=asked.operation, id=identity)
        for name, array in asked.tensors.items():
            message.inputs.add(name=name, datatype=_datatype(array), shape=array.shape)
            message.raw_input_contents.append(np.ascontiguousarray(array).tobytes())
        _add_parameters(message.parameters, _oip_parameters(asked))
        return self._infer_grpc(identity, message, leave)

    def _infer_grpc(self, identity: str, message: Any, leave: bool) -> dict[str, Any]:
        metadata = (("x-request-id", identity),)
        # A deadline of gRPC's own would end the call at the client, before the server's answer.
        call = self.stub.ModelInfer.future(message, timeout=60, metadata=metadata)
        if leave:
            until(lambda: self.hub.scheduler.running > 0)
            call.cancel()
            return {}
        with contextlib.suppress(grpc.RpcError):
            call.result()
        trailers = dict(call.trailing_metadata())
        assert trailers["x-request-id"] == identity
        found: dict[str, Any] = {
            "surface": (call.code().name, sorted(trailers)),
            "stages": _stages(trailers["server-timing"]),
        }
        if call.code() is not grpc.StatusCode.OK:
            return found | {
                "code": trailers["convgrad-code"],
                "detail": call.details(),
                "comes_again": "retry-after" in trailers,
            }
        answer = call.result()
        assert answer.id == identity
        outputs = {
            tensor.name: (_numpy_name(tensor.datatype), tuple(tensor.shape), raw)
            for tensor, raw in zip(answer.outputs, answer.raw_output_contents, strict=True)
        }
        report = {}
        for name, value in answer.parameters.items():
            report[name] = getattr(value, value.WhichOneof("parameter_choice"))
        return found | {"outputs": outputs, "report": _report(report)}

    def _shm_http(self, identity: str, asked: Asked, leave: bool) -> dict[str, Any]:
        with self._region(asked) as (name, places, view):
            inputs = [
                _described(tensor, array) | {"parameters": _in_region(name, places[tensor])}
                for tensor, array in asked.tensors.items()
            ]
            outputs = [
                {"name": output, "parameters": _in_region(name, places[output])}
                for output in asked.outputs
            ]
            found = self._infer_http(
                identity, asked, inputs, [], _oip_parameters(asked), outputs, leave
            )
            return _from_region(found, asked, places, view)

    def _shm_grpc(self, identity: str, asked: Asked, leave: bool) -> dict[str, Any]:
        with self._region(asked) as (name, places, view):
            message = service_pb2.ModelInferRequest(model_name=asked.operation, id=identity)
            for tensor, array in asked.tensors.items():
                added = message.inputs.add(
                    name=tensor, datatype=_datatype(array), shape=array.shape
                )
                _add_parameters(added.parameters, _in_region(name, places[tensor]))
            for output in asked.outputs:
                added = message.outputs.add(name=output)
                _add_parameters(added.parameters, _in_region(name, places[output]))
            _add_parameters(message.parameters, _oip_parameters(asked))
            found = self._infer_grpc(identity, message, leave)
            return _from_region(found, asked, places, view)

    @contextlib.contextmanager
    def _region(self, asked: Asked) -> Iterator[tuple[str, Any, memoryview]]:
        """A registered region with the request's inputs in it and places for its outputs."""
        # One name for all requests alike: what they say is then the same to the byte.
        name = "differential"
        places: dict[str, tuple[int, int]] = {}
        end = 0
        content = {tensor: array.tobytes() for tensor, array in asked.tensors.items()}
        for output, (dtype, shape) in asked.outputs.items():
            content[output] = bytes(np.dtype(dtype).itemsize * int(np.prod(shape)))
        for tensor, raw in content.items():
            places[tensor] = end, len(raw)
            end += -(-len(raw) // 64) * 64
        path = Path("/dev/shm") / f"differential_{os.getpid()}"  # noqa: S108 - what is tested
        path.write_bytes(b"".join(raw.ljust(-(-len(raw) // 64) * 64) for raw in content.values()))
        registered = f"/v2/systemsharedmemory/region/{name}"
        body = {"key": path.name, "offset": 0, "byte_size": end}
        try:
            self.client.post(f"{registered}/register", json=body).raise_for_status()
            yield name, places, memoryview(np.memmap(path, np.uint8, "r"))
        finally:
            self.client.post(f"{registered}/unregister").raise_for_status()
            path.unlink()


def _headers(identity: str, asked: Asked) -> dict[str, str]:
    headers = {"X-Request-Id": identity}
    if asked.timeout_s is not None:
        headers["X-Request-Timeout"] = str(asked.timeout_s)
    return headers


def _json_request(identity: str, asked: Asked) -> tuple[str, dict[str, str], bytes]:
    tensors = {
        name: {"values": array.tolist(), "dtype": array.dtype.name}
        for name, array in asked.tensors.items()
    }
    body = {**tensors, **asked.parameters, "response": "values"}
    headers = {**_headers(identity, asked), "Content-Type": "application/json"}
    return f"/{asked.operation}", headers, json.dumps(body).encode()


def _oip_parameters(asked: Asked) -> dict[str, Any]:
    """Scalars as they are, the rest as JSON text; and the deadline, in microseconds."""
    parameters = {
        name: json.dumps(value) if isinstance(value, list | tuple | dict) else value
        for name, value in asked.parameters.items()
    }
    if asked.timeout_s is not None:
        parameters["timeout"] = round(asked.timeout_s * 1e6)
    return parameters


def _add_parameters(target: Any, parameters: Mapping[str, Any]) -> None:
    for name, value in parameters.items():
        kind = {bool: "bool_param", int: "int64_param", float: "double_param"}.get(type(value))
        setattr(target[name], kind or "string_param", value)


def _in_region(name: str, place: tuple[int, int]) -> dict[str, Any]:
    return {
        "shared_memory_region": name,
        "shared_memory_offset": place[0],
        "shared_memory_byte_size": place[1],
    }


def _from_region(
    found: dict[str, Any], asked: Asked, places: Mapping[str, tuple[int, int]], view: memoryview
) -> dict[str, Any]:
    """With the outputs' bytes from where they were written."""
    outputs = {}
    for name, (dtype, shape, sent) in found.get("outputs", {}).items():
        assert sent == b""
        start, size = places[name]
        outputs[name] = dtype, shape, bytes(view[start : start + size])
    return {**found, "outputs": outputs}


def _described(name: str, array: NDArray[Any]) -> dict[str, Any]:
    return {"name": name, "datatype": _datatype(array), "shape": list(array.shape)}


def _datatype(array: NDArray[Any]) -> str:
    return _PROTOCOL[array.dtype.name]


def _numpy_name(datatype: str) -> str:
    return next(name for name, known in _PROTOCOL.items() if known == datatype)


def _array(array: NDArray[Any]) -> tuple[str, tuple[int, ...], bytes]:
    return array.dtype.name, array.shape, array.tobytes()


def _report(given: Mapping[str, Any]) -> dict[str, Any]:
    assert given["compute_s"] > 0
    return {name: given[name] for name in _REPORTED if name in given}


def _stages(server_timing: str) -> tuple[str, ...]:
    names = [part.split(";")[0].strip() for part in server_timing.split(",")]
    assert names[-1] == "total"
    return tuple(names[:-1])
