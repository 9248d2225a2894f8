"""Transports for plain HTTP without a proxy, over a pool of the client's own sockets.

`DirectTransport` polls and `AsyncDirectTransport` awaits; `Connection` implements the protocol.
"""

from __future__ import annotations

import asyncio
import re
import select
import socket
import urllib.request
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any

import httpx

from convgrad._connection import AVAILABLE, READ, WRITE, Connection, Http1Error, Steps
from convgrad._exchange import Exchange
from convgrad._http_errors import no_answer
from convgrad._processes import OfOneProcess
from convgrad._reply import Receiver, Reply
from convgrad._version import __version__
from convgrad.errors import ClientError, ConnectionFailed

__all__ = ["AsyncDirectTransport", "DirectTransport", "is_direct"]

# Most idle connections in a pool; further ones are closed after their request.
_MOST_IDLE = 32
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")


def is_direct(base_url: str) -> bool:
    """Return whether ``base_url`` needs only a plain socket: no TLS, proxy or credentials."""
    url = httpx.URL(base_url)
    proxies = urllib.request.getproxies()
    return (
        AVAILABLE
        and url.scheme == "http"
        and not url.userinfo
        and not {"http", "all"} & proxies.keys()
    )


class _Pool(OfOneProcess):
    """The idle connections of a client."""

    def __init__(self, base_url: str) -> None:
        super().__init__(base_url)
        url = httpx.URL(base_url)
        self._host = url.host
        self._port = url.port or 80
        self._authority = url.netloc.decode("ascii")
        self._idle: deque[Connection] = deque()
        self.closed = False

    def _close_idle(self) -> None:
        self.closed = True
        while self._idle:
            self._idle.pop().close()

    _abandon = _close_idle

    def _release(self, connection: Connection) -> None:
        if self.closed or not connection.reusable or len(self._idle) >= _MOST_IDLE:
            connection.close()
        else:
            self._idle.append(connection)

    def _pooled(self) -> Connection | None:
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:  # another thread took it
                return None
            if not connection.is_stale():
                return connection
            connection.close()
        return None

    def _steps(self, connection: Connection, exchange: Exchange[Any], head: bytes) -> Steps[None]:
        body = () if exchange.body is None else exchange.body.views()
        return connection.request(head, body, exchange.request_id, exchange.remaining_s)

    @contextmanager
    def _errors(self, exchange: Exchange[Any]) -> Iterator[None]:
        """Convert connection errors to ConnectionFailed."""
        try:
            yield
        except (OSError, Http1Error) as error:
            detail = (
                f"no answer from {exchange.url}: {error.detail}"
                if isinstance(error, Http1Error)
                else no_answer(exchange.url, error)
            )
            raise ConnectionFailed(detail, request_id=exchange.request_id) from error

    def _head(self, exchange: Exchange[Any]) -> bytes:
        return _head(exchange, self._authority, exchange.begin())


class DirectTransport(_Pool):
    """The `Transport` of `Client` over its own connections. Thread-safe."""

    def send(self, exchange: Exchange[Any]) -> Reply:
        """See `Transport.send`."""
        head = self._head(exchange)
        connection = self._pooled()
        if connection is not None:
            try:
                return _last(self._attempt(connection, exchange, head)).finish()
            except ConnectionFailed:
                # The server had closed the idle connection and did not see the request.
                if connection.answering:
                    raise
        return _last(self._attempt(self._connected(exchange), exchange, head)).finish()

    def stream(self, exchange: Exchange[Any]) -> Iterator[Receiver]:
        """See `Transport.stream`."""
        head = self._head(exchange)
        yield from self._attempt(self._connected(exchange), exchange, head)

    def close(self) -> None:
        self._close_idle()

    def _attempt(
        self, connection: Connection, exchange: Exchange[Any], head: bytes
    ) -> Iterator[Receiver]:
        poll = select.poll()
        steps = self._steps(connection, exchange, head)
        receiver = None
        try:
            with self._errors(exchange):
                awaited = next(steps, None)
                while awaited is not None:
                    if isinstance(awaited, Receiver):
                        receiver = awaited
                        yield awaited
                        awaited = next(steps, None)
                    else:
                        exchange.report(max(connection.sent_bytes, 0), receiver)
                        awaited = steps.send(_wait(poll, connection, awaited, exchange))
        finally:
            self._release(connection)

    def _connected(self, exchange: Exchange[Any]) -> Connection:
        with self._errors(exchange):
            address = (self._host, self._port)
            return Connection(socket.create_connection(address, exchange.connect_s()))


