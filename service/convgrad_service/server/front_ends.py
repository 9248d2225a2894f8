"""The HTTP and gRPC front ends: in processes of their own, or in the hub's."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import uvloop

from convgrad_service.engine.hub import Engine
from convgrad_service.engine.ipc.messages import Listening
from convgrad_service.engine.ipc.remote_hub import RemoteHub
from convgrad_service.engine.memory.arena import Arena
from convgrad_service.engine.workers.inline_executor import InlineBackend
from convgrad_service.server.composition import (
    freeze_startup_objects,
    pipeline_on,
    prepare_process,
)
from convgrad_service.server.settings import Settings

if TYPE_CHECKING:
    from convgrad_service.server.http_server import ConvgradServer

__all__ = [
    "FrontStart",
    "grpc_main",
    "http_main",
    "serve_grpc",
    "serve_http",
    "serve_management",
]


class FrontStart(NamedTuple):
    """What a front end's process is started with.

    ``arena``, ``channel`` and ``connections`` are file descriptors: of the shared arena, of the
    messages to the hub, and of the socket on which the hub passes accepted connections.
    ``inline_backend`` computes small problems in the front end itself.
    """

    settings: Settings
    arena: int
    channel: int
    connections: int
    inline_backend: InlineBackend | None


def http_main(start: FrontStart) -> None:
    """Entry point of an HTTP front end's process: serve until the hub drains it."""
    prepare_process(start.settings)
    uvloop.run(_serve_http(start))


def grpc_main(start: FrontStart) -> None:
    """Entry point of the gRPC front end's process: serve until the hub drains it."""
    prepare_process(start.settings)
    uvloop.run(_serve_grpc(start))


async def serve_http(
    engine: Engine,
    settings: Settings,
    on_listening: Callable[[int], None],
    stop: asyncio.Event,
    *,
    listening: socket.socket | None = None,
    dispatched: socket.socket | None = None,
) -> None:
    """Serve HTTP in this process until ``stop`` is set, then let running requests finish.

    Connections are accepted from ``listening``, or received over ``dispatched``. ``on_listening``
    is called with the port, or 0 if connections are dispatched.
    """
    from convgrad_service.http_api.app import app_on
    from convgrad_service.server.http_server import ConvgradServer

    app = app_on(pipeline_on(engine, settings), settings)
    server = ConvgradServer(app, settings, on_listening=on_listening, dispatched=dispatched)
    await _serve_until(stop, server, [] if listening is None else [listening])


async def serve_management(
    engine: Engine,
    settings: Settings,
    on_listening: Callable[[int], None],
    stop: asyncio.Event,
    *,
    listening: socket.socket,
) -> None:
    """Serve health and metrics on the management port until ``stop`` is set."""
    from convgrad_service.http_api.app import management_app
    from convgrad_service.server.http_server import ConvgradServer

    app = management_app(pipeline_on(engine, settings))
    server = ConvgradServer(app, settings, on_listening=on_listening, tls=False)
    await _serve_until(stop, server, [listening])


async def _serve_until(
    stop: asyncio.Event, server: ConvgradServer, sockets: list[socket.socket]
) -> None:
    serving = asyncio.ensure_future(server.serve(sockets=sockets))
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await serving
    finally:
        stopping.cancel()
        serving.cancel()


async def _serve_http(start: FrontStart) -> None:
    stop = asyncio.Event()
    engine = await _remote_hub(start, stop)
    await serve_http(
        engine,
        start.settings,
        partial(_listening, engine),
        stop,
        dispatched=socket.socket(fileno=start.connections),
    )


async def serve_grpc(
    engine: Engine,
    settings: Settings,
    on_listening: Callable[[int], None],
    stop: asyncio.Event,
) -> None:
    """Serve gRPC in this process until ``stop`` is set, then let running calls finish.

    Raises
    ------
    OSError
        The gRPC port cannot be listened on.
    """
    from convgrad_service.grpc_api.server import GrpcServer

    pipeline = pipeline_on(engine, settings)
    server = GrpcServer(pipeline, settings)
    on_listening(await server.start())
    await stop.wait()
    pipeline.draining = True
    await server.stop(settings.shutdown_grace_s)


async def _serve_grpc(start: FrontStart) -> None:
    stop = asyncio.Event()
    engine = await _remote_hub(start, stop)
    try:
        await serve_grpc(engine, start.settings, partial(_listening, engine), stop)
    except OSError as error:
        engine.send(Listening(0, str(error)))
        await stop.wait()


def _listening(engine: RemoteHub, port: int) -> None:
    freeze_startup_objects()
    engine.send(Listening(port))


async def _remote_hub(start: FrontStart, stop: asyncio.Event) -> RemoteHub:
    # Without the hub a front end can neither answer nor refuse, so it exits.
    engine = RemoteHub(
        Arena(start.arena),
        drained=stop.set,
        lost=lambda: os._exit(1),
        inline_backend=start.inline_backend,
        heartbeat_timeout_s=start.settings.heartbeat_timeout_s,
    )
    await engine.open(socket.socket(fileno=start.channel))
    return engine
