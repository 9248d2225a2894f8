"""A real server on a free loopback port, in a thread of the test's process or in its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from convgrad.contract import OPERATIONS
from convgrad.wire import safetensors
from convgrad_service.backends.base import ServingBackend
from convgrad_service.engine.hub import Hub
from convgrad_service.engine.pipeline import Pipeline
from convgrad_service.server.composition import create_app
from convgrad_service.server.http_server import ConvgradServer, listening_socket
from convgrad_service.server.settings import Settings

__all__ = [
    "EXAMPLE",
    "JSON",
    "SAFETENSORS",
    "LiveServer",
    "binary_example",
    "serving",
    "serving_process",
]

JSON = "application/json"
SAFETENSORS = "application/vnd.safetensors"
EXAMPLE = json.dumps(OPERATIONS["conv_bwd_data"].example).encode()
"""A JSON body for /conv_bwd_data that works."""


@dataclass(frozen=True)
class LiveServer:
    """Its addresses, and the objects inside it."""

    host: str
    port: int
    pipeline: Pipeline
    hub: Hub
    server: ConvgradServer

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def post(
        self,
        content: bytes = EXAMPLE,
        *,
        path: str = "/conv_bwd_data",
        headers: Mapping[str, str] | None = None,
    ) -> httpx.Response:
        """Send a JSON request on its own connection; ``headers`` may replace Content-Type."""
        with httpx.Client(base_url=self.url, timeout=60) as client:
            return client.post(
                path, content=content, headers={"Content-Type": JSON, **(headers or {})}
            )

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> httpx.Response:
        with httpx.Client(base_url=self.url, timeout=60) as client:
            return client.get(path, headers=headers)

    def connect(self, timeout_s: float = 60) -> socket.socket:
        """A raw connection, for what no HTTP client would send."""
        return socket.create_connection((self.host, self.port), timeout_s)

    def waits_s(self) -> list[float]:
        """How long each connection that sends nothing has waited for a request."""
        since = [each.waiting_since_s for each in self.server._connections()]
        return [time.monotonic() - each_s for each_s in since if each_s is not None]

    def wait_until_idle(self, timeout_s: float = 60) -> None:
        """Until no request holds memory or a slot."""
        until = time.monotonic() + timeout_s
        hub = self.hub
        while self.held_bytes or hub.scheduler.running or hub.scheduler.waiting:
            assert time.monotonic() < until, (self.held_bytes, hub.scheduler.running)
            time.sleep(0.005)

    @property
    def held_bytes(self) -> int:
        """The bytes of the arena that requests hold."""
        return self.hub.memory.used_bytes + self.hub.texts.used_bytes


@contextmanager
def serving(backend: ServingBackend, **settings: Any) -> Iterator[LiveServer]:
    """A server with this backend and these settings until the block ends."""
    chosen = Settings(http_port=0, **settings)
    bound = listening_socket(chosen.http_host, 0)
    app = create_app(chosen, backend)
    server = ConvgradServer(app, chosen)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.005)
        host, port = bound.getsockname()[:2]
        plane = app.state.pipeline
        yield LiveServer(host, port, plane, plane.engine, server)
    finally:
        server.should_exit = True
        thread.join(60)
        bound.close()
        assert not thread.is_alive(), "the server did not end"


@contextmanager
def serving_process(directory: Path, environment: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """Address and process id of ``convgrad serve`` with the real backend, in its own process."""
    port_file = directory / "port"
    code = "from convgrad_service.server.command import serve; raise SystemExit(serve())"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "--port", "0", "--port-file", str(port_file)],
        env={
            **os.environ,
            "CONVGRAD_LOG_LEVEL": "error",
            "CONVGRAD_GRPC_PORT": "0",
            **environment,
        },
        stdout=subprocess.DEVNULL,
    )
    try:
        while not port_file.exists():
            assert process.poll() is None  # how long it takes is bounded by pytest's timeout
            time.sleep(0.02)
        yield f"http://127.0.0.1:{port_file.read_text().strip()}", process.pid
        assert process.poll() is None, "the server died"
    finally:
        process.terminate()
        process.wait(60)


def binary_example(tensors: Mapping[str, NDArray[Any]] | None = None, **parameters: Any) -> bytes:
    """A safetensors body for /conv_bwd_data."""
    chosen = tensors or {
        "grad_output": np.ones((1, 1, 2, 2), np.float32),
        "weight": np.ones((1, 1, 2, 2), np.float32),
    }
    return b"".join(safetensors.encode(chosen, {"parameters": json.dumps(parameters)}))
