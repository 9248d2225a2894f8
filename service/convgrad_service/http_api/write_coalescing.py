"""An answer's head and the first of its body in one write: one packet, one wake of the client."""

from __future__ import annotations

from asyncio import Transport

__all__ = ["CoalescedWriter"]

# A longer part is not worth a copy.
_JOINED_BYTES = 64 * 1024
_INTERIM = b"HTTP/1.1 1"  # 100 Continue: nothing follows it before the client has


class CoalescedWriter:
    """What uvicorn's cycle of one answer writes to; it knows no more of a transport than this."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._head: bytes | None = None
        self._has_head = False

    def write(self, data: bytes | memoryview) -> None:
        """Write, but keep an answer's head until what comes next."""
        if self._head is not None:
            head, self._head = self._head, None
            if len(data) <= _JOINED_BYTES:
                data = b"".join((head, data))
            else:
                self._transport.write(head)
        elif not self._has_head and bytes(data[: len(_INTERIM)]) != _INTERIM:
            self._has_head = True
            self._head = bytes(data)
            return
        self._transport.write(data)

    def close(self) -> None:
        """Close it, once all has left."""
        if self._head is not None:
            self._transport.write(self._head)
            self._head = None
        self._transport.close()

    def is_closing(self) -> bool:
        """See `asyncio.BaseTransport`."""
        return self._transport.is_closing()
