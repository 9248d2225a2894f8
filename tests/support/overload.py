"""Many clients that ask again at once, whatever they are told: raw sockets in one loop."""

from __future__ import annotations

import select
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

__all__ = ["Overload", "Overloading"]

_WARM_UP_S = 2.0


@dataclass(frozen=True)
class Overload:
    """How many requests were answered and refused, in so many seconds, of which the server's
    processes computed ``computed_s`` and the clients ``clients_s``."""

    answered: int
    refused: int
    took_s: float
    computed_s: float
    clients_s: float


@dataclass
class _Client:
    connection: socket.socket
    left: memoryview
    answer: bytearray = field(default_factory=bytearray)
    length: int | None = None

    def whole(self) -> bool:
        """Whether all of an answer has come."""
        if self.length is None and (end := self.answer.find(b"\r\n\r\n")) >= 0:
            head = bytes(self.answer[:end]).lower()
            self.length = end + 4 + int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
        return self.length is not None and len(self.answer) >= self.length


class Overloading:
    """``count`` clients that send ``request`` again as soon as it is answered or refused.

    They ``keep`` their connections, or open a new one each time.
    """

    def __init__(
        self, address: tuple[str, int], request: bytes, count: int, *, keep: bool = True
    ) -> None:
        self._address, self._request, self._count, self._keep = address, request, count, keep
        self._poll = select.epoll()
        self._clients: dict[int, _Client] = {}
        self._statuses: Counter[int] = Counter()

    def run(self, seconds: float, computed_s: Callable[[], float]) -> Overload:
        """Ask for so long, after a while in which nothing is counted.

        ``computed_s`` says how long the server's processes have computed so far.
        """
        for _ in range(self._count):
            self._open()
        self._until(time.monotonic() + _WARM_UP_S)
        self._statuses.clear()
        began_s, before_s, own_s = time.monotonic(), computed_s(), time.thread_time()
        self._until(began_s + seconds)
        took_s, spent_s = time.monotonic() - began_s, computed_s() - before_s
        own_s = time.thread_time() - own_s
        for client in self._clients.values():
            client.connection.close()
        self._poll.close()
        return Overload(self._statuses[200], self._statuses[429], took_s, spent_s, own_s)

    def _until(self, end_s: float) -> None:
        while time.monotonic() < end_s:
            for number, _ in self._poll.poll(0.1):
                try:
                    self._go_on(number, self._clients[number])
                except BlockingIOError:
                    continue
                except OSError:
                    self._open_again(number)

    def _open(self) -> None:
        connection = socket.create_connection(self._address, 60)
        connection.setblocking(False)
        self._clients[connection.fileno()] = _Client(connection, memoryview(self._request))
        self._poll.register(connection.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def _open_again(self, number: int) -> None:
        with suppress(OSError):
            self._poll.unregister(number)
        self._clients.pop(number).connection.close()
        self._open()

    def _go_on(self, number: int, client: _Client) -> None:
        if client.left:
            client.left = client.left[client.connection.send(client.left) :]
            if not client.left:
                self._poll.modify(number, select.EPOLLIN)
            return
        part = client.connection.recv(2**20)
        if not part:
            raise ConnectionResetError
        client.answer += part
        if not client.whole():
            return
        self._statuses[int(client.answer[9:12])] += 1
        if not self._keep or b"connection: close" in bytes(client.answer[:600]).lower():
            self._open_again(number)
            return
        self._clients[number] = _Client(client.connection, memoryview(self._request))
        self._poll.modify(number, select.EPOLLIN | select.EPOLLOUT)
