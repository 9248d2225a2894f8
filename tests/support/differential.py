"""One request over every transport and topology, and everything that can be seen of how it went.

`ask` sends it and returns a `Seen`: what the client got, and what the server counted and logged.
Whatever may differ between two equal requests (times, ids, dates) is taken out of it, so that two
of them can be compared whole.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
from numpy.typing import NDArray
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.grpc import service_pb2, service_pb2_grpc

from convgrad.errors import DeadlineExceeded
from convgrad.wire import safetensors
from convgrad_service.backends.base import Outcome
from convgrad_service.backends.cpu import CpuBackend
from convgrad_service.engine.hub import Hub
from convgrad_service.engine.workers.inline_executor import InlineBackend
from convgrad_service.problems import Problem
from tests.arrays import Arrays
from tests.support.oip_server import serving_oip
from tests.support.tree_server import serving_tree, until

__all__ = [
    "BREAK",
    "HANG",
    "TOPOLOGIES",
    "TRANSPORTS",
    "Asked",
    "Commanded",
    "Running",
    "Seen",
    "running",
]

HANG, BREAK = 4321.0, 1234.0
"""A first element that has the backend wait until nobody wants the answer, or fail."""
TOPOLOGIES = ("embedded", "workers", "two front ends")
TRANSPORTS = ("json", "safetensors", "oip-http", "oip-grpc", "shm-http", "shm-grpc")

_PROTOCOL = {"float32": "FP32", "float64": "FP64", "int64": "INT64", "int32": "INT32"}
_LOG = re.compile(r"(\w+)=(\"[^\"]*\"|\S+)")
_REPORTED = ("backend", "kernel", "flops", "bytes", "pieces", "workspace_bytes", "precision")


class Commanded(CpuBackend):
    """Computes on one thread, unless the first element of a tensor says otherwise."""

    name = "commanded"

    def __init__(self, _: int = 0) -> None:
        super().__init__(threads=1)

    def run(
        self,
        problem: Problem,
        tensors: Mapping[str, NDArray[Any]],
        cancelled: threading.Event | None = None,
        out: Mapping[str, NDArray[Any]] | None = None,
    ) -> Outcome:
        command = float(next(iter(tensors.values())).flat[0])
        if command == BREAK:
            raise RuntimeError("told to break")
        if command == HANG and cancelled is not None:
            cancelled.wait(60)
            raise DeadlineExceeded("nobody waits")
        return super().run(problem, tensors, cancelled, out)


@dataclass(frozen=True)
class Asked:
    """A request as every transport can say it. ``timeout_s`` is the client's own deadline."""

    operation: str
    tensors: Arrays
    parameters: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None
    outputs: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """Dtype and shape of each, for those that go to shared memory."""


@dataclass(frozen=True)
class Seen:
    """``surface`` is what one transport alone has; everything else is the same in all."""

    code: str
    detail: str | None
    comes_again: bool
    outputs: Mapping[str, tuple[str, tuple[int, ...], bytes]]
    report: Mapping[str, Any]
    stages: tuple[str, ...]
    counted: tuple[tuple[str, tuple[tuple[str, str], ...], float], ...]
    logged: Mapping[str, str]
    surface: Any = None

    def shared(self, *, early: bool = False) -> dict[str, Any]:
        """What must be the same over every transport.

        Over gRPC a message is read before it is known which operation it is for; ``early`` leaves
        out what follows from that, for a request that is refused before HTTP's body is read.
        """
        shared = {
            "code": self.code,
            "detail": self.detail,
            "comes again": self.comes_again,
            "outputs": self.outputs,
            "report": self.report,
            "logged code": self.logged["code"],
        }
        if early:
            return shared
        own = ("method", "path", "status", "received_bytes")
        return shared | {
            "stages": self.stages,
            "counted": tuple(
                (name, tuple(pair for pair in labels if pair[0] != "transport"), value)
                for name, labels, value in self.counted
                if "received_bytes" not in name
            ),
            "logged": {name: value for name, value in self.logged.items() if name not in own},
        }


