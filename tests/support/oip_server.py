"""A real server that speaks the Open Inference Protocol over HTTP and gRPC, on one event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvloop

from convgrad_service.backends.base import ServingBackend
from convgrad_service.engine.pipeline import Pipeline
from convgrad_service.grpc_api.server import GrpcServer
from convgrad_service.server.composition import create_app
from convgrad_service.server.http_server import ConvgradServer, listening_socket
from convgrad_service.server.settings import Settings

__all__ = ["OipServer", "serving_oip"]


@dataclass(frozen=True)
class OipServer:
    """Its addresses, and the objects inside it."""

    http: str
    grpc: str
    pipeline: Pipeline
    grpc_server: GrpcServer
    loop: asyncio.AbstractEventLoop


@contextmanager
def serving_oip(backend: ServingBackend, **settings: Any) -> Iterator[OipServer]:
    """A server with this backend and these settings until the block ends."""
    chosen = Settings(http_port=0, grpc_port=0, **{"log_level": "error", **settings})
    bound = listening_socket(chosen.http_host, 0)
    app = create_app(chosen, backend)
    server = ConvgradServer(app, chosen)
    grpc_server = GrpcServer(app.state.pipeline, chosen)
    running: list[tuple[int, asyncio.AbstractEventLoop]] = []
    started = threading.Event()

    async def serve() -> None:
        running.append((await grpc_server.start(), asyncio.get_running_loop()))
        serving = asyncio.create_task(server.serve([bound]))
        while not server.started:  # noqa: ASYNC110 - uvicorn tells nobody
            await asyncio.sleep(0.005)
        started.set()
        await serving
        await grpc_server.stop(1.0)

    thread = threading.Thread(target=uvloop.run, args=(serve(),))
    thread.start()
    try:
        while not started.wait(0.05):
            assert thread.is_alive(), "the server did not start"
        http_port = bound.getsockname()[1]
        host = chosen.http_host
        grpc_port, loop = running[0]
        yield OipServer(
            f"{host}:{http_port}", f"{host}:{grpc_port}", app.state.pipeline, grpc_server, loop
        )
    finally:
        server.should_exit = True
        thread.join(60)
        bound.close()
        assert not thread.is_alive(), "the server did not end"
