"""Errors of the server and of the connection, and when the SDK retries."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import httpx
import pytest

import convgrad
from convgrad import ClientTimeout, ConnectionFailed, InvalidAnswer, errors
from convgrad._exchange import Exchange
from convgrad._http_errors import HTTPX_ERRORS, ROOTS, from_httpx
from convgrad._options import Options
from convgrad._retry import Backoff, parse_retry_after
from convgrad._targets import LIVE
from tests.support.fake_server import FakeServer, answer, ones, problem

RETRYABLE = [code for code, row in errors.CODES.items() if row.retryable]
GOOD = answer({"output": ones(1, 1, 1)})


def ask(client: convgrad.Client) -> Any:
    return client.conv_fwd(ones(1, 1, 1), ones(1, 1, 1))


@pytest.mark.parametrize("code", errors.CODES)
def test_each_code_becomes_its_error(code: str) -> None:
    server = FakeServer([problem(code, "the reason", **{"Retry-After": "7"})])
    with server.client(max_retries=0) as client, pytest.raises(errors.ServiceError) as caught:
        ask(client)
    assert type(caught.value).code == code
    assert caught.value.detail == "the reason"
    assert caught.value.request_id == "at-server"
    assert caught.value.retry_after_s == 7


@pytest.mark.parametrize("code", RETRYABLE)
def test_what_is_retryable_is_tried_again(code: str) -> None:
    server = FakeServer([problem(code), problem(code), GOOD])
    with server.client(max_retries=2) as client:
        got = client.call(convgrad.calls.conv_fwd(ones(1, 1, 1), ones(1, 1, 1)))
    assert got.attempts == 3
    bodies = {request.content for request in server.requests}
    assert len(bodies) == 1
    assert len({request.headers["X-Request-Id"] for request in server.requests}) == 1
    assert 0.125 <= server.slept_s[0] <= 0.25 <= server.slept_s[1] <= 0.5


@pytest.mark.parametrize("code", sorted(errors.CODES.keys() - set(RETRYABLE)))
def test_what_is_not_is_not(code: str) -> None:
    server = FakeServer([problem(code), GOOD])
    with server.client() as client, pytest.raises(errors.ServiceError):
        ask(client)
    assert len(server.requests) == 1


def test_retries_end() -> None:
    server = FakeServer([problem("overloaded")])
    with server.client(max_retries=3) as client, pytest.raises(convgrad.Overloaded):
        ask(client)
    assert len(server.requests) == 4


def test_connections_that_fail_are_tried_again() -> None:
    server = FakeServer([httpx.ConnectError("refused"), httpx.ReadError("reset"), GOOD])
    with server.client() as client:
        ask(client)
    assert len(server.requests) == 3


def test_async_retries_likewise() -> None:
    async def run() -> None:
        server = FakeServer(
            [httpx.ConnectError("refused"), problem("overloaded", **{"Retry-After": "3"}), GOOD]
        )
        async with server.async_client() as client:
            await client.conv_fwd(ones(1, 1, 1), ones(1, 1, 1))
        assert len(server.requests) == 3
        assert 3 <= server.slept_s[1] <= 3.75

    asyncio.run(run())


def test_retry_after_is_honoured_unless_it_outlasts_the_timeout() -> None:
    server = FakeServer([problem("overloaded", **{"Retry-After": "3"}), GOOD])
    with server.client(timeout=10) as client:
        ask(client)
    assert len(server.slept_s) == 1
    assert 3 <= server.slept_s[0] <= 3.75
    server = FakeServer([problem("overloaded", **{"Retry-After": "30"}), GOOD])
    with server.client(timeout=10) as client, pytest.raises(convgrad.Overloaded) as caught:
        ask(client)
    assert caught.value.retry_after_s == 30
    assert server.slept_s == []


def test_retry_after_is_seconds_or_a_date() -> None:
    now = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
    later = format_datetime(now + timedelta(seconds=90), usegmt=True)
    assert parse_retry_after(" 12 ") == 12
    assert parse_retry_after(later, now.timestamp) == 90
    assert parse_retry_after(format_datetime(now - timedelta(days=1)), now.timestamp) == 0
    for nothing in (None, "", "soon", "-1", "1.5", "²", "Wed, 99 Jan 2030 00:00:00 GMT"):
        assert parse_retry_after(nothing) is None


def test_back_off_grows_and_stays_bounded() -> None:
    backoff = Backoff(uniform=lambda low, high: high)
    assert [backoff.delay_s(n, None) for n in (1, 2, 3, 4)] == [0.25, 0.5, 1, 2]
    assert backoff.delay_s(10**9, None) == 8
    assert backoff.delay_s(1, 0.0) == 0


def test_those_turned_away_together_come_back_apart_and_never_too_early() -> None:
    waits_s = [Backoff().delay_s(1, 8.0) for _ in range(100)]
    assert all(8 <= wait_s <= 10 for wait_s in waits_s)
    assert max(waits_s) - min(waits_s) > 0.5


def all_httpx_exceptions() -> list[type[Exception]]:
    named = (getattr(httpx, name) for name in httpx.__all__)
    return [cls for cls in named if isinstance(cls, type) and issubclass(cls, Exception)]


@pytest.mark.parametrize("cls", all_httpx_exceptions(), ids=lambda cls: cls.__name__)
def test_no_exception_of_httpx_is_unmapped(cls: type[Exception]) -> None:
    assert issubclass(cls, ROOTS)
    abstract = {httpx.HTTPError, httpx.RequestError, httpx.TransportError, httpx.ProtocolError}
    assert cls in abstract or set(cls.__mro__) & HTTPX_ERRORS.keys()


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (httpx.ConnectError("x"), ConnectionFailed),
        (httpx.ConnectTimeout("x"), ConnectionFailed),
        (httpx.RemoteProtocolError("x"), ConnectionFailed),
        (httpx.ReadTimeout("x"), ClientTimeout),
        (httpx.PoolTimeout("x"), ClientTimeout),
        (httpx.TooManyRedirects("x"), InvalidAnswer),
        (httpx.LocalProtocolError("x"), errors.ClientError),
        (httpx.StreamConsumed(), errors.ClientError),
    ],
)
def test_httpx_exceptions_become_ours(raised: Exception, expected: type[Exception]) -> None:
    assert type(from_httpx(raised, "http://server", "id")) is expected
    server = FakeServer([raised])
    with server.client(max_retries=0) as client, pytest.raises(expected) as caught:
        ask(client)
    assert caught.value.__cause__ is raised
    assert "http://server/conv_fwd" in str(caught.value)
    assert type(raised).__name__ in str(caught.value)


def test_an_answer_cut_short_is_a_failed_connection() -> None:
    whole = GOOD.content

    def cut(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers=GOOD.headers, stream=httpx.ByteStream(whole[:-2]))

    http = httpx.Client(transport=httpx.MockTransport(cut))
    client = convgrad.Client("http://server", http_client=http, max_retries=0)
    sentence = f"broke off after {len(whole) - 2} of {len(whole)} bytes"
    with pytest.raises(ConnectionFailed, match=sentence):
        ask(client)


def test_an_answer_longer_than_announced_is_none() -> None:
    def long(request: httpx.Request) -> httpx.Response:
        stream = httpx.ByteStream(GOOD.content + b"!")
        return httpx.Response(200, headers=GOOD.headers, stream=stream)

    http = httpx.Client(transport=httpx.MockTransport(long))
    client = convgrad.Client("http://server", http_client=http)
    with pytest.raises(InvalidAnswer, match="longer than the"):
        ask(client)


def test_an_answer_announced_as_absurd_is_none() -> None:
    def absurd(request: httpx.Request) -> httpx.Response:
        headers = {**GOOD.headers, "content-length": "9" * 18}
        return httpx.Response(200, headers=headers, stream=httpx.ByteStream(b""))

    http = httpx.Client(transport=httpx.MockTransport(absurd))
    client = convgrad.Client("http://server", http_client=http)
    with pytest.raises(InvalidAnswer, match="more than fit in memory"):
        ask(client)


@pytest.mark.parametrize(
    ("response", "sentence"),
    [
        (
            httpx.Response(500, text="<h1>Server error</h1>"),
            "status 500 with '<h1>Server error</h1>'",
        ),
        (httpx.Response(404), "status 404 with an empty body"),
        (httpx.Response(302, headers={"Location": "http://elsewhere"}), "status 302"),
        (httpx.Response(500, text="x" * 10**7), f"'{'x' * 200}'…"),
        (httpx.Response(500, content=b"\xff\xfe"), "status 500"),
        (
            httpx.Response(400, content=b"{", headers={"Content-Type": "application/problem+json"}),
            "status 400 with '{'",
        ),
        (
            httpx.Response(
                400, content=b"[]", headers={"Content-Type": "application/problem+json"}
            ),
            r"status 400 with '\[\]'",
        ),
    ],
)
def test_answers_of_others_are_quoted_in_part(response: httpx.Response, sentence: str) -> None:
    server = FakeServer([response, GOOD])
    with server.client() as client, pytest.raises(InvalidAnswer, match=sentence) as caught:
        ask(client)
    assert len(str(caught.value)) < 400
    assert len(server.requests) == 1


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_all_attempts_share_one_deadline() -> None:
    clock = Clock()
    exchange = Exchange(LIVE, Options("http://server", timeout=10, max_retries=5), clock)
    http = httpx.Client()
    first = exchange.request(http).extensions["timeout"]
    assert first["read"] == 10
    assert first["connect"] == 10
    clock.now_s += 4
    exchange.check_deadline()
    assert first["read"] == first["write"] == 6
    second = exchange.request(http).extensions["timeout"]
    assert second["read"] == 6
    failure = ConnectionFailed("x")
    assert exchange.retry_delay_s(failure) <= 0.5
    clock.now_s += 5.9
    with pytest.raises(ConnectionFailed):  # no time left to wait and try again
        exchange.retry_delay_s(failure)
    clock.now_s += 0.2
    with pytest.raises(ClientTimeout, match="http://server/v2/health/live within 10 s"):
        exchange.check_deadline()
    http.close()


@pytest.mark.parametrize("timeout", [None, float("inf"), 1e300])
def test_an_endless_timeout_is_none(timeout: float | None) -> None:
    exchange = Exchange(LIVE, Options("http://server", timeout=timeout))
    with httpx.Client() as http:
        assert exchange.request(http).extensions["timeout"]["read"] is None


def test_a_server_that_trickles_does_not_outlast_the_timeout() -> None:
    class Trickle(httpx.SyncByteStream):
        def __iter__(self) -> Any:
            while True:
                time.sleep(0.01)
                yield b"x"

    def trickle(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers={"Content-Type": "x"}, stream=Trickle())

    http = httpx.Client(transport=httpx.MockTransport(trickle))
    client = convgrad.Client("http://server", http_client=http, timeout=0.2)
    with pytest.raises(ClientTimeout):  # of an answer that never ends
        ask(client)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"base_url": "server:8000"}, "base_url"),
        ({"base_url": "ftp://server"}, "base_url"),
        ({"base_url": "http://server?key=1"}, "base_url: expected neither"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": "5"}, "timeout: expected a positive number of seconds, got '5'"),
        ({"max_retries": None}, "max_retries: expected a whole number, 0 or more; got None"),
        ({"max_retries": 1.5}, "max_retries"),
        ({"timeout": float("nan")}, "timeout"),
        ({"max_retries": -1}, "max_retries"),
        ({"connect_timeout": 0}, "connect_timeout"),
        ({"read_timeout": -1}, "read_timeout"),
        ({"wire": "xml"}, "wire: expected safetensors or json, got 'xml'"),
    ],
)
def test_a_client_that_cannot_work_is_not_made(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        convgrad.Client(**options)


def test_options_change_without_new_connections() -> None:
    server = FakeServer([GOOD])
    with server.client() as client:
        patient = client.with_options(timeout=None, wire="json")
        ask(patient)
        assert "X-Request-Timeout" not in server.requests[0].headers
        assert server.requests[0].headers["Content-Type"] == "application/json"
        ask(client)
        assert "X-Request-Timeout" in server.requests[1].headers


def test_an_injected_client_stays_open() -> None:
    http = httpx.Client(transport=httpx.MockTransport(lambda request: GOOD))
    with convgrad.Client("http://server", http_client=http):
        pass
    assert not http.is_closed


@pytest.mark.parametrize("url", ["http://server", "https://server"])
def test_only_the_original_closes_its_connections(url: str) -> None:
    closed = []
    own = convgrad.Client(url)
    close, own._transport.close = own._transport.close, lambda: closed.append(True)  # type: ignore[method-assign]
    with own:
        own.with_options(max_retries=0).close()
        assert not closed
    assert closed
    close()


def test_a_path_in_the_base_url_is_kept() -> None:
    server = FakeServer([GOOD])
    http = httpx.Client(transport=httpx.MockTransport(server.handle))
    ask(convgrad.Client("https://host/grad/", http_client=http))
    assert str(server.requests[0].url) == "https://host/grad/conv_fwd"
