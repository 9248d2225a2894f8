"""Heads of requests that the parser has seen before, byte for byte: it need not see them again.

A client sends the same head with every request but for its id, and a parser with a call into
Python for each header takes longer over it than a small problem takes to compute.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import Any, NamedTuple

__all__ = ["RequestHead", "RequestHeadCache"]

_END = b"\r\n\r\n"
# As our client writes it: a value that could not be anything but this header's.
_ID = re.compile(rb"\r\n[Xx]-[Rr]equest-[Ii]d: ([0-9A-Za-z-]{1,128})\r\n")
_MAX_HEAD_BYTES, _MOST = 2048, 256
_ID_NAME = b"x-request-id"


class RequestHead(NamedTuple):
    """What the parser made of a head: of a POST in HTTP/1.1, on a connection that is kept."""

    raw_path: bytes
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body_bytes: int
    id_at: int | None
    """Which of the headers is the request's id, if there is one."""

    def scope(self, request_id: bytes) -> dict[str, Any]:
        """What an ASGI scope says of a request with this id."""
        headers = list(self.headers)
        if self.id_at is not None:
            headers[self.id_at] = _ID_NAME, request_id
        return {
            "http_version": "1.1",
            "method": "POST",
            "path": self.path,
            "raw_path": self.raw_path,
            "query_string": self.query,
            "headers": headers,
        }


class RequestHeadCache:
    """The heads seen last, for all connections of a process."""

    def __init__(self) -> None:
        self._heads: OrderedDict[tuple[bytes, ...], RequestHead] = OrderedDict()

    def find(self, data: bytes) -> tuple[RequestHead, bytes, int] | None:
        """The head that ``data`` begins with, the request's id, and where its body begins."""
        split = _split(data)
        if split is None:
            return None
        key, request_id, end = split
        known = self._heads.get(key)
        if known is None:
            return None
        self._heads.move_to_end(key)
        return known, request_id, end

    def learn(
        self,
        data: bytes,
        raw_path: bytes,
        path: str,
        query: bytes,
        headers: list[tuple[bytes, bytes]],
    ) -> None:
        """Remember what the parser made of the head that ``data`` begins with."""
        split = _split(data)
        if split is None:
            return
        key, request_id, end = split
        head = data[:end]
        names = [name for name, _ in headers]
        length = dict(headers).get(b"content-length", b"")
        # A line a header and one for the request, whole: nothing folded, lenient or left out.
        lines = head.count(b"\r\n")
        plain = lines == head.count(b"\n") == head.count(b"\r") == len(headers) + 2
        ids = [at for at, name in enumerate(names) if name == _ID_NAME]
        if (
            not plain
            or len(ids) != (1 if request_id else 0)
            or len(set(names)) != len(names)
            or not (length.isdigit() and len(length) < 10)
            or _UNUSUAL.intersection(names)
        ):
            return
        known = RequestHead(
            raw_path, path, query, tuple(headers), int(length), ids[0] if ids else None
        )
        self._heads[key] = known
        if len(self._heads) > _MOST:
            self._heads.popitem(last=False)


_UNUSUAL = frozenset({b"expect", b"transfer-encoding", b"upgrade", b"connection"})


def _split(data: bytes) -> tuple[tuple[bytes, ...], bytes, int] | None:
    """A head as what stands around its id, the id, and where the head ends."""
    end = data.find(_END, 0, _MAX_HEAD_BYTES) + len(_END)
    if end < len(_END) or not data.startswith(b"POST "):
        return None
    found = _ID.search(data, 0, end)
    if found is None:
        return (data[:end],), b"", end
    return (data[: found.start()], data[found.end() : end]), found[1], end
