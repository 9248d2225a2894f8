"""Refuses heads of requests that RFC 9112 forbids and uvicorn accepts."""

from __future__ import annotations

import re
from collections.abc import Sequence

from convgrad.wire.sentences import shown
from convgrad_service.http_api.problem_details import HeadRefused

_HOST = re.compile(rb"[A-Za-z0-9\-._~!$&'()*+,;=:%\[\]]*")


def check_head(version: str, headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Raise HeadRefused for heads that RFC 9112 forbids; header names are in lower case.

    That is another version than HTTP/1.0 or 1.1, a missing, repeated or invalid Host, and a
    transfer coding other than chunked, or any in HTTP/1.0.
    """
    if version not in ("1.0", "1.1"):
        raise HeadRefused(505, f"the request is in HTTP/{version}; expected HTTP/1.1")
    hosts = [value for name, value in headers if name == b"host"]
    listed = b",".join([value for name, value in headers if name == b"transfer-encoding"])
    if len(hosts) != 1 and (hosts or version == "1.1"):
        raise HeadRefused(400, f"the request has {len(hosts)} Host headers; expected one")
    if hosts and not _HOST.fullmatch(hosts[0]):
        raise HeadRefused(400, f"Host is {shown(hosts[0].decode('latin-1'))}, not a valid host")
    if listed and version == "1.0":
        raise HeadRefused(400, "HTTP/1.0 has no Transfer-Encoding")
    codings = [coding.strip().lower() for coding in listed.split(b",")] if listed else []
    if codings not in ([], [b"chunked"]):
        # Only chunked, as the last coding, delimits the body.
        framed = codings[-1] == b"chunked" and codings.count(b"chunked") == 1
        raise HeadRefused(
            501 if framed else 400,
            f"Transfer-Encoding is {shown(listed.decode('latin-1'))}; expected chunked alone",
        )
