"""Connections dealt out in turn: the hub accepts, front ends in other processes serve.

Processes that accept from one socket take what they see first: of sixteen connections that come
together one process gets most, and the others idle. A connection that is handed over costs a
tenth of a millisecond once; its requests cost nothing.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable

__all__ = ["ConnectionDispatcher", "receive_connections"]

_log = logging.getLogger("convgrad.serve")
_BACKLOG = 2048
# Where the system is out of descriptors or memory, what waits in the backlog is tried again.
_PAUSE_S = 0.1


class ConnectionDispatcher:
    """Accepts from a bound socket and sends each connection to the next of its ``ends``.

    For the loop's thread. While there are no ends, connections wait in the socket's backlog.
    """

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._ends: deque[socket.socket] = deque()
        self._loop = asyncio.get_running_loop()
        self._is_reading = False

    def add(self, end: socket.socket) -> None:
        """Deal to this one too: an end of a pair of sockets that keep messages apart."""
        if not self._ends and not self._is_reading:
            self._listening.listen(_BACKLOG)
            self._listening.setblocking(False)
        end.setblocking(False)
        self._ends.append(end)
        self._read()

    def remove(self, end: socket.socket) -> None:
        """Deal to it no more, and close it."""
        if end in self._ends:
            self._ends.remove(end)
        end.close()
        if not self._ends:
            self.close()

    def close(self) -> None:
        """Accept no more."""
        if self._is_reading:
            self._loop.remove_reader(self._listening.fileno())
            self._is_reading = False

    def _read(self) -> None:
        if self._ends and not self._is_reading:
            self._loop.add_reader(self._listening.fileno(), self._accept)
            self._is_reading = True

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                _log.error("connections cannot be accepted: %s", error)
                self.close()
                self._loop.call_later(_PAUSE_S, self._read)
                return
            with connection:
                self._deal(connection)

    def _deal(self, connection: socket.socket) -> None:
        """Send it to the first end that takes it; to none, and it is closed."""
        for _ in range(len(self._ends)):
            end = self._ends[0]
            self._ends.rotate(-1)
            try:
                socket.send_fds(end, [b"."], [connection.fileno()])
            except (BlockingIOError, BrokenPipeError, ConnectionResetError):
                continue  # it has ended, or has long not looked
            return


def receive_connections(end: socket.socket, take: Callable[[socket.socket], None]) -> None:
    """Have ``take`` called, on the running loop, with each connection that comes over ``end``."""
    loop = asyncio.get_running_loop()
    end.setblocking(False)

    def readable() -> None:
        while True:
            try:
                told, descriptors, _, _ = socket.recv_fds(end, 1, 1)
            except (BlockingIOError, InterruptedError):
                return
            if not told:  # the hub has gone
                loop.remove_reader(end.fileno())
                return
            for descriptor in descriptors:
                take(socket.socket(fileno=descriptor))

    loop.add_reader(end.fileno(), readable)
