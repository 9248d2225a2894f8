"""A Kubernetes Service in miniature: each connection to its address goes to a chosen server."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

__all__ = ["tcp_service"]


@contextlib.contextmanager
def tcp_service(chosen: Callable[[], str]) -> Iterator[str]:
    """Yield an address whose new connections go to the address that ``chosen`` returns."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        accepting = threading.Thread(target=_accept, args=(listening, chosen))
        accepting.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
        accepting.join()


def _accept(listening: socket.socket, chosen: Callable[[], str]) -> None:
    while True:
        try:
            client, _ = listening.accept()
        except OSError:
            return  # it was shut down
        host, port = chosen().split(":")
        try:
            server = socket.create_connection((host, int(port)))
        except OSError:
            client.close()
            continue
        threading.Thread(target=_connect, args=(client, server)).start()


def _connect(client: socket.socket, server: socket.socket) -> None:
    with client, server:
        for one in (client, server):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        back = threading.Thread(target=_pass_on, args=(server, client))
        back.start()
        _pass_on(client, server)
        back.join()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while part := source.recv(2**16):
            target.sendall(part)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
