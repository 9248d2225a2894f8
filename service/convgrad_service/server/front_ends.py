"""The HTTP and gRPC front ends: in processes of their own, or in the hub's."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import uvloop

from convgrad_service.engine.engine import Engine
from convgrad_service.engine.ipc.remote_hub import RemoteHub
from convgrad_service.engine.memory.arena import Arena
from convgrad_service.engine.options import InlineBackend
from convgrad_service.server.composition import freeze_startup_objects, pipeline_on, prepare_process
from convgrad_service.server.settings import Settings

Serve = Callable[..., Coroutine[Any, Any, None]]
"""`serve_http` or `serve_grpc`."""


def front_main(settings: Settings, serve: Serve, *rest: Any) -> None:
    """Entry point of a front end's process: serve until the hub drains it."""
    prepare_process(settings)
    uvloop.run(_serve(settings, serve, *rest))


async def _serve(
    settings: Settings,
    serve: Serve,
    inline_backend: InlineBackend | None,
    arena: int,
    channel: int,
    connections: int,
) -> None:
    """Serve in a process of its own.

    ``inline_backend`` computes small problems in the front end itself. The last three are
    descriptors: of the arena, of the messages to the hub, and of the socket on which the hub
    passes accepted connections to HTTP.
    """
    stop = asyncio.Event()
    # Without the hub a front end can neither answer nor refuse, so it exits.
    engine = RemoteHub(
        Arena(arena),
        drained=stop.set,
        lost=lambda: os._exit(1),
        inline_backend=inline_backend,
        heartbeat_timeout_s=settings.heartbeat_timeout_s,
    )
    await engine.open(socket.socket(fileno=channel))
    listens = False

    def on_listening(port: int) -> None:
        nonlocal listens
        listens = True
        freeze_startup_objects()
        engine.notify("listening", port, None)

    if serve is serve_http:
        serve = partial(serve, source=socket.socket(fileno=connections))
    try:
        await serve(engine, settings, on_listening, stop)
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
    source: socket.socket,
    management: bool = False,
) -> None:
    """Serve HTTP in this process until ``stop`` is set, then let running requests finish.

    Connections come from ``source``, see `ConnectionSource`. ``on_listening`` is called with the
    port, or 0 if connections are dispatched. The ``management`` port serves health and metrics
    only.
    """
    from convgrad_service.http_api.app import app_on, management_app
    from convgrad_service.server.http_server import ConvgradServer

    pipeline = pipeline_on(engine, settings)
    server = ConvgradServer(
        management_app(pipeline) if management else app_on(pipeline, settings),
        settings,
        on_listening=on_listening,
        tls=not management,
    )
    serving = asyncio.ensure_future(server.serve(sockets=[source]))
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await asyncio.wait([serving])
    finally:
        stopping.cancel()
        await server.end(serving)
    await serving


async def serve_grpc(
    engine: Engine,
    settings: Settings,
    on_listening: Callable[[int], None],
    stop: asyncio.Event,
    *,
    shared_port: int | None = None,
) -> None:
    """Serve gRPC in this process until ``stop`` is set, then let running calls finish.

    It listens on the ``shared_port`` with SO_REUSEPORT, or on that of the settings alone.

    Raises
    ------
    OSError
        The gRPC port cannot be listened on.
    """
    from convgrad_service.grpc_api.server import GrpcServer

    pipeline = pipeline_on(engine, settings)
    server = GrpcServer(pipeline, settings, shared_port)
    on_listening(await server.start())
    try:
        await stop.wait()
        pipeline.draining = True
        await server.stop(settings.shutdown_grace_s)
    except asyncio.CancelledError:
        await server.stop(0.0)
        raise
