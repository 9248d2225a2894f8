"""What our HTTP protocol offers an endpoint beyond ASGI: to receive into memory and send from it.

Behind another server there is none of it, and bodies and answers are copied part by part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from starlette.types import Scope

from convgrad_service.http_api.receive_into import ReceiveInto

__all__ = ["CONNECTION", "Connection", "connection_of"]

CONNECTION = "convgrad.connection"
"""The key of an ASGI scope under which our protocol offers itself."""


class Connection(Protocol):
    """See `protocol.GuardedProtocol`."""

    def body_left_bytes(self, content_length: int) -> int:
        """Of the body that is being received, what the parser has not seen and `land` may take."""
        ...

    def land(self, targets: Sequence[memoryview | int]) -> ReceiveInto:
        """Receive the rest of the present body, whose length is known, into ``targets``."""
        ...

    def stop_landing(self) -> None:
        """Write no more to what `land` was given: the rest of the body goes nowhere."""
        ...

    def whole_body(self) -> bytearray | None:
        """The body, if all of it has come and no application has been given any; else None."""
        ...

    async def answer(self, lines: bytes, body: Iterable[bytes | memoryview]) -> None:
        """Send a 200 with these lines of headers, whole, in one write."""
        ...

    def watch(self, gone: Callable[[], None] | None) -> None:
        """Until it is called with None, ``gone`` is called if the client closes the connection."""
        ...

    def watched(self, gone: Callable[[], None]) -> AbstractContextManager[None]:
        """While it lasts, ``gone`` is called if the client closes the connection."""
        ...

    def unbuffered(self) -> AbstractContextManager[None]:
        """While it lasts, a write is finished only when its bytes have left."""
        ...


def connection_of(scope: Scope) -> Connection | None:
    """The connection of an exchange, where the server offers one.

    Over TLS it does not: there what is read and written is not what lies in memory.
    """
    if scope.get("scheme") == "https":
        return None
    connection: Connection | None = scope.get(CONNECTION)
    return connection
