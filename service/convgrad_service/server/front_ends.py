"""The front ends' own processes: HTTP and gRPC, each a pipeline on the hub's engine."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import uvloop

from convgrad_service.engine.hub import Engine
from convgrad_service.engine.ipc.messages import Listening
from convgrad_service.engine.ipc.remote_hub import RemoteHub
from convgrad_service.engine.memory.arena import Arena
from convgrad_service.engine.workers.inline_executor import InlineBackend
from convgrad_service.server.composition import pipeline_on, prepare_process
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
    """What a front end needs to begin; the numbers are descriptors that it was given.

    Over ``connections`` those come that the hub has accepted for it. ``beside`` is what it may
    compute small problems with.
    """

    settings: Settings
    arena: int
    channel: int
    connections: int
    beside: InlineBackend | None


def http_main(start: FrontStart) -> None:
    """Serve HTTP on the connections that the hub hands over, until it says otherwise."""
    prepare_process(start.settings)
    uvloop.run(_serve_http(start))


def grpc_main(start: FrontStart) -> None:
    """Serve gRPC until the hub says otherwise."""
    prepare_process(start.settings)
    uvloop.run(_serve_grpc(start))


async def serve_http(
    engine: Engine,
    settings: Settings,
    announce: Callable[[int], None],
    ended: asyncio.Event,
    *,
    listening: socket.socket | None = None,
    dealt: socket.socket | None = None,
) -> None:
    """Serve HTTP in this process until ``ended`` is set; then what runs may finish.

    It listens itself, or gets the connections that others have ``dealt`` it.
    """
    from convgrad_service.http_api.app import app_on
    from convgrad_service.server.http_server import ConvgradServer

    app = app_on(pipeline_on(engine, settings), settings)
    server = ConvgradServer(app, settings, announce=announce, signals=False, dealt=dealt)
    await _until_ended(server, [] if listening is None else [listening], ended)


async def serve_management(
    engine: Engine,
    settings: Settings,
    announce: Callable[[int], None],
    ended: asyncio.Event,
    *,
    listening: socket.socket,
) -> None:
    """Answer health and metrics on a port of their own until ``ended`` is set."""
    from convgrad_service.http_api.app import management_app
    from convgrad_service.server.http_server import ConvgradServer

    app = management_app(pipeline_on(engine, settings))
    server = ConvgradServer(app, settings, announce=announce, signals=False, plain=True)
    await _until_ended(server, [listening], ended)


async def _until_ended(
    server: ConvgradServer, sockets: list[socket.socket], ended: asyncio.Event
) -> None:
    serving = asyncio.ensure_future(server.serve(sockets=sockets))
    finishing = asyncio.ensure_future(ended.wait())
    try:
        await asyncio.wait({serving, finishing}, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await serving
    finally:
        finishing.cancel()
        serving.cancel()


async def _serve_http(start: FrontStart) -> None:
    ended = asyncio.Event()
    engine = await _engine(start, ended)
    dealt = socket.socket(fileno=start.connections)
    await serve_http(
        engine, start.settings, lambda port: engine.send(Listening(port)), ended, dealt=dealt
    )


async def serve_grpc(
    engine: Engine,
    settings: Settings,
    announce: Callable[[int], None],
    ended: asyncio.Event,
) -> None:
    """Serve gRPC in this process until ``ended`` is set; then what runs may finish.

    Raises
    ------
    OSError
        It cannot listen where it should.
    """
    from convgrad_service.grpc_api.server import GrpcServer

    pipeline = pipeline_on(engine, settings)
    server = GrpcServer(pipeline, settings)
    announce(await server.start())
    await ended.wait()
    pipeline.draining = True
    await server.stop(settings.shutdown_grace_s)


async def _serve_grpc(start: FrontStart) -> None:
    ended = asyncio.Event()
    engine = await _engine(start, ended)
    try:
        await serve_grpc(engine, start.settings, lambda port: engine.send(Listening(port)), ended)
    except OSError as error:
        engine.send(Listening(0, str(error)))
        await ended.wait()


async def _engine(start: FrontStart, ended: asyncio.Event) -> RemoteHub:
    # Without the hub nothing can be answered or even refused.
    engine = RemoteHub(
        Arena(start.arena),
        drained=ended.set,
        lost=lambda: os._exit(1),
        inline_backend=start.beside,
        heartbeat_timeout_s=start.settings.heartbeat_timeout_s,
    )
    await engine.open(socket.socket(fileno=start.channel))
    return engine