@dataclass
class Running:
    """A server of one topology, with its log."""

    http: tuple[str, int]
    grpc: str
    hub: Hub
    log: Callable[[str], list[str]]
    client: httpx.Client
    stub: Any

    def ask(self, transport: str, asked: Asked, *, leave: bool = False) -> Seen:
        """Send one request; with ``leave`` the client goes away once it is being computed."""
        identity = uuid.uuid4().hex
        before = self._counts()
        send = {
            "json": self._json,
            "safetensors": self._safetensors,
            "oip-http": self._oip_http,
            "oip-grpc": self._oip_grpc,
            "shm-http": self._shm_http,
            "shm-grpc": self._shm_grpc,
        }[transport]
        found = send(identity, asked, leave)
        counted = self._counted(before)
        logged = self._logged(identity)
        surface = found.pop("surface", None)
        code = logged["code"]
        # How long an answer is depends on the digits of the seconds in its report.
        if "sent_bytes" in found:
            assert found.pop("sent_bytes") == int(logged["sent_bytes"]), logged
        del logged["sent_bytes"]
        counted = tuple(each for each in counted if "sent_bytes" not in each[0])
        if "code" in found:
            assert found.pop("code") == code
        return Seen(
            code=code,
            detail=found["detail"].replace(identity, "ID") if "detail" in found else None,
            comes_again=found.get("comes_again", False),
            outputs=found.get("outputs", {}),
            report=found.get("report", {}),
            stages=found.get("stages", ()),
            counted=counted,
            logged=logged,
            surface=surface,
        )

    @contextlib.contextmanager
    def busy(self, asked: Asked, count: int) -> Iterator[None]:
        """While so many requests that hang are in flight."""
        sockets = []
        try:
            for number in range(count):
                sockets.append(self._sent(*_json_request(uuid.uuid4().hex, asked)))
                until(lambda number=number: self._in_flight() == number + 1)  # type: ignore[misc]
            yield
        finally:
            for each in sockets:
                each.close()
            until(lambda: self._in_flight() == 0)

    def _in_flight(self) -> int:
        return self.hub.schedule.running + self.hub.schedule.waiting

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
                until(lambda: self.hub.schedule.running > 0)
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
            until(lambda: self.hub.schedule.running > 0)
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

    def _counts(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        counts = {}
        for family in text_string_to_metric_families(self.client.get("/metrics").text):
            if family.type == "gauge" or not family.name.startswith("convgrad_"):
                continue
            for sample in family.samples:
                if not sample.name.endswith(("_seconds_sum", "_bucket", "_created")):
                    counts[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
        return counts

    def _counted(
        self, before: Mapping[Any, float]
    ) -> tuple[tuple[str, tuple[tuple[str, str], ...], float], ...]:
        """What the server counted more than before, once it has counted a request."""
        end_s = time.monotonic() + 60
        while True:
            now = self._counts()
            more = {key: value - before.get(key, 0.0) for key, value in now.items()}
            changed = {key: value for key, value in more.items() if value}
            if any(name == "convgrad_requests_total" for name, _ in changed):
                return tuple(sorted((*key, value) for key, value in changed.items()))
            assert time.monotonic() < end_s, "no request was counted"
            time.sleep(0.01)

    def _logged(self, identity: str) -> dict[str, str]:
        lines: list[str] = []

        def found() -> bool:
            lines[:] = [line for line in self.log(identity) if "total_s=" in line]
            return bool(lines)

        until(found)
        assert len(lines) == 1, lines
        fields = {name: value.strip('"') for name, value in _LOG.findall(lines[0])}
        del fields["request_id"]
        times = tuple(sorted(name for name in fields if name.endswith("_s")))
        return {name: fields[name] for name in fields if name not in times} | {"times": str(times)}


@contextlib.contextmanager
def running(topology: str, directory: Path, **settings: Any) -> Iterator[Running]:
    """A server of one topology with the backend `Commanded`, whose log can be read."""
    chosen = {"system_shared_memory": True, "log_level": "info", **settings}
    with contextlib.ExitStack() as held:
        log = held.enter_context(_captured(directory / f"{uuid.uuid4().hex}.log"))
        if topology == "embedded":
            server = held.enter_context(serving_oip(Commanded(), **chosen))
            url, grpc_at, hub = f"http://{server.http}", server.grpc, server.pipeline.engine
            assert isinstance(hub, Hub)
        else:
            tree = held.enter_context(
                serving_tree(
                    Commanded,
                    slots=chosen.get("compute_slots", 2),
                    beside=InlineBackend("commanded", Commanded),
                    http_workers=1 if topology == "workers" else 2,
                    **chosen,
                )
            )
            url, grpc_at, hub = tree.url, tree.grpc, tree.tree.hub
        client = held.enter_context(httpx.Client(base_url=url, timeout=60))
        channel = held.enter_context(grpc.insecure_channel(grpc_at))
        host, port = url.removeprefix("http://").split(":")
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        yield Running((host, int(port)), grpc_at, hub, log, client, stub)


@contextlib.contextmanager
def _captured(path: Path) -> Iterator[Callable[[str], list[str]]]:
    """The log lines that hold a text: of this process, and of children that begin meanwhile."""
    access = logging.getLogger("convgrad.access")
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(message)s"))
    level = access.level
    access.addHandler(handler)
    access.setLevel(logging.INFO)
    kept = os.dup(2)
    with path.open("ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield lambda text: [line for line in path.read_text().splitlines() if text in line]
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        access.removeHandler(handler)
        access.setLevel(level)
        handler.close()


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
