"""Heads that the parser has seen: only the very same bytes, but for the id, are taken for known."""

from __future__ import annotations

import pytest

from convgrad_service.http_api.connection import RequestHead, RequestHeadCache

PATH = b"/conv_fwd"
HEADERS = [(b"host", b"here"), (b"content-length", b"3"), (b"x-request-id", b"first")]


def head(*lines: bytes) -> bytes:
    return b"\r\n".join((b"POST /conv_fwd HTTP/1.1", *lines, b"", b""))


PLAIN = head(b"Host: here", b"Content-Length: 3", b"x-request-id: first")


def learnt(data: bytes = PLAIN, headers: list[tuple[bytes, bytes]] = HEADERS) -> RequestHeadCache:
    heads = RequestHeadCache()
    heads.learn(data + b"abc", PATH, PATH.decode(), b"", headers)
    return heads


def found(heads: RequestHeadCache, data: bytes) -> tuple[RequestHead, bytes, int]:
    result = heads.find(data)
    assert result is not None
    return result


def test_the_same_head_is_known_whatever_follows() -> None:
    known, request_id, body_at = found(learnt(), PLAIN + b"xyz and more")
    assert (known.path, known.body_bytes, request_id) == ("/conv_fwd", 3, b"first")
    assert body_at == len(PLAIN)
    assert known.scope(request_id)["headers"] == HEADERS


def test_an_id_may_be_another() -> None:
    name = b"a-much-longer-1D"
    other = PLAIN.replace(b"first", name)
    known, request_id, body_at = found(learnt(), other + b"abc")
    assert body_at == len(other)
    assert known.scope(request_id)["headers"] == [
        *HEADERS[:2],
        (b"x-request-id", b"a-much-longer-1D"),
    ]


@pytest.mark.parametrize(
    "other",
    [
        PLAIN.replace(b"3", b"4"),
        PLAIN.replace(b"Host", b"host"),
        PLAIN.replace(b"\r\nx-request-id: first", b""),
        PLAIN.replace(b"first", b"fi rst"),
        PLAIN.replace(b"first", b"first\r\nx-request-id: second"),
        PLAIN.replace(b"POST", b"GET"),
        PLAIN[:-1],
    ],
)
def test_any_other_head_is_not(other: bytes) -> None:
    assert learnt().find(other) is None


@pytest.mark.parametrize(
    ("data", "headers"),
    [
        (PLAIN.replace(b"here\r\n", b"here\n"), HEADERS),  # a bare line end
        (PLAIN.replace(b"here", b"he\r\n re"), HEADERS),  # a folded line
        (PLAIN, HEADERS[:2]),  # the parser saw another number of headers
        (PLAIN, [*HEADERS[:2], (b"x-other", b"first")]),
        (head(b"Content-Length: 3", b"Content-Length: 3"), [HEADERS[1], HEADERS[1]]),
        (head(b"Host: here"), HEADERS[:1]),  # without a length
        (
            head(b"Content-Length: 3", b"Transfer-Encoding: chunked"),
            [HEADERS[1], (b"transfer-encoding", b"chunked")],
        ),
        (head(b"Content-Length: 3", b"Expect: x"), [HEADERS[1], (b"expect", b"x")]),
    ],
)
def test_what_is_out_of_the_ordinary_is_left_to_the_parser(
    data: bytes, headers: list[tuple[bytes, bytes]]
) -> None:
    assert learnt(data, headers).find(data) is None


def test_only_so_many_are_kept() -> None:
    heads = learnt()
    for number in range(1000):
        data = head(b"Content-Length: %d" % number)
        heads.learn(data, PATH, PATH.decode(), b"", [(b"content-length", b"%d" % number)])
    assert heads.find(PLAIN) is None
    assert heads.find(head(b"Content-Length: 999")) is not None
