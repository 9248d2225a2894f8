"""The body's buffer: what it believes, how it grows, what it reserves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from starlette.types import Message

from convgrad.errors import Overloaded, PayloadTooLarge
from convgrad_service.engine.memory import MemoryBudget
from convgrad_service.http_api import body as module
from convgrad_service.http_api.body import BodyLimits, read_body
from convgrad_service.http_api.middleware import ClientGone

MiB = 2**20


def read(
    parts: Sequence[bytes],
    length: int | None,
    *,
    max_bytes: int = 100 * MiB,
    budget: MemoryBudget | None = None,
    gone: bool = False,
) -> bytes:
    left = list(parts)

    async def receive() -> Message:
        if gone and not left:
            return {"type": "http.disconnect"}
        part = left.pop(0) if left else b""
        return {"type": "http.request", "body": part, "more_body": bool(left) or gone}

    async def scenario() -> bytes:
        with (budget or MemoryBudget(100 * MiB)).reservation() as reservation:
            limits = BodyLimits(max_bytes, 1.0, 1.0)
            view = await read_body(receive, length, limits, reservation)
            assert reservation.held_bytes >= len(view)
            return bytes(view)

    return asyncio.run(scenario())


@pytest.mark.parametrize("length", [None, 0, 3, 10, 2**40 // 10**5])
@pytest.mark.parametrize("parts", [[b""], [b"abc"], [b"a" * 70_000, b"", b"b" * 70_000, b"c"]])
def test_the_bytes_are_those_that_came(parts: list[bytes], length: int | None) -> None:
    assert read(parts, length) == b"".join(parts)


def test_it_grows_past_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_BUFFER_BYTES", 1000)
    parts = [bytes([i]) * 777 for i in range(100)]
    for length in (None, 77_700, 5, 100_000):
        assert read(parts, length) == b"".join(parts)


def test_a_promise_alone_reserves_nothing() -> None:
    budget = MemoryBudget(10 * MiB)
    with pytest.raises(ClientGone):
        read([b"x"], 90 * MiB, budget=budget, gone=True)
    assert budget.used_bytes == 0


def test_what_others_hold_is_refused_as_it_arrives() -> None:
    budget = MemoryBudget(4 * MiB)
    with budget.reservation() as others:
        others.grow(3 * MiB)
        with pytest.raises(Overloaded):
            read([b"x" * MiB] * 3, None, budget=budget)
    assert budget.used_bytes == 0


@pytest.mark.parametrize("length", [None, 1, 1000])
def test_the_limit_counts_what_arrives(length: int | None) -> None:
    assert read([b"x" * 1000], length, max_bytes=1000)
    with pytest.raises(PayloadTooLarge, match="longer than 1,000 bytes"):
        read([b"x" * 999, b"xx"], length, max_bytes=1000)


def test_a_promise_over_the_limit_is_refused_unread() -> None:
    with pytest.raises(PayloadTooLarge, match="Content-Length is 1,001"):
        read([], 1001, max_bytes=1000)
