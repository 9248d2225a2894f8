"""Connections as they come: accepted here, and served here or handed over to other processes.

Processes that accept from one socket take what they see first: of sixteen connections that come
together one process gets most, and the others idle. So the hub accepts, and deals them out in turn.
A connection that is handed over costs a tenth of a millisecond once; its requests cost nothing.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable

__all__ = ["Acceptor", "ConnectionDispatcher", "receive_connections"]

_log = logging.getLogger("convgrad.serve")
_BACKLOG = 2048
# What is accepted before anything else gets its turn.
_AT_ONCE = 64
# Where the system is out of descriptors or memory, what waits in the backlog is tried again.
_PAUSE_S = 0.1
_COMPLAINT_INTERVAL_S = 10.0
# After a connection that was refused because there are too many: the next such waits so long.
_REFUSED_PAUSE_S = 0.01

Take = Callable[[socket.socket], bool]
"""Called with a connection, which it owns then; False where it was refused."""


class Acceptor:
    """Accepts from a bound socket while it is open. For the loop's thread."""

    def __init__(self, listening: socket.socket, take: Take) -> None:
        self._listening, self._take = listening, take
        self._loop = asyncio.get_running_loop()
        self._is_open = self._is_reading = False
        self._complain_after_s = 0.0

    def open(self) -> None:
        """Listen, and accept from now on."""
        if not self._is_open:
            self._is_open = True
            self._listening.listen(_BACKLOG)
            self._listening.setblocking(False)
            self._read()

    def close(self) -> None:
        """Accept no more; who comes waits in the socket's backlog."""
        self._is_open = False
        self._stop_reading()

    def _read(self) -> None:
        if self._is_open and not self._is_reading:
            self._loop.add_reader(self._listening.fileno(), self._accept)
            self._is_reading = True

    def _stop_reading(self) -> None:
        if self._is_reading:
            self._loop.remove_reader(self._listening.fileno())
            self._is_reading = False

    def _pause(self, pause_s: float) -> None:
        self._stop_reading()
        self._loop.call_later(pause_s, self._read)

    def _complain(self, error: OSError) -> None:
        now_s = self._loop.time()
        if now_s >= self._complain_after_s:
            self._complain_after_s = now_s + _COMPLAINT_INTERVAL_S
            _log.error("connections cannot be accepted: %s", error)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._complain(error)
                self._pause(_PAUSE_S)
                return
            if not self._take(connection):
                self._pause(_REFUSED_PAUSE_S)
                return


class ConnectionDispatcher:
    """Accepts from a bound socket and sends each connection to the next of its ``ends``.

    For the loop's thread. While there are no ends, connections wait in the socket's backlog.
    """

    def __init__(self, listening: socket.socket) -> None:
        self._acceptor = Acceptor(listening, self._deal)
        self._ends: deque[socket.socket] = deque()

    def add(self, end: socket.socket) -> None:
        """Deal to this one too: an end of a pair of sockets that keep messages apart."""
        end.setblocking(False)
        self._ends.append(end)
        self._acceptor.open()

    def remove(self, end: socket.socket) -> None:
        """Deal to it no more, and close it."""
        if end in self._ends:
            self._ends.remove(end)
        end.close()
        if not self._ends:
            self._acceptor.close()

    def _deal(self, connection: socket.socket) -> bool:
        """Send it to the first end that takes it; to none, and it is closed."""
        with connection:
            for _ in range(len(self._ends)):
                end = self._ends[0]
                self._ends.rotate(-1)
                try:
                    socket.send_fds(end, [b"."], [connection.fileno()])
                except (BlockingIOError, BrokenPipeError, ConnectionResetError):
                    continue  # it has ended, or has long not looked
                return True
        return False


def receive_connections(end: socket.socket, take: Take) -> None:
    """Have ``take`` called, on the running loop, with each connection that comes over ``end``."""
    loop = asyncio.get_running_loop()
    end.setblocking(False)

    def read() -> None:
        loop.add_reader(end.fileno(), readable)

    def readable() -> None:
        for _ in range(_AT_ONCE):
            try:
                told, descriptors, _, _ = socket.recv_fds(end, 1, 1)
            except (BlockingIOError, InterruptedError):
                return
            if not told:  # the hub has gone
                loop.remove_reader(end.fileno())
                return
            for descriptor in descriptors:
                if not take(socket.socket(fileno=descriptor)):
                    loop.remove_reader(end.fileno())
                    loop.call_later(_REFUSED_PAUSE_S, read)
                    return

    read()
