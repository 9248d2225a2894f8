"""The HTTP and gRPC front ends: in processes of their own, or in the hub's."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, NamedTuple

import uvloop

from convgrad_service.engine.hub import Engine
from convgrad_service.engine.ipc.remote_hub import RemoteHub
from convgrad_service.engine.memory.arena import Arena
from convgrad_service.engine.workers.inline_executor import InlineBackend
from convgrad_service.server.composition import (
    freeze_startup_objects,
    pipeline_on,
    prepare_process,
)
from convgrad_service.server.settings import Settings

__all__ = ["FrontStart", "Serve", "front_main", "serve_grpc", "serve_http"]

Serve = Callable[..., Coroutine[Any, Any, None]]
"""`serve_http` or `serve_grpc`."""


class FrontStart(NamedTuple):
    """What a front end's process is started with.

    ``arena``, ``channel`` and ``connections`` are file descriptors: of the shared arena, of the
    messages to the hub, and of the socket on which the hub passes accepted connections to HTTP.
    ``inline_backend`` computes small problems in the front end itself.
    """

    serve: Serve
    settings: Settings
    arena: int
    channel: int
    connections: int
    inline_backend: InlineBackend | None


def front_main(start: FrontStart) -> None:
    """Entry point of a front end's process: serve until the hub drains it."""
    prepare_process(start.settings)
    uvloop.run(_serve(start))


async def _serve(start: FrontStart) -> None:
    stop = asyncio.Event()
    # Without the hub a front end can neither answer nor refuse, so it exits.
    engine = RemoteHub(
        Arena(start.arena),
        drained=stop.set,
        lost=lambda: os._exit(1),
        inline_backend=start.inline_backend,
        heartbeat_timeout_s=start.settings.heartbeat_timeout_s,
    )
    await engine.open(socket.socket(fileno=start.channel))
    listens = False

    def on_listening(port: int) -> None:
        nonlocal listens
        listens = True
        freeze_startup_objects()
        engine.notify("listening", port, None)

    serve = start.serve
    if serve is serve_http:
        serve = partial(serve, dispatched=socket.socket(fileno=start.connections))
    try:
        await serve(engine, start.settings, on_listening, stop)
    except OSError as error:
        if listens:
            raise
        engine.notify("listening", 0, str(error))
        await stop.wait()


async def serve_http(
    engine: Engine,
    settings: Settings,
    on_listening: Callable[[int], None],
    stop: asyncio.Event,
    *,
    listening: socket.socket | None = None,
    dispatched: socket.socket | None = None,
    management: bool = False,
) -> None:
    """Serve HTTP in this process until ``stop`` is set, then let running requests finish.

    Connections are accepted from ``listening``, or received over ``dispatched``. ``on_listening``
    is called with the port, or 0 if connections are dispatched. The ``management`` port serves
    health and metrics only.
    """
    from convgrad_service.http_api.app import app_on, management_app
    from convgrad_service.server.http_server import ConvgradServer

    pipeline = pipeline_on(engine, settings)
    server = ConvgradServer(
        management_app(pipeline) if management else app_on(pipeline, settings),
        settings,
        on_listening=on_listening,
        dispatched=dispatched,
        tls=not management,
    )
    sockets = [] if listening is None else [listening]
    serving = asyncio.ensure_future(server.serve(sockets=sockets))
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await serving
    finally:
        stopping.cancel()
        serving.cancel()


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
