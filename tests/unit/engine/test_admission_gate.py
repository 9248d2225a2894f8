"""The admission gate: who waits, is admitted or is refused, and when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from convgrad_service.engine import admission_gate
from convgrad_service.engine.admission_gate import AdmissionGate


class Queue:
    """The engine's queue."""

    room = 0


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 20))


async def use_up_refusal_burst(gate: AdmissionGate) -> None:
    await asyncio.gather(*(gate.admit() for _ in range(16)))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_requests_are_admitted_while_there_is_room() -> None:
    async def scenario() -> None:
        queue = Queue()
        gate = AdmissionGate(lambda: queue.room)
        assert gate.try_admit() is None
        queue.room = 2
        arrivals = [gate.try_admit() for _ in range(3)]
        assert arrivals[2] is None  # both slots are reserved
        assert arrivals[0] is not None
        gate.arrived(arrivals[0])
        assert gate.try_admit() is not None

    run(scenario())


def test_refusals_are_rate_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission_gate, "_MIN_REFUSALS_PER_S", 100.0)

    async def scenario() -> None:
        gate = AdmissionGate(lambda: 0)
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
        gate = AdmissionGate(lambda: queue.room)
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
        gate.arrived(arrival)
        assert None not in [await turn for turn in turns[1:]]

    run(scenario())


def test_slow_bodies_do_not_block_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_gate, "_MIN_REFUSALS_PER_S", 0.1)

    async def scenario() -> None:
        queue = Queue()
        gate = AdmissionGate(lambda: queue.room)
        await use_up_refusal_burst(gate)
        queue.room = 8
        assert None not in [gate.try_admit() for _ in range(8)]
        assert await gate.admit() is not None

    run(scenario())


def test_cancelled_requests_leave_the_line() -> None:
    async def scenario() -> None:
        queue = Queue()
        gate = AdmissionGate(lambda: queue.room)
        await use_up_refusal_burst(gate)
        leaving, staying = (asyncio.ensure_future(gate.admit()) for _ in range(2))
        await settle()
        queue.room = 2
        leaving.cancel()
        gate.arrived(0)  # before the cancelled task runs
        assert await staying is not None

    run(scenario())


def test_admitted_requests_are_refused_before_waiting_ones() -> None:
    async def scenario() -> None:
        queue = Queue()
        gate = AdmissionGate(lambda: queue.room)
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
        gate.arrived(0)
        await settle()
        assert all(refusal.done() for refusal in refusals)

    run(scenario())
