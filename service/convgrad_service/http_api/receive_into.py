"""Receives the rest of a long body straight to its destination; its length is known."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

# Size of one read: more than a socket's buffer gains nothing, and would delay the event loop.
_READ_BYTES = 2**20


class Forwarding(asyncio.BufferedProtocol):
    """Passes all events but received data to ``behind``, the connection's own protocol."""

    def __init__(self, behind: asyncio.Protocol) -> None:
        self._behind = behind

    def eof_received(self) -> bool | None:
        return self._behind.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._behind.connection_lost(exc)

    def pause_writing(self) -> None:
        self._behind.pause_writing()

    def resume_writing(self) -> None:
        self._behind.resume_writing()


class ReceiveInto(Forwarding):
    """Fills ``targets`` in order; a number is a count of bytes to drop.

    ``filled`` becomes True once they are full, False if the connection ended before. ``behind`` is
    the connection's own protocol, which gets all other events; ``full`` is called to restore it.
    """

    def __init__(
        self,
        targets: Sequence[memoryview | int],
        behind: asyncio.Protocol,
        full: Callable[[], None],
    ) -> None:
        self.filled: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.received_bytes = 0
        self.last_s = time.monotonic()
        self.left_bytes = sum(each if isinstance(each, int) else len(each) for each in targets)
        super().__init__(behind)
        self._full = full
        self._rest = self._pieces(targets)
        self._piece = next(self._rest)
        self._at = 0

    def take(self, data: bytes | bytearray | memoryview) -> None:
        """Copy bytes that were received earlier to the targets."""
        view = memoryview(data)
        while view:
            place = self._piece[self._at :]
            part = view[: len(place)]
            place[: len(part)] = part
            self._advance(len(part))
            view = view[len(part) :]

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._piece[self._at : self._at + _READ_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        self.last_s = time.monotonic()
        self._advance(nbytes)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.filled.done():
            self.filled.set_result(False)
        super().connection_lost(exc)

    def _advance(self, size: int) -> None:
        self.received_bytes += size
        self.left_bytes -= size
        self._at += size
        if self.left_bytes == 0:
            self.filled.set_result(True)
            self._full()
        elif self._at == len(self._piece):
            self._piece = next(self._rest)
            self._at = 0

    @staticmethod
    def _pieces(targets: Sequence[memoryview | int]) -> Iterator[memoryview]:
        for target in targets:
            if not isinstance(target, int):
                if target:
                    yield target
                continue
            scratch: Any = memoryview(bytearray(min(target, _READ_BYTES)))
            for start in range(0, target, _READ_BYTES):
                yield scratch[: target - start]
