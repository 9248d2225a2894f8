"""Requests whose end two parsers may see at different places, which hides a request from a proxy.

Each is followed by another. Either the first is refused and nothing behind it is read, or it is
read as RFC 9112 says and both are answered.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.attack.served import Served, processes
from tests.support.http_server import EXAMPLE
from tests.support.raw_http import read_all

LENGTH = len(EXAMPLE)
POST = b"POST /conv_bwd_data HTTP/1.1\r\n"
HOST = b"Host: x\r\nContent-Type: application/json\r\n"
BY_LENGTH = b"Content-Length: %d\r\n" % LENGTH
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (LENGTH, EXAMPLE)
# What would be answered with 404 if it were taken for a request.
HIDDEN = b"GET /hidden HTTP/1.1\r\nHost: x\r\n\r\n"
NEXT = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def lengths() -> dict[str, tuple[int, bytes]]:
    """The status for each Content-Length, and the request."""
    n = b"%d" % LENGTH
    given = {
        "leading zeros": (200, b"Content-Length: 000%s" % n),
        "spaces around": (200, b"Content-Length: \t %s \t" % n),
        "in upper case": (200, b"CONTENT-LENGTH: %s" % n),
        "none": (400, b"Content-Length:"),
        "plus": (400, b"Content-Length: +%s" % n),
        "minus": (400, b"Content-Length: -%s" % n),
        "hexadecimal": (400, b"Content-Length: 0x%x" % LENGTH),
        "fraction": (400, b"Content-Length: %s.0" % n),
        "exponent": (400, b"Content-Length: %se0" % n),
        "underscore": (400, b"Content-Length: 1_0"),
        "quoted": (400, b'Content-Length: "%s"' % n),
        "semicolon": (400, b"Content-Length: %s;" % n),
        "space within": (400, b"Content-Length: 1 0"),
        "vertical tab": (400, b"Content-Length: %s\x0b" % n),
        "NUL": (400, b"Content-Length: %s\0" % n),
        "Arabic digits": (400, b"Content-Length: \xd9\xa1\xd9\xa0"),
        "over 2^64": (400, b"Content-Length: %d" % (2**64 + LENGTH)),
        "2^63": (413, b"Content-Length: %d" % 2**63),
        "list of equal ones": (400, b"Content-Length: %s, %s" % (n, n)),
        "twice the same": (400, b"Content-Length: %s\r\nContent-Length: %s" % (n, n)),
        "two": (400, b"Content-Length: %s\r\nContent-Length: 0" % n),
        "two, zero first": (400, b"Content-Length: 0\r\nContent-Length: %s" % n),
        "space before the colon": (400, b"Content-Length : %s" % n),
        "folded": (400, b"Content-Length:\r\n %s" % n),
    }
    return {
        name: (status, POST + HOST + line + b"\r\n\r\n" + EXAMPLE)
        for name, (status, line) in given.items()
    }


def codings() -> dict[str, tuple[int, bytes]]:
    """Transfer codings, of a body in chunks."""
    given = {
        "mixed case": (200, b"TRANSFER-encoding: cHuNkEd"),
        "space before": (200, b"Transfer-Encoding: \t chunked"),
        "space behind": (200, b"Transfer-Encoding: chunked "),
        # The RFC allows it too, but the parser does not.
        "tab behind": (400, b"Transfer-Encoding: chunked\t"),
        "none": (400, b"Transfer-Encoding:"),
        "identity": (400, b"Transfer-Encoding: identity"),
        "identity first": (501, b"Transfer-Encoding: identity, chunked"),
        "identity last": (400, b"Transfer-Encoding: chunked, identity"),
        "identity on a line of its own": (
            400,
            b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
        ),
        "twice": (400, b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked"),
        "longer": (400, b"Transfer-Encoding: xchunked"),
        "longer behind": (400, b"Transfer-Encoding: chunkedx"),
        "in two": (400, b"Transfer-Encoding: chu nked"),
        "quoted": (400, b'Transfer-Encoding: "chunked"'),
        "parameter": (400, b"Transfer-Encoding: chunked;q=1"),
        "vertical tab": (400, b"Transfer-Encoding: \x0bchunked"),
        "NUL": (400, b"Transfer-Encoding: chunked\0"),
        "comma first": (501, b"Transfer-Encoding: , chunked"),
        "comma last": (400, b"Transfer-Encoding: chunked,"),
        "space before the colon": (400, b"Transfer-Encoding : chunked"),
        "tab before the colon": (400, b"Transfer-Encoding\t: chunked"),
        "folded": (400, b"Transfer-Encoding:\r\n chunked"),
        "length before": (400, BY_LENGTH + b"Transfer-Encoding: chunked"),
        "length behind": (400, b"Transfer-Encoding: chunked\r\n" + BY_LENGTH[:-2]),
        "length of zero": (400, b"Content-Length: 0\r\nTransfer-Encoding: chunked"),
        "length, and a coding that is none": (400, BY_LENGTH + b"Transfer-Encoding: x"),
        "behind a bare LF": (400, BY_LENGTH + b"X: y\nTransfer-Encoding: chunked"),
        "behind a bare CR": (400, BY_LENGTH + b"X: y\rTransfer-Encoding: chunked"),
        "hop by hop": (200, b"Connection: Transfer-Encoding\r\nTransfer-Encoding: chunked"),
    }
    found = {
        name: (status, POST + HOST + line + b"\r\n\r\n" + CHUNKS)
        for name, (status, line) in given.items()
    }
    # Not that header's name, so the length decides.
    head = POST + HOST + BY_LENGTH + b"Transfer_Encoding: chunked\r\n\r\n"
    return found | {"underscore": (200, head + EXAMPLE)}


def chunks() -> dict[str, tuple[int, bytes]]:
    """Ways to write the chunks of a body."""
    size, last = b"%x" % LENGTH, b"0\r\n\r\n"
    half = LENGTH // 2
    whole = EXAMPLE + b"\r\n" + last
    given = {
        "leading zeros": (200, b"0000" + size + b"\r\n" + whole),
        "in upper case": (200, size.upper() + b"\r\n" + whole),
        "extension": (200, size + b";a=b\r\n" + whole),
        "quoted extension": (200, size + b';a="b;c"\r\n' + whole),
        "two chunks": (
            200,
            b"%x\r\n%s\r\n%x\r\n%s\r\n%s"
            % (half, EXAMPLE[:half], LENGTH - half, EXAMPLE[half:], last),
        ),
        "last of many zeros": (200, size + b"\r\n" + EXAMPLE + b"\r\n0000\r\n\r\n"),
        "trailer": (200, size + b"\r\n" + EXAMPLE + b"\r\n0\r\nX: y\r\n\r\n"),
        "length in the trailer": (
            400,
            size + b"\r\n" + EXAMPLE + b"\r\n0\r\nContent-Length: 5\r\n\r\n",
        ),
        "none": (400, b"\r\n" + whole),
        "0x": (400, b"0x" + size + b"\r\n" + whole),
        "plus": (400, b"+" + size + b"\r\n" + whole),
        "minus": (400, b"-" + size + b"\r\n" + whole),
        "underscore": (400, b"1_0\r\n" + whole),
        "comma": (400, size + b",\r\n" + whole),
        "not hexadecimal": (400, b"g\r\n" + whole),
        "space before": (400, b" " + size + b"\r\n" + whole),
        "space behind": (400, size + b" \r\n" + whole),
        "over 2^64": (400, b"%x\r\n" % (2**64 + LENGTH) + whole),
        "bare LF": (400, size + b"\n" + whole),
        "bare CR": (400, size + b"\r" + whole),
        "bare LF in an extension": (400, size + b";a\nb\r\n" + whole),
        "bare LF behind the data": (400, size + b"\r\n" + EXAMPLE + b"\n" + last),
        "nothing behind the data": (400, size + b"\r\n" + EXAMPLE + last),
        "too short": (400, b"%x\r\n" % (LENGTH - 1) + whole),
        "last with a sign": (400, size + b"\r\n" + EXAMPLE + b"\r\n-0\r\n\r\n"),
        "last ended by a bare LF": (400, size + b"\r\n" + EXAMPLE + b"\r\n0\n\n"),
        "NUL in the trailer": (400, size + b"\r\n" + EXAMPLE + b"\r\n0\r\nX: \0\r\n\r\n"),
    }
    return {
        name: (status, POST + HOST + CHUNKED + b"\r\n" + body)
        for name, (status, body) in given.items()
    }


def lines() -> dict[str, tuple[int, bytes]]:
    """Request lines, and lines of headers."""
    request_lines = {
        "empty lines before": (200, b"\r\n\r\n" + POST),
        "whole URL": (200, b"POST http://x/conv_bwd_data HTTP/1.1\r\n"),
        "whole URL of another host": (200, b"POST http://y/conv_bwd_data HTTP/1.1\r\n"),
        "two spaces": (200, POST.replace(b" ", b"  ")),  # as the RFC allows
        "tabs": (400, POST.replace(b" ", b"\t")),
        "space before": (400, b" " + POST),
        "space behind": (400, POST.replace(b"\r", b" \r")),
        "space in the path": (400, POST.replace(b"_", b" ")),
        "NUL in the path": (400, POST.replace(b"_", b"\0")),
        "bare LF": (400, POST.replace(b"\r", b"")),
        "bare CR": (400, POST.replace(b"\n", b"")),
        "method in lower case": (400, POST.replace(b"POST", b"post")),
        "no method": (400, POST.replace(b"POST ", b"")),
        "version in lower case": (400, POST.replace(b"HTTP", b"http")),
        "version 1.10": (400, POST.replace(b"1.1", b"1.10")),
        "version 01.1": (400, POST.replace(b"1.1", b"01.1")),
        "version 1": (400, POST.replace(b"1.1", b"1")),
        "the preface of HTTP/2": (505, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + POST),
    }
    headers = {
        "one that is unknown": (200, b"X: y"),
        "empty value": (200, b"X:"),
        "bytes above ASCII": (200, b"X: \x80\xff"),
        "override of the method": (200, b"X-HTTP-Method-Override: GET"),
        "protocol to change to": (
            200,
            b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk",
        ),
        "no name": (400, b": y"),
        "no colon": (400, b"X"),
        "space in the name": (400, b"X Y: z"),
        "space before the name": (400, b" X: y"),
        "space before the colon": (400, b"X : y"),
        "NUL in the name": (400, b"X\0: y"),
        "bytes above ASCII in the name": (400, b"X\x80: y"),
        "parenthesis in the name": (400, b"X(: y"),
        "NUL": (400, b"X: y\0z"),
        "bare CR": (400, b"X: y\rz"),
        "bare LF": (400, b"X: y\nY: z"),
        "folded": (400, b"X: y\r\n z"),
    }
    rest = HOST + BY_LENGTH + b"\r\n" + EXAMPLE
    found = {name: (status, line + rest) for name, (status, line) in request_lines.items()}
    for name, (status, line) in headers.items():
        found[f"header: {name}"] = status, POST + line + b"\r\n" + rest
    return found


def bodies() -> dict[str, tuple[list[int], bytes]]:
    """Bodies that are requests, with the status of each answer until the connection ends."""
    by_length = b"Content-Length: %d\r\n\r\n%s" % (len(HIDDEN), HIDDEN)
    in_chunks = CHUNKED + b"\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(HIDDEN), HIDDEN)
    get = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n"
    no_path = POST.replace(b"_data", b"") + HOST
    return {
        "GET with a length": ([200, 200], get + by_length),
        "GET in chunks": ([200], get + in_chunks),
        "HEAD with a length": ([200, 200], get.replace(b"GET", b"HEAD") + by_length),
        "POST": ([400, 200], POST + HOST + by_length),
        "POST in chunks": ([400, 200], POST + HOST + in_chunks),
        "wrong path": ([404, 200], no_path + by_length),
        "wrong path, in chunks": ([404], no_path + in_chunks),
        "wrong method": ([405, 200], POST.replace(b"POST", b"PUT") + HOST + by_length),
        "wrong media type": ([415, 200], POST + HOST.replace(b"json", b"x") + by_length),
        "after 100 Continue": (
            [100, 400, 200],
            POST + HOST + b"Expect: 100-continue\r\n" + by_length,
        ),
        "unknown expectation": ([400, 200], POST + HOST + b"Expect: x\r\n" + by_length),
    }


REQUESTS = {
    f"{about.__name__}: {name}": ([200, 200] if status == 200 else [status], request_bytes)
    for about in (lengths, codings, chunks, lines)
    for name, (status, request_bytes) in about().items()
} | {f"bodies: {name}": case for name, case in bodies().items()}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with processes(tmp_path_factory.mktemp("smuggling"), header_timeout_s="2") as serving:
        yield serving


@pytest.mark.parametrize(("statuses", "request_bytes"), REQUESTS.values(), ids=REQUESTS)
def test_a_request_is_refused_or_ends_where_it_says(
    server: Served, statuses: list[int], request_bytes: bytes
) -> None:
    # What is known of a head that was read before says the same.
    for _ in range(2 if statuses[0] == 200 else 1):
        with server.connect() as connection:
            connection.sendall(request_bytes + NEXT)
            received = read_all(connection)
        found = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", received)]
        assert found == statuses, received
