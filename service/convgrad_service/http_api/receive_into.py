"""Receives the rest of a long body straight to its destination; its length is known."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence

Target = memoryview | int
"""Memory to fill, or a number of bytes to drop."""
# Size of one read: more than a socket's buffer gains nothing, and would delay the event loop.
_READ_BYTES = 2**20


class Targets:
    """Memory that is filled in order, by `take` or through `place` and `advance`."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self.size_bytes = self.left_bytes = sum(
            each if isinstance(each, int) else len(each) for each in targets
        )
        self._pieces = self._cut(targets)
        self._piece = memoryview(b"")

    def take(self, data: bytes | bytearray | memoryview) -> memoryview:
        """Copy bytes that were received earlier; return those for which there is no place."""
        view = memoryview(data)
        while view and self.left_bytes:
            place = self.place()
            part = view[: len(place)]
            place[: len(part)] = part
            self.advance(len(part))
            view = view[len(part) :]
        return view

    def place(self) -> memoryview:
        """Return where the next bytes belong; there must be some left."""
        while not self._piece:
            self._piece = next(self._pieces)
        return self._piece

    def advance(self, size: int) -> None:
        """Note that so many bytes of `place` have been filled."""
        self.left_bytes -= size
        self._piece = self._piece[size:]

    @staticmethod
    def _cut(targets: Sequence[Target]) -> Iterator[memoryview]:
        for target in targets:
            if not isinstance(target, int):
                yield target
                continue
            scratch = memoryview(bytearray(min(target, _READ_BYTES)))
            for start in range(0, target, _READ_BYTES):
                yield scratch[: target - start]


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
    """Fills ``targets``.

    ``filled`` becomes True once they are full, False if the connection ended before. ``behind`` is
    the connection's own protocol, which gets all other events; ``full`` is called to restore it.
    """

    def __init__(
        self, targets: Targets, behind: asyncio.Protocol, full: Callable[[], None]
    ) -> None:
        super().__init__(behind)
        self.filled: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.last_s = time.monotonic()
        self._targets, self._before, self._full = targets, targets.left_bytes, full

    @property
    def left_bytes(self) -> int:
        """How many are still to come."""
        return self._targets.left_bytes

    @property
    def received_bytes(self) -> int:
        """How many have been received."""
        return self._before - self.left_bytes

    def take(self, data: bytes | bytearray) -> None:
        """Copy bytes that were received earlier to the targets."""
        self._targets.take(data)
        self._end_if_full()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._targets.place()[:_READ_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        self.last_s = time.monotonic()
        self._targets.advance(nbytes)
        self._end_if_full()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.filled.done():
            self.filled.set_result(False)
        super().connection_lost(exc)

    def _end_if_full(self) -> None:
        if self.left_bytes == 0:
            self.filled.set_result(True)
            self._full()
