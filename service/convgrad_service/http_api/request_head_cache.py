"""A cache of parsed request heads, by their exact bytes.

A client sends the same head with every request but for its id, and parsing it, with a callback into
Python for each header, takes longer than computing a small problem.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import Any, NamedTuple

__all__ = ["RequestHead", "RequestHeadCache"]

_END = b"\r\n\r\n"
# As the client SDK writes it.
_ID = re.compile(rb"\r\n[Xx]-[Rr]equest-[Ii]d: ([0-9A-Za-z-]{1,128})\r\n")
_MAX_HEAD_BYTES, _MOST = 2048, 256
_ID_NAME = b"x-request-id"


class RequestHead(NamedTuple):
    """A parsed head: a POST in HTTP/1.1 on a keep-alive connection."""

    raw_path: bytes
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body_bytes: int
    id_at: int | None
    """Which of the headers is the request's id, if there is one."""

    def scope(self, request_id: bytes) -> dict[str, Any]:
        """Return the fields of an ASGI scope for a request with this id."""
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
    """The latest heads, of all connections of a process."""

    def __init__(self) -> None:
        self._heads: OrderedDict[tuple[bytes, ...], RequestHead] = OrderedDict()

    def find(self, data: bytes) -> tuple[RequestHead, bytes, int] | None:
        """Return the cached head of ``data``, the request's id, and where the body begins."""
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
        """Cache the parsed head that ``data`` begins with."""
        split = _split(data)
        if split is None:
            return
        key, request_id, end = split
        head = data[:end]
        names = [name for name, _ in headers]
        length = dict(headers).get(b"content-length", b"")
        # Exactly one line per header and one for the request: nothing folded or omitted.
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
    """Split a head into what surrounds its id, the id, and the head's end."""
    end = data.find(_END, 0, _MAX_HEAD_BYTES) + len(_END)
    if end < len(_END) or not data.startswith(b"POST "):
        return None
    found = _ID.search(data, 0, end)
    if found is None:
        return (data[:end],), b"", end
    return (data[: found.start()], data[found.end() : end]), found[1], end
