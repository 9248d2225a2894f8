"""1 KiB both ways: a request's time beside what cannot be avoided, and what each shortcut saves.

Raw sockets and messages of bytes leave out what a client's library takes. All ways have their turns
in every round, as in `paths`.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc

from convgrad.wire import safetensors
from tests.perf.serve.paths import tritonclient_path
from tests.perf.serve.ready import METHOD
from tests.perf.serve.servers import Addresses, free_ports, process
from tests.perf.serve.shortcuts import INLINE, SHORTCUTS
from tests.perf.serve.sizes import OPERATION, SIZES

__all__ = ["remaining", "shortcut_rows"]

Way = Callable[[], object]
Record = dict[str, Any]
SIZE = SIZES["1 KiB"]
_STORED_BYTES = 4 * 2**20
# How often each way has its turn in a round: one call that does not count, and these.
_COUNTED = 20
_START = "HTTP/1.1 200"


def remaining(at: Addresses, rounds: int, logs: Path) -> list[Record]:
    """A line for each server and transport, slowest part first: the libraries, ours and Triton."""
    with ExitStack() as stack:
        http, messages = stack.enter_context(ready_answers(logs))
        request = infer_request()

        def raw(port: int) -> Way:
            return stack.enter_context(raw_http(port, request))

        def by_tritonclient(port: int) -> Way:
            client = tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{port}")
            stack.callback(client.close)
            array = np.zeros(SIZE.input_shape, np.float32)
            return tritonclient_path(tritonclient.grpc, client, SIZE, array)

        ways: dict[tuple[str, str], Way] = {
            ("library", "HTTP"): raw(http),
            ("event loop", "HTTP"): raw(at.ours_http),
            ("worker", "HTTP"): raw(at.workers_http),
            ("Triton", "HTTP"): raw(at.triton_http),
            ("library", "gRPC"): stack.enter_context(raw_grpc(messages)),
            ("event loop", "gRPC"): by_tritonclient(at.ours_grpc),
            ("worker", "gRPC"): by_tritonclient(at.workers_grpc),
            ("Triton", "gRPC"): by_tritonclient(at.triton_grpc),
        }
        found = timed(ways, rounds)
    return [
        {
            "bench": "serve_small",
            "part": "remaining",
            "server": server,
            "transport": transport,
            **_quartiles("ms", seconds),
            "samples": len(seconds),
        }
        for (server, transport), seconds in found.items()
    ]


def shortcut_rows(rounds: int, logs: Path) -> Iterator[Record]:
    """A line for each shortcut and form of a request: a server with it, and one without."""
    for name, shortcut in SHORTCUTS.items():
        requests = {"operation": operation_request(), "OIP": infer_request()}
        if shortcut.stores:
            requests, rounds_of = {"stored": store_request()}, max(1, rounds // 4)
        else:
            rounds_of = rounds
        words = ["by-workers"] if shortcut.by_worker else []
        less = ["by-workers"] if name == INLINE else ["--without", name]
        with ExitStack() as stack:
            ports = [
                stack.enter_context(our_server(each, logs / f"{name}-{label}.log"))
                for label, each in (("with", words), ("without", [*words, *less]))
            ]
            ways = {
                (form, label): stack.enter_context(raw_http(port, request))
                for form, request in requests.items()
                for label, port in zip(("with", "without"), ports, strict=True)
            }
            found = timed(ways, rounds_of)
        for form in requests:
            both = {label: found[form, label] for label in ("with", "without")}
            yield {
                "bench": "serve_small",
                "part": "shortcuts",
                "shortcut": name,
                "form": form,
                **_quartiles("ms", both["with"]),
                **_quartiles("without_ms", both["without"]),
                "samples": len(both["with"]),
            }


def timed(ways: Mapping[Any, Way], rounds: int) -> dict[Any, list[float]]:
    """Seconds of each way's calls."""
    seconds: dict[Any, list[float]] = {key: [] for key in ways}
    for _ in range(rounds):
        for key, way in ways.items():
            way()
            for _ in range(_COUNTED):
                began_s = time.perf_counter()
                way()
                seconds[key].append(time.perf_counter() - began_s)
    return seconds


def _quartiles(name: str, seconds: list[float]) -> Record:
    low, median, high = (round(each * 1e3, 4) for each in statistics.quantiles(seconds, n=4))
    return {name: median, f"{name.removesuffix('ms')}quartiles_ms": [low, high]}


@contextmanager
def ready_answers(logs: Path) -> Iterator[tuple[int, int]]:
    """Run the libraries alone; their HTTP and gRPC ports."""
    http, messages = free_ports(2)
    command = [sys.executable, "-m", "tests.perf.serve.ready", str(http), str(messages)]
    with process(command, os.environ, logs / "ready.log", f"http://127.0.0.1:{http}/"):
        yield http, messages


@contextmanager
def our_server(words: list[str], log: Path) -> Iterator[int]:
    """Run a server of ours; its HTTP port."""
    http, messages = free_ports(2)
    command = [sys.executable, "-m", "tests.perf.serve.ours", str(http), str(messages), *words]
    with process(command, os.environ, log, f"http://127.0.0.1:{http}/v2/health/ready"):
        yield http


@contextmanager
def raw_http(port: int, request: bytes) -> Iterator[Way]:
    """Send the same bytes each time, and read an answer of the length that its head says."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def call() -> None:
            connection.sendall(request)
            received = connection.recv(65536)
            while (end := received.find(b"\r\n\r\n")) < 0:
                received += connection.recv(65536)
            head = received[:end].decode("latin-1")
            if not head.startswith(_START):
                raise SystemExit(received.decode("latin-1"))
            length = head.lower().partition("content-length:")[2].partition("\r\n")[0]
            left = end + 4 + int(length) - len(received)
            while left > 0:
                left -= len(connection.recv(65536))

        yield call


@contextmanager
def raw_grpc(port: int) -> Iterator[Way]:
    """Send bytes and get bytes."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call, data = channel.unary_unary(METHOD), bytes(SIZE.input_bytes)
        yield lambda: call(data)


def infer_request() -> bytes:
    """1 KiB by the Open Inference Protocol, with its binary data extension."""
    head = {
        "inputs": [
            {
                "name": "input",
                "shape": SIZE.input_shape,
                "datatype": "FP32",
                "parameters": {"binary_data_size": SIZE.input_bytes},
            }
        ],
        "outputs": [{"name": "output", "parameters": {"binary_data": True}}],
        "parameters": {"kernel_size": SIZE.kernel_size},
    }
    text = json.dumps(head, separators=(",", ":")).encode()
    return _http_request(
        "POST",
        f"/v2/models/{OPERATION}/infer",
        text + bytes(SIZE.input_bytes),
        **{"Inference-Header-Content-Length": len(text)},
    )


def operation_request() -> bytes:
    """1 KiB to the operation's own endpoint, as a safetensors file."""
    array = np.zeros(SIZE.input_shape, np.float32)
    parameters = {"parameters": json.dumps({"kernel_size": SIZE.kernel_size})}
    body = b"".join(safetensors.encode({"input": array}, parameters))
    media_type = {"Content-Type": safetensors.MEDIA_TYPE}
    return _http_request("POST", f"/{OPERATION}", body, **media_type)


def store_request() -> bytes:
    """4 MiB to be stored, in place of those that were stored before."""
    body = b"".join(safetensors.encode({"input": np.zeros(_STORED_BYTES // 4, np.float32)}))
    return _http_request("PUT", "/tensors/input", body, **{"Content-Type": safetensors.MEDIA_TYPE})


def _http_request(method: str, path: str, body: bytes, **headers: object) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body
