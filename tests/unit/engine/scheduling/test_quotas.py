"""Quotas of API keys: counting, refusals, and release."""

from __future__ import annotations

import asyncio

import pytest

from convgrad.errors import Overloaded, ProblemTooLarge
from convgrad_service.engine.embedded import embedded_hub
from convgrad_service.engine.options import EngineOptions
from convgrad_service.engine.scheduling.quotas import (
    ANYBODY,
    Caller,
    KeyLimits,
    Quotas,
    Ticket,
)
from tests.support.fake_backends import Zeros


def charge(ticket: Ticket, size_bytes: int, flops: int = 0) -> None:
    asyncio.run(ticket.charge(size_bytes, flops))


def test_requests_in_flight() -> None:
    quotas, ada = Quotas(), Caller("ada", KeyLimits(inflight=2))
    first, _ = quotas.acquire(ada), quotas.acquire(ada)
    with pytest.raises(Overloaded, match="key 'ada' has 2 requests in flight; its limit is 2"):
        quotas.acquire(ada)
    quotas.acquire(Caller("bob", KeyLimits(inflight=1)))
    first.release()
    first.release()
    quotas.acquire(ada)
    with pytest.raises(Overloaded) as refused:
        quotas.acquire(ada)
    assert refused.value.retry_after_s == 1
    assert quotas.used["ada"].refused == {"inflight": 2}
    assert not quotas.used["bob"].refused


def test_bytes_in_flight() -> None:
    quotas, ada = Quotas(), Caller("ada", KeyLimits(inflight_bytes=1000))
    first, second = quotas.acquire(ada), quotas.acquire(ada)
    charge(first, 600)
    charge(second, 400)
    with pytest.raises(Overloaded, match=r"hold 1,000 of the 1,000 bytes .* this one needs 1"):
        charge(quotas.acquire(ada), 1)
    with pytest.raises(ProblemTooLarge, match="1,001 bytes, more than the 1,000 that the API key"):
        charge(second, 1001)
    first.release()
    assert quotas.used["ada"].size_bytes == 400
    charge(quotas.acquire(ada), 600)


def test_request_rate_allows_a_burst_of_one_second() -> None:
    now_s = 100.0
    quotas, ada = Quotas(lambda: now_s), Caller("ada", KeyLimits(requests_per_s=4))
    refused: list[Overloaded] = []

    def answered(seconds: float, every_s: float) -> int:
        nonlocal now_s
        count, until_s = 0, now_s + seconds
        while now_s < until_s:
            try:
                quotas.acquire(ada).release()
                count += 1
            except Overloaded as error:
                refused.append(error)
            now_s += every_s
        return count

    assert answered(10, 1 / 64) == 4 + 39  # a burst, then four per second
    assert all(0 < (error.retry_after_s or 0) <= 0.25 for error in refused)
    assert "'ada' sends more than 4 requests a second" in refused[0].detail
    now_s += 60
    assert answered(10, 1 / 4) == 40  # at the rate, nothing is refused
    now_s += 60
    assert answered(0.01, 0.001) == 4  # the burst does not grow while idle


def test_flops_rate() -> None:
    now_s = 100.0
    quotas, ada = Quotas(lambda: now_s), Caller("ada", KeyLimits(flops_per_s=1e9))
    # Larger than the bucket, which must not be refused for good.
    charge(quotas.acquire(ada), 0, 5 * 10**9)
    now_s += 3.9
    with pytest.raises(
        Overloaded, match=r"'ada' has used its 1e\+09 FLOPs.* for the next 1.1 s"
    ) as refused:
        charge(quotas.acquire(ada), 0, 1)
    assert refused.value.retry_after_s == pytest.approx(0.1)
    assert quotas.used["ada"].refused == {"flops_per_s": 1}
    now_s += 0.1
    for _ in range(10):  # from the refill on, the average is the rate
        charge(quotas.acquire(ada), 0, 10**9)
        now_s += 1
    charge(quotas.acquire(ada), 2**40)  # storing a tensor charges no FLOPs


def test_slow_request_rate_allows_single_requests() -> None:
    now_s = 0.0
    quotas, ada = Quotas(lambda: now_s), Caller("ada", KeyLimits(requests_per_s=0.1))
    quotas.acquire(ada)
    now_s = 4.0
    with pytest.raises(Overloaded) as refused:
        quotas.acquire(ada)
    assert refused.value.retry_after_s == pytest.approx(6)
    now_s = 10.0
    quotas.acquire(ada)


def test_a_ticket_returns_what_it_was_charged() -> None:
    async def run() -> None:
        quotas, ada = Quotas(), Caller("ada", KeyLimits(inflight=1, inflight_bytes=10))
        ticket = quotas.acquire(ada)
        await ticket.charge(10)
        for _ in range(2):
            ticket.release()
            usage = quotas.used["ada"]
            assert (usage.requests, usage.size_bytes) == (0, 0)

    asyncio.run(run())


def test_requests_without_limits_are_not_counted() -> None:
    async def run() -> None:
        hub = embedded_hub(Zeros(), EngineOptions(tensor_bytes=2**20, text_bytes=2**20))
        for caller in (ANYBODY, Caller("ada")):
            assert await hub.acquire_ticket(caller) is None
        assert not hub.quotas.used
        hub.close()

    asyncio.run(run())
