"""A request's body: what it believes, where it lands, what it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from starlette.types import Message

from convgrad.errors import MalformedRequest, Overloaded, PayloadTooLarge, ProblemTooLarge
from convgrad_service.engine.admission import ClientDisconnected
from convgrad_service.engine.embedded import embedded_hub
from convgrad_service.engine.hub import Hub
from convgrad_service.engine.options import EngineOptions
from convgrad_service.engine.telemetry.record import RequestContext
from convgrad_service.http_api import middleware
from convgrad_service.http_api.body import Body
from convgrad_service.server.settings import Settings
from tests.support.fake_backends import Zeros

KiB = 1024
SETTINGS = Settings(body_idle_timeout_s=1.0, min_body_bytes_per_s=1.0)
LONG = [bytes([i]) * 7770 for i in range(100)]


def taking(
    parts: Sequence[bytes],
    length: int | None,
    take: Callable[[Body], Awaitable[Any]],
    *,
    max_bytes: int = 10**8,
    gone: bool = False,
) -> Any:
    """What ``take`` makes of a body that comes in these parts."""
    left = list(parts)

    async def receive() -> Message:
        if gone and not left:
            return {"type": "http.disconnect"}
        part = left.pop(0) if left else b""
        return {"type": "http.request", "body": part, "more_body": bool(left) or gone}

    async def scenario() -> Any:
        headers = [] if length is None else [(b"content-length", b"%d" % length)]
        scope = {"headers": headers, middleware._KEY: RequestContext("a")}
        return await take(Body(scope, receive, SETTINGS, max_bytes))

    return asyncio.run(scenario())


def hub(text_bytes: int = 1024 * KiB) -> Hub:
    return embedded_hub(Zeros(), EngineOptions(KiB, text_bytes, wait_s=0.01))


def whole(parts: Sequence[bytes], length: int | None, engine: Hub, **options: Any) -> bytes:
    async def take(body: Body) -> bytes:
        text = await body.read_all(engine)
        found = bytes(text.data)
        text.release()
        return found

    found: bytes = taking(parts, length, take, **options)
    return found


@pytest.mark.parametrize("length", [None, 0, 3, 10, 2**40 // 10**7])
@pytest.mark.parametrize("parts", [[b""], [b"abc"], [b"a" * 70_000, b"", b"b" * 70_000, b"c"]])
def test_the_bytes_are_those_that_came(parts: list[bytes], length: int | None) -> None:
    engine = hub()
    assert whole(parts, length, engine) == b"".join(parts)
    assert engine.texts.used_bytes == 0


def test_a_text_without_a_length_grows_past_its_first_place() -> None:
    engine = hub(4096 * KiB)
    for length in (None, 777_000, 5):
        assert whole(LONG, length, engine) == b"".join(LONG)
    assert engine.texts.used_bytes == 0


def test_what_others_hold_is_refused_and_nothing_stays_held() -> None:
    engine = hub(1024 * KiB)

    async def take(body: Body) -> None:
        others = await engine.reserve(500 * KiB, text=True)
        try:
            await body.read_all(engine)
        finally:
            others.release()

    with pytest.raises(Overloaded):
        taking(LONG, 777_000, take)
    with pytest.raises(ProblemTooLarge):
        whole(LONG, 2**30, engine, max_bytes=2**31)
    with pytest.raises(ClientDisconnected):
        whole(LONG[:50], 777_000, engine, gone=True)
    assert engine.texts.used_bytes == 0


@pytest.mark.parametrize("parts", [[b"headabcdefgh"], [b"he", b"adab", b"cde", b"", b"fgh"]])
def test_it_lands_where_it_belongs(parts: list[bytes]) -> None:
    places = bytearray(3), bytearray(2)

    async def take(body: Body) -> None:
        assert (await body.peek(4)).startswith(b"head")
        await body.read_into([memoryview(places[0]), 3, memoryview(places[1])], skip=4)

    taking(parts, 12, take)
    assert [bytes(place) for place in places] == [b"abc", b"gh"]


@pytest.mark.parametrize("parts", [[b"head", b"abc"], [b"headab", b"cdefg"], [b"headabcdefg"]])
@pytest.mark.parametrize("wanted", [2, 20])
def test_a_body_of_another_length_than_its_header_says(parts: list[bytes], wanted: int) -> None:
    async def take(body: Body) -> None:
        await body.peek(4)
        await body.read_into([memoryview(bytearray(wanted))], skip=4)

    with pytest.raises(MalformedRequest, match=f"describes {wanted} bytes of data, but"):
        taking(parts, None, take)


def test_a_body_that_is_cut_off() -> None:
    async def take(body: Body) -> None:
        await body.read_into([memoryview(bytearray(10))])

    with pytest.raises(ClientDisconnected):
        taking([b"abc"], 10, take, gone=True)


@pytest.mark.parametrize("length", [None, 1, 1000])
def test_the_limit_counts_what_arrives(length: int | None) -> None:
    engine = hub()
    assert whole([b"x" * 1000], length, engine, max_bytes=1000)
    with pytest.raises(PayloadTooLarge, match="longer than 1,000 bytes"):
        whole([b"x" * 999, b"xx"], length, engine, max_bytes=1000)


def test_a_promise_over_the_limit_is_refused_unread() -> None:
    with pytest.raises(PayloadTooLarge, match="Content-Length is 1,001"):
        whole([], 1001, hub(), max_bytes=1000)
