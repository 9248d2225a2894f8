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


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_it_is_open_while_there_is_room_and_nobody_waits() -> None:
    async def scenario() -> None:
        queue = Queue()
        gate = AdmissionGate(queue)
        assert not gate.is_open
        queue.room = 1
        assert gate.is_open

    run(scenario())


def test_a_few_are_refused_at_once_and_the_others_as_time_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission_gate, "_FEWEST_REFUSED_PER_S", 100.0)

    async def scenario() -> None:
        gate = AdmissionGate(Queue())
        began_s = time.monotonic()
        turns = [asyncio.ensure_future(gate.turn()) for _ in range(26)]
        await settle()
        assert [turn.done() for turn in turns] == [True] * 16 + [False] * 10
        assert all(await asyncio.gather(*turns))
        assert time.monotonic() - began_s > 0.09

    run(scenario())


def test_whoever_waits_is_let_in_as_there_is_room_and_no_more_than_can_be_queued() -> None:
    async def scenario() -> None:
        queue = Queue()
        gate = AdmissionGate(queue)
        await asyncio.gather(*(gate.turn() for _ in range(16)))  # no more can be refused at once
        turns = [asyncio.ensure_future(gate.turn()) for _ in range(3)]
        await settle()
        queue.room = 1
        assert not gate.is_open  # who comes now stands behind them
        assert await turns[0] is False
        gate.arriving += 1
        await settle()
        assert not turns[1].done()  # there is room for one, which is on its way
        queue.room = 2
        gate.arrived()
        assert [await turn for turn in turns[1:]] == [False, False]
        assert gate.is_open

    run(scenario())


def test_slow_arrivals_do_not_keep_others_out_for_ever() -> None:
    async def scenario() -> None:
        queue = Queue()
        gate = AdmissionGate(queue)
        await asyncio.gather(*(gate.turn() for _ in range(16)))
        gate.arriving = 50
        turn = asyncio.ensure_future(gate.turn())
        await settle()
        queue.room = 1
        assert await turn is False

    run(scenario())


def test_whoever_leaves_the_line_is_not_waited_for() -> None:
    async def scenario() -> None:
        queue = Queue()
        gate = AdmissionGate(queue)
        await asyncio.gather(*(gate.turn() for _ in range(16)))
        leaving, staying = (asyncio.ensure_future(gate.turn()) for _ in range(2))
        await settle()
        queue.room = 1
        leaving.cancel()
        gate.arriving += 1
        gate.arrived()  # before it knows that it is cancelled
        assert await staying is False
        assert gate.is_open

    run(scenario())


def test_what_was_admitted_and_is_refused_all_the_same_waits_before_others_are() -> None:
    async def scenario() -> None:
        gate = AdmissionGate(Queue())
        await asyncio.gather(*(gate.turn() for _ in range(16)))
        turn = asyncio.ensure_future(gate.turn())
        await settle()
        await gate.refusal()
        assert not turn.done()
        assert await turn is True

    run(scenario())
