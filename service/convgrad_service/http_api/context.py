"""What the ASGI scope of an exchange holds: its context, and its connection.

The connection is our extension of ASGI, for zero-copy receiving and sending. Behind any other ASGI
server it is missing, and bodies and answers are copied part by part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from convgrad_service.engine.telemetry.record import RequestContext
from convgrad_service.http_api.connection_io import ReceiveInto

__all__ = ["CONNECTION", "Connection", "begin_context", "connection_of", "context_of"]

_KEY = "convgrad.context"
CONNECTION = "convgrad.connection"
"""The key of an ASGI scope under which our protocol offers the exchange's `Connection`."""


def begin_context(scope: MutableMapping[str, Any]) -> RequestContext:
    """Create the context of an exchange, and store it in ``scope`` for `context_of`."""
    context = RequestContext.begin(
        value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"
    )
    scope[_KEY] = context
    return context


def context_of(scope: MutableMapping[str, Any]) -> RequestContext:
    """Return the context that the middleware stored in ``scope``."""
    context: RequestContext = scope[_KEY]
    return context


class Connection:
    """One exchange's use of a connection, whose ``protocol`` is a `protocol.GuardedProtocol`."""

    def __init__(self, protocol: Any) -> None:
        self._protocol = protocol
        self._receiving: ReceiveInto | None = None
        self.cycle: RequestResponseCycle | None = None

    def body_left_bytes(self, content_length: int) -> int:
        """Return how much of the body the parser has not seen and `receive_into` may receive."""
        # If the next request has begun, this one's body has been read. TLS copies the data when
        # decrypting it anyway.
        protocol, cycle = self._protocol, self.cycle
        if cycle is None or protocol.cycle is not cycle or protocol.scheme == "https":
            return 0
        if protocol.transport.is_closing():
            return 0  # nothing would arrive, nor would `receive_into` notice
        # After a whole body the parser may hold a part of the next head.
        is_parsed = cycle.more_body and self._receiving is None
        return content_length - int(protocol.parts_bytes) if is_parsed else 0

    def receive_into(self, targets: Sequence[memoryview | int]) -> ReceiveInto:
        """Receive the rest of the current body, whose length is known, into ``targets``."""
        protocol, cycle = self._protocol, self._protocol.cycle
        receiving = self._receiving = ReceiveInto(targets, protocol, protocol.restart_parser)
        ahead, cycle.body = cycle.body, bytearray()
        protocol.switch_protocol(receiving)
        receiving.take(ahead)
        return receiving

    def stop_receiving(self) -> None:
        """Stop writing to the targets of `receive_into`: drop the rest of the body."""
        assert self._receiving is not None  # noqa: S101
        # Not to the parser, which has not seen what was received in place.
        protocol, left_bytes = self._protocol, self._receiving.left_bytes
        protocol.switch_protocol(ReceiveInto([left_bytes], protocol, protocol.restart_parser))

    def whole_body(self) -> bytearray | None:
        """Return the body if it is complete and no part has been delivered yet; else None."""
        cycle = self.cycle
        if cycle is None or self._protocol.cycle is not cycle or cycle.more_body:
            return None
        return None if cycle.disconnected or cycle.waiting_for_100_continue else cycle.body

    def watch(self, gone: Callable[[], None] | None) -> None:
        """Have ``gone`` called if the client closes the connection, until called with None."""
        self._protocol.gone, self._protocol.watching = gone, self.cycle
        if gone is not None and self._protocol.transport.is_closing():
            gone()

    @contextmanager
    def unbuffered(self) -> Iterator[None]:
        """Have writes within the block wait until their bytes have been sent."""
        transport = self._protocol.transport
        if not transport.is_closing():
            transport.set_write_buffer_limits(high=0)
        try:
            yield
        finally:
            if not transport.is_closing():
                transport.set_write_buffer_limits()


def connection_of(scope: Scope) -> Connection | None:
    """Return the connection of an exchange if the server offers one and TLS is off."""
    if scope.get("scheme") == "https":
        return None
    connection: Connection | None = scope.get(CONNECTION)
    return connection
