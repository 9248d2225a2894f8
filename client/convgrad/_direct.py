"""The way to a server on plain HTTP that needs nothing in between: sockets, and a pool of them."""

from __future__ import annotations

import re
import urllib.request
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import httpx

from convgrad._connection import AVAILABLE, Connection, Http1Error
from convgrad._exchange import Exchange
from convgrad._reply import Receiver, Reply
from convgrad._version import __version__
from convgrad.errors import ClientError, ConnectionFailed

__all__ = ["DirectTransport", "is_direct"]

# What an idle pool keeps at most; further connections end with their request.
_MOST_IDLE = 32
_CONNECT_TIMEOUT_S = 10.0
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")


def is_direct(base_url: str) -> bool:
    """Whether the way to ``base_url`` is a bare socket: no TLS, no proxy, no password in it."""
    url = httpx.URL(base_url)
    proxies = urllib.request.getproxies()
    return (
        AVAILABLE
        and url.scheme == "http"
        and not url.userinfo
        and not {"http", "all"} & proxies.keys()
    )


class DirectTransport:
    """Sends requests over its own connections; threads may share it."""

    def __init__(self, base_url: str) -> None:
        url = httpx.URL(base_url)
        self._host = url.host
        self._port = url.port or 80
        self._authority = url.netloc.decode("ascii")
        self._idle: deque[Connection] = deque()
        self.closed = False

    def send(self, exchange: Exchange[Any]) -> Reply:
        """One attempt.

        Raises
            ConnectionFailed, ClientTimeout, InvalidAnswer.
        """
        headers = exchange.begin()
        head = self._head(exchange, headers)
        connection = self._pooled()
        if connection is not None:
            try:
                return self._send(connection, head, exchange)
            except ConnectionFailed:
                # It had been kept for longer than the server would: the server saw no request.
                if connection.answering:
                    raise
        return self._send(self._connected(exchange), head, exchange)

    def stream(self, exchange: Exchange[Any]) -> Iterator[Receiver]:
        """See `Transport.stream`: over a connection of its own, which may be kept afterwards."""
        head = self._head(exchange, exchange.begin())
        connection = self._connected(exchange)
        body = () if exchange.body is None else exchange.body.views()
        reusable = False
        try:
            arriving = connection.arriving(head, body, exchange.request_id, exchange.remaining_s)
            for receiver, kept in arriving:
                reusable = kept
                yield receiver
        except (OSError, Http1Error) as error:
            raise _failed(error, exchange) from error
        finally:
            if not (reusable and self._kept(connection)):
                connection.close()

    def close(self) -> None:
        self.closed = True
        while self._idle:
            self._idle.pop().close()

    def _send(self, connection: Connection, head: bytes, exchange: Exchange[Any]) -> Reply:
        kept = False
        body = () if exchange.body is None else exchange.body.views()
        try:
            receiver, reusable = connection.request(
                head, body, exchange.request_id, exchange.remaining_s
            )
            reply = receiver.finish()
            kept = reusable and self._kept(connection)
            return reply
        except (OSError, Http1Error) as error:
            raise _failed(error, exchange) from error
        finally:
            if not kept:
                connection.close()

    def _kept(self, connection: Connection) -> bool:
        """Whether a connection was taken into the pool."""
        if self.closed or len(self._idle) >= _MOST_IDLE:
            return False
        self._idle.append(connection)
        return True

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

    def _connected(self, exchange: Exchange[Any]) -> Connection:
        remaining_s = exchange.remaining_s()
        timeout_s = _CONNECT_TIMEOUT_S if remaining_s is None else min(remaining_s, 10.0)
        try:
            return Connection(self._host, self._port, timeout_s)
        except OSError as error:
            raise _failed(error, exchange) from error

    def _head(self, exchange: Exchange[Any], headers: Mapping[str, str]) -> bytes:
        lines = [
            f"{exchange.method} {exchange.path} HTTP/1.1",
            f"Host: {self._authority}",
            f"User-Agent: convgrad/{__version__}",
        ]
        for name, value in headers.items():
            if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
                raise ClientError(
                    f"the header {name[:64]!r} holds what HTTP cannot carry",
                    request_id=exchange.request_id,
                )
            lines.append(f"{name}: {value}")
        return "\r\n".join((*lines, "", "")).encode("latin-1")


def _failed(error: Exception, exchange: Exchange[Any]) -> ConnectionFailed:
    reason = error.detail if isinstance(error, Http1Error) else f"{type(error).__name__}: {error}"
    return ConnectionFailed(
        f"no answer from {exchange.url}: {reason}", request_id=exchange.request_id
    )
