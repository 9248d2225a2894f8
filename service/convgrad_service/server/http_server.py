"""One uvicorn server in one process: how it listens, tells that it does, and ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from fastapi import FastAPI

from convgrad_service.engine.pipeline import Pipeline
from convgrad_service.http_api.protocol import GuardedProtocol, guarded_protocol
from convgrad_service.server.connection_dispatcher import Acceptor, receive_connections
from convgrad_service.server.settings import Settings
from convgrad_service.server.tls import server_context

__all__ = ["ConvgradServer", "listening_socket"]

_log = logging.getLogger("convgrad.server")


class ConvgradServer(uvicorn.Server):
    """Serves ``app`` until a signal (unless ``signals`` are others' business) or `should_exit`,
    then lets what runs finish.

    Connections come from the sockets that it is run with, or over ``dealt``, see
    `connection_dispatcher`. It accepts them itself, so that those count whose TLS handshake is not
    over, which uvicorn does not know of.
    A ``plain`` one speaks no TLS, whatever the settings say.

    While it finishes, it still listens: ``/v2/health/ready`` says no, new work is refused, and a
    load balancer has time to notice. A second signal ends it at once.
    """

    def __init__(
        self,
        app: FastAPI,
        settings: Settings,
        *,
        announce: Callable[[int], None] | None = None,
        signals: bool = True,
        dealt: socket.socket | None = None,
        plain: bool = False,
    ) -> None:
        tls = None if plain else server_context(settings, "http/1.1")
        super().__init__(
            uvicorn.Config(
                app,
                http=guarded_protocol(settings),
                ws="none",
                # uvloop and httptools are dependencies, not options: named, so that one that is
                # missing is an error and not a slower server.
                loop="uvloop",
                lifespan="on",
                interface="asgi3",
                log_config=None,
                access_log=False,  # ours has the request id, see middleware.py
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=settings.keep_alive_s,
                timeout_graceful_shutdown=1,  # what could finish has, see on_tick
                ssl_context_factory=None if tls is None else (lambda *_: tls),
            )
        )
        self._pipeline: Pipeline = app.state.pipeline
        self._grace_s = settings.shutdown_grace_s
        self._announce, self._signals = announce, signals
        self._dealt = dealt
        self._acceptors: list[Acceptor] = []
        self._taking: set[asyncio.Task[object]] = set()
        self._settings = settings
        self._give_up_s: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening, and say on which port; 0 where others listen."""
        await super().startup([])
        if self._dealt is not None:
            receive_connections(self._dealt, self._take)
            if self._announce is not None:
                self._announce(0)
        for listening in sockets or []:
            self._acceptors.append(Acceptor(listening, self._take))
            self._acceptors[-1].open()
            if self._announce is not None:
                self._announce(listening.getsockname()[1])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen no more, and let what runs finish."""
        for acceptor in self._acceptors:
            acceptor.close()
        for taking in self._taking:
            taking.cancel()
        await super().shutdown(sockets)

    def _take(self, connection: socket.socket) -> bool:
        """Serve a connection, as uvicorn's own server would; False if there are too many."""
        settings, tls = self._settings, self.config.ssl
        served = len(self.server_state.connections) + len(self._taking)
        room = served < settings.max_connections
        if not room and tls is not None:
            connection.close()  # to say why would take a handshake
            return False
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        loop = asyncio.get_running_loop()
        timeout_s = None if tls is None else settings.header_timeout_s
        taking = loop.create_task(
            loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=tls, ssl_handshake_timeout=timeout_s
            )
        )
        self._taking.add(taking)
        taking.add_done_callback(self._taken)
        return room

    def _taken(self, taking: asyncio.Task[object]) -> None:
        self._taking.discard(taking)
        if not taking.cancelled():
            taking.exception()  # a handshake that failed, or a client that has gone already

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second: whether to stop listening and end."""
        wants_exit = await super().on_tick(counter)
        if counter % 10 == 0:
            for connection in list(self.server_state.connections):
                assert isinstance(connection, GuardedProtocol)  # noqa: S101 - as configured
                connection.abort_if_stuck(time.monotonic())
        if not wants_exit or self.force_exit:
            return wants_exit
        now_s = time.monotonic()
        if self._give_up_s is None:
            self._pipeline.draining = True
            self._give_up_s = now_s + self._grace_s
            _log.info("finishing %d requests", len(self.server_state.tasks))
        return not self.server_state.tasks or now_s > self._give_up_s

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal asks to finish, the second to stop now."""
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but an end that was asked for is not raised again: the exit code is 0."""
        if not self._signals or threading.current_thread() is not threading.main_thread():
            yield
            return
        wanted = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in wanted}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket bound to ``host`` and ``port`` (0: any free one); raises OSError if it cannot be.

    Bound here and not by uvicorn, so that the real port is known and a port in use is an
    exception, not an exit.
    """
    family, _, _, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound
