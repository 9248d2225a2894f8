"""Transports: how a client sends an attempt and receives its answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import httpx

from convgrad._exchange import Exchange
from convgrad._http_errors import ROOTS
from convgrad._processes import OfOneProcess
from convgrad._reply import Receiver, Reply, async_raw_chunks, raw_chunks
from convgrad.errors import ClientError

if TYPE_CHECKING:
    from convgrad._shared_calls import SharedMemory

__all__ = [
    "AsyncHttpxTransport",
    "AsyncTransport",
    "HttpxTransport",
    "Transport",
    "check_open",
    "shared_memory",
]


class Transport(Protocol):
    """Sends requests to a server."""

    @property
    def closed(self) -> bool: ...

    def send(self, exchange: Exchange[Any]) -> Reply:
        """Send one attempt and return its reply; raise ClientError if that fails."""
        ...

    def stream(self, exchange: Exchange[Any]) -> Iterator[Receiver]:
        """Send one attempt; yield its receiver whenever data arrives, finally when complete."""
        ...

    def close(self) -> None: ...


class AsyncTransport(Protocol):
    """`Transport` for `AsyncClient`."""

    @property
    def closed(self) -> bool: ...

    async def send(self, exchange: Exchange[Any]) -> Reply: ...

    def stream(self, exchange: Exchange[Any]) -> AsyncIterator[Receiver]: ...

    async def close(self) -> None: ...


class HttpxTransport(OfOneProcess):
    """A `Transport` through httpx, for TLS, proxies and the caller's own `httpx.Client`."""

    def __init__(self, injected: httpx.Client | None = None) -> None:
        super().__init__(injected)
        self._http = injected or httpx.Client()
        self._owned = injected is None

    @property
    def closed(self) -> bool:
        return self._http.is_closed

    def send(self, exchange: Exchange[Any]) -> Reply:
        for receiver in self.stream(exchange):
            last = receiver
        return last.finish()

    def stream(self, exchange: Exchange[Any]) -> Iterator[Receiver]:
        """See `Transport.stream`."""
        try:
            request = exchange.request(self._http)
            response = self._http.send(request, stream=True, follow_redirects=False)
            try:
                receiver = Receiver(response.status_code, response.headers, exchange.request_id)
                sent_bytes = 0 if exchange.body is None else exchange.body.total_bytes
                for chunk in raw_chunks(response):
                    exchange.check_deadline()
                    receiver.add(chunk)
                    exchange.report(sent_bytes, receiver)
                    yield receiver
                    if receiver.has_enough:
                        break
                yield receiver
            finally:
                response.close()
        except ROOTS as error:
            raise exchange.failed(error) from error

    def close(self) -> None:
        if self._owned:
            self._http.close()


class AsyncHttpxTransport(OfOneProcess):
    """An `AsyncTransport` through `httpx.AsyncClient`."""

    def __init__(self, injected: httpx.AsyncClient | None = None) -> None:
        super().__init__(injected)
        self._http = injected or httpx.AsyncClient()
        self._owned = injected is None

    @property
    def closed(self) -> bool:
        return self._http.is_closed

    async def send(self, exchange: Exchange[Any]) -> Reply:
        async for receiver in self.stream(exchange):
            last = receiver
        return last.finish()

    async def stream(self, exchange: Exchange[Any]) -> AsyncIterator[Receiver]:
        """See `Transport.stream`."""
        try:
            request = exchange.request(self._http)
            response = await self._http.send(request, stream=True, follow_redirects=False)
            try:
                receiver = Receiver(response.status_code, response.headers, exchange.request_id)
                sent_bytes = 0 if exchange.body is None else exchange.body.total_bytes
                async for chunk in async_raw_chunks(response):
                    exchange.check_deadline()
                    receiver.add(chunk)
                    exchange.report(sent_bytes, receiver)
                    yield receiver
                    if receiver.has_enough:
                        break
                yield receiver
            finally:
                await response.aclose()
        except ROOTS as error:
            raise exchange.failed(error) from error

    async def close(self) -> None:
        if self._owned:
            await self._http.aclose()


def check_open(closed: bool) -> None:
    """Raise ClientError if the client is closed."""
    if closed:
        raise ClientError("this client is closed; make another, or call it before its `with` ends")


def shared_memory(transport: str) -> SharedMemory | None:
    """Return a `SharedMemory` for "shm", or None for "http".

    Raises
    ------
    ValueError
        ``transport`` is neither.
    ClientError
        This system does not support the shared-memory transport.
    """
    if transport == "http":
        return None
    if transport != "shm":
        raise ValueError(f'transport: expected "http" or "shm", got {transport!r}')
    try:  # imported here because few programs use it and not every system supports it
        from convgrad._shared_calls import SharedMemory
    except ImportError as missing:
        raise ClientError(f'transport="shm" works only on Linux: {missing}') from missing
    return SharedMemory()
