"""One gRPC call: metadata, deadline, trailers, and how it is ended early."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import math
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import grpc

from convgrad.errors import ServiceError
from convgrad_service.engine.request import RequestContext
from convgrad_service.engine.scheduling.quotas import ANYBODY

__all__ = ["EOF", "Call", "Trailers", "status_of"]

_log = logging.getLogger("convgrad.grpc")

EOF = grpc.aio.EOF
"""What ``read`` returns after the last message."""

Trailers = tuple[tuple[str, str], ...]

_REQUEST_ID, _SERVER_TIMING = "x-request-id", "server-timing"
_CODE, _RETRY_AFTER = "convgrad-code", "retry-after"


def status_of(error: ServiceError) -> grpc.StatusCode:
    """Return the gRPC status of an error; INTERNAL for errors that only HTTP can have."""
    return grpc.StatusCode[error.row.grpc_status or "INTERNAL"]


class Call:
    """A call whose metadata has arrived; ``rpc`` is grpcio's servicer context."""

    def __init__(self, rpc: Any) -> None:
        self.rpc = rpc
        self.caller = ANYBODY
        self.ended_by: ServiceError | None = None
        self._metadata = rpc.invocation_metadata()
        # Read now: once a call has ended, grpcio crashes the process when it is asked.
        self.peer: str = rpc.peer()
        """The connection's remote end, such as ``ipv4:127.0.0.1:40000``."""
        self._aborting: asyncio.Task[None] | None = None
        self.context = RequestContext.begin(self.metadata(_REQUEST_ID))

    def metadata(self, name: str) -> list[str]:
        """Return all values of a metadata key."""
        return [value for key, value in self._metadata if key == name]

    def first(self, name: str) -> str:
        """Return the first value of a metadata key, or ""."""
        return next((value for key, value in self._metadata if key == name), "")

    def begin(self) -> RequestContext:
        """Return a context for one request of a stream, with the client's request id if given."""
        context = RequestContext.begin(self.metadata(_REQUEST_ID))
        context.caller = self.caller
        return context

    @property
    def remaining_s(self) -> float:
        """Seconds until the caller's deadline; infinite without one."""
        remaining_s: float | None = self.rpc.time_remaining()
        return math.inf if remaining_s is None else remaining_s

    @property
    def address(self) -> str:
        """The client's IP address."""
        return unquote(self.peer).partition(":")[2].rpartition(":")[0].strip("[]")

    @property
    def client(self) -> str:
        """Who shares limits with other clients: the owner of the API key, or the IP address."""
        return self.caller.name or self.address

    def trailers(self, error: ServiceError | None = None) -> Trailers:
        """Return the trailing metadata."""
        found = [
            (_REQUEST_ID, self.context.request_id),
            (_SERVER_TIMING, self.context.server_timing()),
        ]
        if (span := self.context.traceresponse) is not None:
            found.append(("traceresponse", span))
        if error is not None:
            found.append((_CODE, error.code))
            if error.retry_after_s is not None:
                found.append((_RETRY_AFTER, str(max(1, math.ceil(error.retry_after_s)))))
        return tuple(found)

    async def fail(self, error: ServiceError) -> None:
        """End the call with an error.

        Raises
        ------
        grpc.aio.AbortError
            Always, which ends the handler too.
        """
        await self.rpc.abort(status_of(error), error.detail, self.trailers(error))

    def end_with(self, error: ServiceError) -> None:
        """End the call from outside its handler, whose pending read then raises AbortError.

        The handler is not cancelled, because grpcio would leak a message that arrives just then.
        """
        if self.ended_by is not None or self.rpc.done():
            return
        self.ended_by = error

        async def abort() -> None:
            # UsageError: the handler has just ended it with an error of its own.
            ended = (grpc.aio.AbortError, grpc.aio.InternalError, grpc.aio.UsageError)
            with contextlib.suppress(*ended):
                await self.fail(error)

        self._aborting = asyncio.ensure_future(abort())

    def disconnect(self) -> None:
        """Shut down the call's socket: grpcio cannot end a call whose answer waits to be read."""
        _log.warning("%s does not read its answers and is disconnected", self.peer)
        for entry in Path("/proc/self/fd").iterdir():
            # Descriptors may close meanwhile, and not all sockets have a peer.
            with contextlib.suppress(OSError, ValueError, IndexError):
                if not str(entry.readlink()).startswith("socket:"):
                    continue
                with socket.socket(fileno=os.dup(int(entry.name))) as found:
                    if _shown(found.getpeername()) == unquote(self.peer):
                        found.shutdown(socket.SHUT_RDWR)


def _shown(address: Sequence[Any]) -> str:
    """Format a socket address as grpcio does."""
    host = ipaddress.ip_address(address[0])
    if isinstance(host, ipaddress.IPv6Address) and host.ipv4_mapped is not None:
        host = host.ipv4_mapped
    port = address[1]
    return f"ipv4:{host}:{port}" if host.version == 4 else f"ipv6:[{host}]:{port}"
