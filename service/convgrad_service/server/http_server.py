"""The uvicorn server of one process: accepting connections, draining."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI

from convgrad_service.engine.pipeline import Pipeline
from convgrad_service.http_api.protocol import GuardedProtocol, guarded_protocol
from convgrad_service.server.connection_dispatcher import ConnectionSource
from convgrad_service.server.settings import Settings
from convgrad_service.server.tls import server_context

_log = logging.getLogger("convgrad.server")
# How long requests whose connections were aborted may take to notice.
_END_S = 1.0
# How long a connection may wait for a request before another connection may take its place.
_PATIENCE_S = 1.0


class ConvgradServer(uvicorn.Server):
    """Serves ``app`` until `should_exit` is set, then lets running requests finish.

    Connections come from the sockets passed to `serve` (see `ConnectionSource`). They are accepted
    here and not by uvicorn, so that connections in their TLS handshake count towards
    ``max_connections``.

    While requests finish, the server still listens: ``/v2/health/ready`` fails and new work is
    refused, so that load balancers can notice.

    Parameters
    ----------
    on_listening
        Called with the port once the server listens; with 0 if connections are dispatched to it.
    tls
        Whether to use TLS if the settings name a certificate.
    """

    def __init__(
        self,
        app: FastAPI,
        settings: Settings,
        *,
        on_listening: Callable[[int], None] = lambda _: None,
        tls: bool = True,
    ) -> None:
        context = server_context(settings, "http/1.1") if tls else None
        super().__init__(
            uvicorn.Config(
                app,
                http=guarded_protocol(settings),
                ws="none",
                # Named explicitly, so that a missing dependency is an error, not a slower server.
                loop="uvloop",
                lifespan="on",
                interface="asgi3",
                log_config=None,
                access_log=False,  # middleware.py logs requests
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=settings.keep_alive_s,
                timeout_graceful_shutdown=1,  # on_tick has waited for requests already
                ssl_context_factory=None if context is None else (lambda *_: context),
            )
        )
        self._pipeline: Pipeline = app.state.pipeline
        self._on_listening = on_listening
        self._sources: list[ConnectionSource] = []
        self._handshakes: set[asyncio.Task[object]] = set()
        self._settings = settings
        self._drain_deadline_s: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start accepting connections."""
        await super().startup([])
        for source in sockets or []:
            self._sources.append(ConnectionSource(source, self._serve_connection))
            self._sources[-1].open()
            dispatched = source.type == socket.SOCK_SEQPACKET
            self._on_listening(0 if dispatched else source.getsockname()[1])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting connections, and close those that are open."""
        for source in self._sources:
            source.close()
        if handshakes := set(self._handshakes):
            for handshake in handshakes:
                # Without TLS it takes no time, and if cancelled would leave its connection open.
                if self.config.ssl is not None:
                    handshake.cancel()
            await asyncio.wait(handshakes)
        if tasks := self.server_state.tasks:
            # Late requests end as if their clients had gone: uvicorn would cancel them, and log
            # each with its traceback.
            self._pipeline.aborted = True
            for connection in self._connections():
                connection.transport.abort()
            await asyncio.wait(tasks, timeout=_END_S)
        self.force_exit = False  # or else the application would not end
        await super().shutdown(sockets)

    async def end(self, serving: asyncio.Future[None]) -> None:
        """End ``serving``, which is the result of `serve`, without waiting for requests."""
        self.should_exit = self.force_exit = True
        await asyncio.wait([serving])

    def _serve_connection(self, connection: socket.socket) -> bool:
        """Serve a connection as uvicorn would; return False if there are too many."""
        settings, tls = self._settings, self.config.ssl
        open_connections = len(self.server_state.connections) + len(self._handshakes)
        has_room = open_connections < settings.max_connections or self._make_room(connection)
        if not has_room and tls is not None:
            connection.close()  # answering with an error would need a handshake
            return False
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        loop = asyncio.get_running_loop()
        timeout_s = None if tls is None else settings.header_timeout_s
        handshake = loop.create_task(
            loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=tls, ssl_handshake_timeout=timeout_s
            )
        )
        self._handshakes.add(handshake)
        handshake.add_done_callback(self._handshake_done)
        return has_room

    def _make_room(self, newcomer: socket.socket) -> bool:
        """Abort a connection that waits for a request; return whether there is one.

        Of those that have waited for `_PATIENCE_S`, it is the one that has waited longest.
        Connections that never sent any request come first: a client that opens many does not
        displace the others'. Those that have sent half of a request's head come last. If none has
        waited so long, it is one without a complete head, of the client that has the most of them
        and would have more than the newcomer's.
        """
        latest_s = asyncio.get_running_loop().time() - _PATIENCE_S
        waiting = [
            (asking, connection.has_asked, since_s, id(connection), connection)
            for connection in self._connections()
            for asking, since_s in enumerate(
                (connection.waiting_since_s, connection.asking_since_s)
            )
            if since_s is not None and since_s < latest_s
        ]
        found = min(waiting)[-1] if waiting else self._of_largest_share(newcomer)
        if found is not None:
            # Nothing is left to send, and close would wait for a TLS client's farewell.
            found.transport.abort()
        return found is not None

    def _of_largest_share(self, newcomer: socket.socket) -> GuardedProtocol | None:
        """Return a connection without a complete head of the client that has the most of them."""
        heads = [
            (each.client_host, since_s, id(each), each)
            for each in self._connections()
            if (since_s := each.asking_since_s) is not None and not each.transport.is_closing()
        ]
        shares = Counter(host for host, *_ in heads)
        for most, count in shares.most_common(1):
            if count > shares[_host(newcomer)] + 1:
                return min(each for each in heads if each[0] == most)[-1]
        return None

    def _connections(self) -> Iterator[GuardedProtocol]:
        for connection in list(self.server_state.connections):
            assert isinstance(connection, GuardedProtocol)  # noqa: S101 - as configured
            yield connection

    def _handshake_done(self, handshake: asyncio.Task[object]) -> None:
        self._handshakes.discard(handshake)
        if not handshake.cancelled():
            handshake.exception()  # ignored: the handshake failed, or the client has disconnected

    async def on_tick(self, counter: int) -> bool:
        """Return whether to shut down now; uvicorn calls this ten times a second."""
        wants_exit = await super().on_tick(counter)
        if counter % 10 == 0:
            short = self._pipeline.engine.status.short_of_memory
            for connection in self._connections():
                connection.abort_if_stuck(time.monotonic(), short_of_memory=short)
        if not wants_exit or self.force_exit:
            return wants_exit
        now_s = time.monotonic()
        if self._drain_deadline_s is None:
            self._pipeline.draining = True
            self._drain_deadline_s = now_s + self._settings.shutdown_grace_s
            _log.info("finishing %d requests", len(self.server_state.tasks))
        return not self.server_state.tasks or now_s > self._drain_deadline_s

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `process_tree.run_until_signalled`."""
        yield


def _host(connection: socket.socket) -> str:
    """Return the address of the other end, "" if it has gone."""
    try:
        return str(connection.getpeername()[0])
    except (OSError, IndexError):
        return ""


def listening_socket(host: str, port: int) -> socket.socket:
    """Bind a TCP socket to ``host`` and ``port`` (0: any free port); raises OSError.

    uvicorn would exit instead of raising if the port is in use.
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
