"""Leases of the arena, and limits on problems."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import pytest

from convgrad.errors import Overloaded, ProblemTooLarge
from convgrad_service.engine.admission import Limits
from convgrad_service.engine.memory.arena import PAGE_BYTES, FreeList, Lease, LeasePool

PAGES = 10


def memory(**options: Any) -> LeasePool:
    return LeasePool(FreeList(0, PAGES * PAGE_BYTES), **options)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


def reserving(subject: LeasePool, size_bytes: int, wait_s: float = 60) -> asyncio.Task[Lease]:
    return asyncio.ensure_future(subject.reserve(size_bytes, wait_s))


def test_last_holder_frees_the_lease() -> None:
    async def scenario() -> None:
        subject = memory()
        lease = await subject.reserve(3 * PAGE_BYTES - 1, 60)
        assert subject.used_bytes == 3 * PAGE_BYTES
        lease.retain()
        lease.release()
        assert subject.used_bytes == 3 * PAGE_BYTES
        lease.release()
        assert subject.used_bytes == 0

    run(scenario())


def test_reservations_wait_in_order() -> None:
    async def scenario() -> None:
        subject = memory()
        with pytest.raises(ProblemTooLarge):
            await subject.reserve(PAGES * PAGE_BYTES + 1, 60)
        first = await subject.reserve(6 * PAGE_BYTES, 60)
        large = reserving(subject, 8 * PAGE_BYTES)
        small = reserving(subject, 1)
        await asyncio.sleep(0)
        assert not large.done()
        assert not small.done(), "it overtook the large one, which could wait for ever"
        first.release()
        (await large).release()
        (await small).release()
        assert subject.used_bytes == 0

    run(scenario())


def test_timeout_raises_overloaded_and_grants_the_next() -> None:
    async def scenario() -> None:
        subject = memory(max_waiting=2)
        first = await subject.reserve(6 * PAGE_BYTES, 60)
        large = reserving(subject, 8 * PAGE_BYTES, 0.02)
        small = reserving(subject, 1)
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await subject.reserve(8 * PAGE_BYTES, 60)  # two wait already
        with pytest.raises(Overloaded) as refused:
            await large
        assert refused.value.retry_after_s
        (await small).release()
        first.release()
        assert subject.used_bytes == 0

    run(scenario())


def test_cancelled_reservations_get_no_lease() -> None:
    async def scenario() -> None:
        subject = memory()
        first = await subject.reserve(6 * PAGE_BYTES, 60)
        leaving, staying = (reserving(subject, 8 * PAGE_BYTES) for _ in range(2))
        await asyncio.sleep(0)
        leaving.cancel()
        first.release()
        (await staying).release()
        assert subject.used_bytes == 0

    run(scenario())


@pytest.mark.parametrize("keep_bytes", [4 * PAGE_BYTES, 4 * PAGE_BYTES - 1, 3 * PAGE_BYTES + 1])
def test_only_whole_pages_beyond_keep_bytes_are_discarded(keep_bytes: int) -> None:
    async def scenario() -> None:
        gone: list[tuple[int, int]] = []
        subject = memory(
            keep_bytes=keep_bytes, discard=lambda offset, size: gone.append((offset, size))
        )
        leases = [await subject.reserve(3 * PAGE_BYTES, 60) for _ in range(3)]
        for lease in leases:
            lease.release()
        assert gone == [(4 * PAGE_BYTES, 2 * PAGE_BYTES), (6 * PAGE_BYTES, 3 * PAGE_BYTES)]

    run(scenario())


def test_large_blocks_are_discarded_in_a_thread_before_reuse() -> None:
    async def scenario() -> None:
        size, seen = 64 * 2**20, threading.Event()

        def discard(offset: int, length: int) -> None:
            assert threading.current_thread() is not threading.main_thread()
            seen.wait(60)

        subject = LeasePool(FreeList(0, size), keep_bytes=0, discard=discard)
        (await subject.reserve(size, 60)).release()
        again = reserving(subject, size)
        await asyncio.sleep(0.01)
        assert not again.done()
        seen.set()
        lease = await again
        subject.stop_discarding()
        lease.release()
        assert subject.used_bytes == 0

    run(scenario())


@dataclass
class Sizes:
    memory_bytes: int = 10
    flops: int = 10
    operation: str = "conv_fwd"


def check(limits: Limits, **sizes: int) -> None:
    problem: Any = Sizes(**sizes)  # type: ignore[arg-type]
    limits.check(problem)


def test_limits() -> None:
    limits = Limits(problem_bytes=1000, problem_flops=1e6)
    check(limits, memory_bytes=1000, flops=10**6)
    with pytest.raises(ProblemTooLarge, match="1,001 bytes; this server takes at most 1,000"):
        check(limits, memory_bytes=1001)
    with pytest.raises(ProblemTooLarge, match="1,000,001 floating-point"):
        check(limits, flops=10**6 + 1)
    check(Limits(), memory_bytes=10**30, flops=10**30)


def test_sizes_with_thousands_of_digits_are_refused() -> None:
    with pytest.raises(ProblemTooLarge, match="about 1e9999"):
        check(Limits(problem_bytes=1000), memory_bytes=10**9999)
