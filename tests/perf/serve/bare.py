"""The same bytes over bare loopback connections: what the machine itself lets a front end move."""

from __future__ import annotations

import socket
import time
from multiprocessing import get_context
from typing import Any

__all__ = ["bare_between_s"]

_PIECE_BYTES = 2**20
_WARM_UP = 2
_START_S = 60.0


def bare_between_s(up_bytes: int, down_bytes: int, connections: int, seconds: float) -> float:
    """Seconds from one answer to the next over so many connections at once.

    Each has a process at either end, which sends ``up_bytes`` there and then ``down_bytes`` back,
    from and to memory that is warm, for so long.
    """
    context = get_context("spawn")
    told: Any = context.Queue()
    begin = context.Event()
    arguments = up_bytes, down_bytes, seconds, told, begin
    asking = [context.Process(target=_ask, args=arguments) for _ in range(connections)]
    for process in asking:
        process.start()
    try:
        for _ in asking:
            told.get(timeout=_START_S)
        begin.set()
        rates = [told.get(timeout=seconds + _START_S) for _ in asking]
    finally:
        for process in asking:
            process.join(_START_S)
    return 1.0 / float(sum(rates))


def _ask(up_bytes: int, down_bytes: int, seconds: float, told: Any, begin: Any) -> None:
    data = memoryview(bytearray(max(up_bytes, down_bytes)))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        arguments = listening.getsockname()[1], up_bytes, down_bytes
        peer = get_context("spawn").Process(target=_answer, args=arguments)
        peer.start()
        connection, _ = listening.accept()

    def ask() -> None:
        _send(connection, data[:up_bytes])
        _received(connection, data[:down_bytes])

    with connection:
        for _ in range(_WARM_UP):
            ask()
        told.put(0.0)
        begin.wait()
        answers, began_s = 0, time.monotonic()
        while time.monotonic() < began_s + seconds:
            ask()
            answers += 1
        told.put(answers / (time.monotonic() - began_s))
    peer.join()


def _answer(port: int, up_bytes: int, down_bytes: int) -> None:
    """Take in ``up_bytes`` and send ``down_bytes``, until the connection ends."""
    data = memoryview(bytearray(max(up_bytes, down_bytes)))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while _received(connection, data[:up_bytes]):
            _send(connection, data[:down_bytes])


def _send(connection: socket.socket, data: memoryview) -> None:
    for at in range(0, len(data), _PIECE_BYTES):
        connection.sendall(data[at : at + _PIECE_BYTES])


def _received(connection: socket.socket, target: memoryview) -> bool:
    at = 0
    while at < len(target):
        size = connection.recv_into(target[at : at + _PIECE_BYTES])
        if not size:
            return False
        at += size
    return True
