"""The admission gate: who waits, is admitted or is refused, and when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from convgrad_service.engine import admission
from convgrad_service.engine.admission import AdmissionGate


class Queue:
    """The engine's queue."""

    room = 0
    most_ahead = 100


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 20))


def gate_of(queue: Queue, report: Callable[[int], None] = lambda _: None) -> AdmissionGate:
    return AdmissionGate(lambda: queue.room, lambda: queue.most_ahead, report)


async def use_up_refusal_burst(gate: AdmissionGate) -> None:
    await asyncio.gather(*(gate.admit() for _ in range(16)))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_requests_are_admitted_while_there_is_room() -> None:
    async def scenario() -> None:
        queue = Queue()
        gate = gate_of(queue)
        assert gate.try_admit() is None
        queue.room = 2
        arrivals = [gate.try_admit() for _ in range(3)]
        assert arrivals[2] is None  # both slots are reserved
        assert arrivals[0] is not None
        arrivals[0].end()
        assert gate.try_admit() is not None

    run(scenario())


def test_refusals_are_rate_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission, "_REFUSALS_PER_S", 100.0)

    async def scenario() -> None:
        gate = gate_of(Queue())
        began_s = time.monotonic()
        turns = [asyncio.ensure_future(gate.admit()) for _ in range(26)]
        await settle()
        assert [turn.done() for turn in turns] == [True] * 16 + [False] * 10
        assert await asyncio.gather(*turns) == [None] * 26
        assert time.monotonic() - began_s > 0.09

    run(scenario())


def test_waiting_requests_are_admitted_up_to_the_room() -> None:
    async def scenario() -> None:
        queue = Queue()
        gate = gate_of(queue)
        await use_up_refusal_burst(gate)
        turns = [asyncio.ensure_future(gate.admit()) for _ in range(3)]
        await settle()
        queue.room = 1
        assert gate.try_admit() is None  # new requests queue behind the waiting ones
        arrival = await turns[0]
        assert arrival is not None
        await settle()
        assert not turns[1].done()  # the only slot is reserved
        queue.room = 2
        arrival.end()
        assert None not in [await turn for turn in turns[1:]]

    run(scenario())


def test_slow_bodies_do_not_block_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_REFUSALS_PER_S", 0.1)

    async def scenario() -> None:
        queue = Queue()
        gate = gate_of(queue)
        await use_up_refusal_burst(gate)
        queue.room = 8
        assert None not in [gate.try_admit() for _ in range(8)]
        assert await gate.admit() is not None

    run(scenario())


def test_cancelled_requests_leave_the_line() -> None:
    async def scenario() -> None:
        queue = Queue()
        gate = gate_of(queue)
        await use_up_refusal_burst(gate)
        leaving, staying = (asyncio.ensure_future(gate.admit()) for _ in range(2))
        await settle()
        queue.room = 2
        leaving.cancel()
        gate.update_soon()  # before the cancelled task runs
        assert await staying is not None

    run(scenario())


def test_admitted_requests_are_refused_before_waiting_ones() -> None:
    async def scenario() -> None:
        queue = Queue()
        gate = gate_of(queue)
        await use_up_refusal_burst(gate)
        turn = asyncio.ensure_future(gate.admit())
        await settle()
        await gate.wait_to_refuse()
        assert not turn.done()
        assert await turn is None
        # Once there is room again, refusals do not wait.
        await use_up_refusal_burst(gate)
        refusals = [asyncio.ensure_future(gate.wait_to_refuse()) for _ in range(50)]
        await settle()
        queue.room = 1000
        gate.update_soon()
        await settle()
        assert all(refusal.done() for refusal in refusals)

    run(scenario())


def test_large_bodies_are_received_a_few_ahead() -> None:
    async def scenario() -> None:
        queue = Queue()
        queue.room, queue.most_ahead = 64, 2
        lengths: list[int] = []
        gate = gate_of(queue, lengths.append)
        first, second = (gate.try_admit(large=True) for _ in range(2))
        assert first is not None
        assert second is not None
        assert gate.try_admit(large=True) is None
        turns = [asyncio.ensure_future(gate.admit(large=True)) for _ in range(3)]
        await settle()
        assert lengths[-1] == 3
        assert gate.try_admit() is not None  # there is room for small ones, and they pass
        first.arrived()
        await settle()
        assert not turns[0].done()  # received, and not computed yet
        first.end()
        second.end()
        await settle()
        assert [turn.done() for turn in turns] == [True, True, False]  # in turn
        assert lengths[-1] == 1
        queue.room = 0
        assert gate.try_admit() is None
        for turn in turns[:2]:
            given = turn.result()
            assert given is not None
            given.end()
        assert await turns[2] is None  # refused, as there is no room

    run(scenario())


def test_slow_bodies_do_not_count_as_received_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        queue = Queue()
        queue.room, queue.most_ahead = 64, 2
        gate = gate_of(queue)
        slow = [gate.try_admit(large=True) for _ in range(2)]
        began_s = time.monotonic()
        assert await gate.admit(large=True) is not None
        assert time.monotonic() - began_s < 10 * admission._RECEIVING_LARGE_S
        assert None not in slow

    run(scenario())


def test_a_line_that_moves_is_not_refused_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where the last in line would wait for longer than the limit, more are refused."""
    monkeypatch.setattr(admission, "_MAX_WAIT_S", 0.5)

    async def refused_of(*, moves: bool) -> int:
        queue = Queue()
        gate = gate_of(queue)
        await use_up_refusal_burst(gate)
        turns = [asyncio.ensure_future(gate.admit()) for _ in range(200)]
        while not all(turn.done() for turn in turns):
            queue.room = 1000 if moves else 0
            await asyncio.sleep(0.01)
        return sum(turn.result() is None for turn in turns)

    async def scenario() -> None:
        began_s = time.monotonic()
        assert await refused_of(moves=False) == 200
        assert time.monotonic() - began_s < 10
        assert await refused_of(moves=True) < 10

    run(scenario())