class AsyncDirectTransport(_Pool):
    """The `AsyncTransport` of `AsyncClient` over its own connections, under asyncio."""

    async def send(self, exchange: Exchange[Any]) -> Reply:
        """See `Transport.send`."""
        head = self._head(exchange)
        connection = self._pooled()
        if connection is not None:
            try:
                return (await _async_last(self._attempt(connection, exchange, head))).finish()
            except ConnectionFailed:
                if connection.answering:
                    raise
        connection = await self._connected(exchange)
        return (await _async_last(self._attempt(connection, exchange, head))).finish()

    async def stream(self, exchange: Exchange[Any]) -> AsyncIterator[Receiver]:
        """See `Transport.stream`."""
        head = self._head(exchange)
        arriving = self._attempt(await self._connected(exchange), exchange, head)
        async with aclosing(arriving):  # type: ignore[type-var]
            async for receiver in arriving:
                yield receiver

    async def close(self) -> None:
        self._close_idle()

    async def _attempt(
        self, connection: Connection, exchange: Exchange[Any], head: bytes
    ) -> AsyncIterator[Receiver]:
        steps = self._steps(connection, exchange, head)
        receiver = None
        try:
            with self._errors(exchange):
                awaited = next(steps, None)
                while awaited is not None:
                    if isinstance(awaited, Receiver):
                        receiver = awaited
                        yield awaited
                        awaited = next(steps, None)
                    else:
                        exchange.report(max(connection.sent_bytes, 0), receiver)
                        awaited = steps.send(await _ready(connection, awaited, exchange))
        finally:
            self._release(connection)

    async def _connected(self, exchange: Exchange[Any]) -> Connection:
        loop = asyncio.get_running_loop()
        connect_s = exchange.connect_s()
        with self._errors(exchange):
            async with asyncio.timeout(connect_s):
                found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
                for last, (family, kind, protocol, _, address) in enumerate(found, 1 - len(found)):
                    made = socket.socket(family, kind, protocol)
                    try:
                        made.setblocking(False)
                        await loop.sock_connect(made, address)
                        return Connection(made)
                    except BaseException as error:
                        made.close()
                        if not isinstance(error, OSError) or last == 0:
                            raise
        raise AssertionError("getaddrinfo returned no address")


def _wait(poll: select.poll, connection: Connection, awaited: int, exchange: Exchange[Any]) -> int:
    """Poll until one of the awaited events is ready, and return the ready events."""
    mask = select.POLLIN | (select.POLLOUT if awaited & WRITE else 0)
    poll.register(connection.socket, mask)
    while True:
        wait_s = exchange.wait_s()
        # One millisecond more, so that the deadline has passed when poll times out.
        for _, events in poll.poll(None if wait_s is None else wait_s * 1e3 + 1):
            # Errors and end of stream count as readable: the next read reports them.
            return (WRITE if events & select.POLLOUT else 0) | (
                READ if events & ~select.POLLOUT else 0
            )
        exchange.waited_in_vain()


async def _ready(connection: Connection, awaited: int, exchange: Exchange[Any]) -> int:
    """`_wait` under asyncio."""
    loop = asyncio.get_running_loop()
    come: asyncio.Future[int] = loop.create_future()

    def wake(event: int) -> None:
        if not come.done():
            come.set_result(event)

    wait_s = exchange.wait_s()
    timer = None if wait_s is None else loop.call_later(wait_s + 1e-3, wake, 0)
    loop.add_reader(connection.socket, wake, READ)
    if awaited & WRITE:
        loop.add_writer(connection.socket, wake, WRITE)
    try:
        events = await come
    finally:
        loop.remove_reader(connection.socket)
        if awaited & WRITE:
            loop.remove_writer(connection.socket)
        if timer is not None:
            timer.cancel()
    if not events:
        exchange.waited_in_vain()
    return events or await _ready(connection, awaited, exchange)


def _last(receivers: Iterator[Receiver]) -> Receiver:
    for receiver in receivers:
        last = receiver
    return last


async def _async_last(receivers: AsyncIterator[Receiver]) -> Receiver:
    async with aclosing(receivers):  # type: ignore[type-var]
        async for receiver in receivers:
            last = receiver
    return last


def _head(exchange: Exchange[Any], authority: str, headers: Mapping[str, str]) -> bytes:
    lines = [
        f"{exchange.method} {exchange.path} HTTP/1.1",
        f"Host: {authority}",
        f"User-Agent: convgrad/{__version__}",
    ]
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
            raise ClientError(
                f"the header {name[:64]!r} has characters that HTTP does not allow",
                request_id=exchange.request_id,
            )
        lines.append(f"{name}: {value}")
    return "\r\n".join((*lines, "", "")).encode("latin-1")
