"""The memory budget and the limits: what is reserved, refused and given back."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import pytest

from convgrad.errors import Overloaded, ProblemTooLarge
from convgrad_service.engine.limits import Limits
from convgrad_service.engine.memory import MemoryBudget


def test_what_is_reserved_is_given_back() -> None:
    budget = MemoryBudget(100)
    with budget.reservation() as reservation:
        reservation.grow(60)
        reservation.grow(0)
        reservation.grow(-5)
        assert (budget.used_bytes, reservation.held_bytes) == (60, 60)
    assert budget.used_bytes == 0


def test_others_memory_is_overloaded_and_too_much_is_too_large() -> None:
    budget = MemoryBudget(100)
    with budget.reservation() as first, budget.reservation() as second:
        first.grow(60)
        with pytest.raises(Overloaded) as refused:
            second.grow(50)
        assert refused.value.retry_after_s
        second.grow(40)
        with pytest.raises(ProblemTooLarge):
            second.grow(61)
        assert budget.used_bytes == 100
    assert budget.used_bytes == 0


def test_the_last_holder_gives_it_back() -> None:
    budget = MemoryBudget(100)
    with budget.reservation() as reservation:
        reservation.grow(10)
        reservation.retain()
    assert budget.used_bytes == 10
    reservation.release()
    assert budget.used_bytes == 0


def test_it_counts_right_from_many_threads() -> None:
    budget = MemoryBudget(10**9)

    def work() -> None:
        for _ in range(2000):
            with budget.reservation() as reservation:
                reservation.grow(3)
                reservation.grow(4)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert budget.used_bytes == 0


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


def test_a_size_of_thousands_of_digits_can_be_refused() -> None:
    with pytest.raises(ProblemTooLarge, match="about 1e9999"):
        check(Limits(problem_bytes=1000), memory_bytes=10**9999)
