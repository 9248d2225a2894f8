"""Extensions of ASGI by this server's HTTP protocol: zero-copy receiving and sending.

Behind any other ASGI server they are missing, and bodies and answers are copied part by part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        """Return how much of the body the parser has not seen, so that `land` may receive it."""
        ...

    def land(self, targets: Sequence[memoryview | int]) -> ReceiveInto:
        """Receive the rest of the current body, whose length is known, into ``targets``."""
        ...

    def stop_landing(self) -> None:
        """Stop writing to the targets of `land`: drop the rest of the body."""
        ...

    def whole_body(self) -> bytearray | None:
        """Return the body if it is complete and no part has been delivered yet; else None."""
        ...

    def watch(self, gone: Callable[[], None] | None) -> None:
        """Have ``gone`` called if the client closes the connection, until called with None."""
        ...

    def unbuffered(self) -> AbstractContextManager[None]:
        """Have writes within the block wait until their bytes have been sent."""
        ...


def connection_of(scope: Scope) -> Connection | None:
    """Return the connection of an exchange if the server offers one and TLS is off."""
    if scope.get("scheme") == "https":
        return None
    connection: Connection | None = scope.get(CONNECTION)
    return connection
