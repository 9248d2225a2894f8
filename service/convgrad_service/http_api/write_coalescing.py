"""Sends an answer's head and the start of its body in one write, thus in one packet."""

from __future__ import annotations

from asyncio import Transport

__all__ = ["CoalescedWriter"]

# Longer parts are not copied.
_JOINED_BYTES = 64 * 1024
_INTERIM = b"HTTP/1.1 1"  # 100 Continue: nothing follows until the client sends its body


class CoalescedWriter:
    """The part of a transport that uvicorn's cycle of one answer uses."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._head: bytes | None = None
        self._has_head = False

    def write(self, data: bytes | memoryview) -> None:
        """Write; hold an answer's head back until the next write."""
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
        """Close the transport, after flushing."""
        if self._head is not None:
            self._transport.write(self._head)
            self._head = None
        self._transport.close()

    def is_closing(self) -> bool:
        """See `asyncio.BaseTransport`."""
        return self._transport.is_closing()
