"""The line in front of an overloaded engine: who waits, who is let in, who is refused, and when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from convgrad_service.engine import admission_gate
from convgrad_service.engine.admission_gate import AdmissionGate


class Queue:
    """As much room as a test says."""

    room = 0


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 20))


async def all_that_may_be_refused_at_once(gate: AdmissionGate) -> None:
    await asyncio.gather(*(gate.turn() for _ in range(16)))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_whoever_comes_goes_on_while_there_is_room_and_nobody_waits() -> None:
    async def scenario() -> None:
        queue = Queue()
        gate = AdmissionGate(lambda: queue.room)
        assert gate.enter() is None
        queue.room = 2
        arrivals = [gate.enter() for _ in range(3)]
        assert arrivals[2] is None  # two are on their way to the two places
        assert arrivals[0] is not None
        gate.arrived(arrivals[0])
        assert gate.enter() is not None

    run(scenario())


def test_a_few_are_refused_at_once_and_the_others_as_time_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission_gate, "_FEWEST_REFUSED_PER_S", 100.0)

    async def scenario() -> None:
        gate = AdmissionGate(lambda: 0)
        began_s = time.monotonic()
        turns = [asyncio.ensure_future(gate.turn()) for _ in range(26)]
        await settle()
        assert [turn.done() for turn in turns] == [True] * 16 + [False] * 10
        assert await asyncio.gather(*turns) == [None] * 26
        assert time.monotonic() - began_s > 0.09

    run(scenario())


def test_whoever_waits_is_let_in_as_there_is_room_and_no_more_than_can_be_queued() -> None:
    async def scenario() -> None:
        queue = Queue()
        gate = AdmissionGate(lambda: queue.room)
        await all_that_may_be_refused_at_once(gate)
        turns = [asyncio.ensure_future(gate.turn()) for _ in range(3)]
        await settle()
        queue.room = 1
        assert gate.enter() is None  # who comes now stands behind them
        arrival = await turns[0]
        assert arrival is not None
        await settle()
        assert not turns[1].done()  # there is room for one, which is on its way
        queue.room = 2
        gate.arrived(arrival)
        assert None not in [await turn for turn in turns[1:]]

    run(scenario())


def test_slow_arrivals_do_not_keep_others_out_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_gate, "_FEWEST_REFUSED_PER_S", 0.1)

    async def scenario() -> None:
        queue = Queue()
        gate = AdmissionGate(lambda: queue.room)
        await all_that_may_be_refused_at_once(gate)
        queue.room = 8
        assert None not in [gate.enter() for _ in range(8)]
        assert await gate.turn() is not None

    run(scenario())


def test_whoever_leaves_the_line_is_not_waited_for() -> None:
    async def scenario() -> None:
        queue = Queue()
        gate = AdmissionGate(lambda: queue.room)
        await all_that_may_be_refused_at_once(gate)
        leaving, staying = (asyncio.ensure_future(gate.turn()) for _ in range(2))
        await settle()
        queue.room = 2
        leaving.cancel()
        gate.arrived(0)  # before it knows that it is cancelled
        assert await staying is not None

    run(scenario())


def test_what_was_let_in_and_is_refused_all_the_same_waits_before_others_are() -> None:
    async def scenario() -> None:
        queue = Queue()
        gate = AdmissionGate(lambda: queue.room)
        await all_that_may_be_refused_at_once(gate)
        turn = asyncio.ensure_future(gate.turn())
        await settle()
        await gate.refusal()
        assert not turn.done()
        assert await turn is None
        # Where there is room again, nobody waits to be refused.
        await all_that_may_be_refused_at_once(gate)
        refusals = [asyncio.ensure_future(gate.refusal()) for _ in range(50)]
        await settle()
        queue.room = 1000
        gate.arrived(0)
        await settle()
        assert all(refusal.done() for refusal in refusals)

    run(scenario())
