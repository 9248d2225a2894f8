"""What a server does with connections that come as it ends."""

from __future__ import annotations

import logging
import socket

import pytest
import uvloop

from convgrad_service.backends.cpu import CpuBackend
from convgrad_service.server.composition import create_app
from convgrad_service.server.http_server import ConvgradServer, listening_socket
from convgrad_service.server.settings import Settings


def test_a_connection_accepted_last_does_not_delay_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = Settings(http_port=0, log_level="error")
    server = ConvgradServer(create_app(settings, CpuBackend(threads=1)), settings)

    async def end_as_one_comes() -> None:
        with (
            listening_socket("127.0.0.1", 0) as listener,
            socket.socket() as client,
        ):
            listener.listen()
            client.connect(listener.getsockname())
            server.config.load()
            server.lifespan = server.config.lifespan_class(server.config)
            await server.startup([])
            assert server._serve_connection(listener.accept()[0])
            await server.shutdown()
            client.settimeout(60)
            assert client.recv(1) == b""

    with caplog.at_level(logging.ERROR):
        uvloop.run(end_as_one_comes())
    assert not server.server_state.connections
    assert [record.getMessage() for record in caplog.records] == []
