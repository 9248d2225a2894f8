"""The compute queue: order, lanes, bounds, cancellation, deadlines."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest

from convgrad.errors import DeadlineExceeded, Overloaded
from convgrad_service.engine.pace import Pace
from convgrad_service.engine.queue import ComputeQueue, Ticket


class Gate:
    """Work that runs until it is opened or cancelled."""

    def __init__(self) -> None:
        self.running = threading.Event()
        self.open = threading.Event()
        self.gave_up = False

    def __call__(self, cancelled: threading.Event) -> str:
        self.running.set()
        while not self.open.wait(0.005):
            if cancelled.is_set():
                self.gave_up = True
                break
        return "done"


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities on Linux")
def test_computing_gives_way_to_the_event_loop() -> None:
    queue = ComputeQueue(1, 1)

    def niceness(_: threading.Event) -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert queue.submit(niceness).future.result(5) > own
    queue.close()


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open.set()


def test_results_and_failures_come_through() -> None:
    queue = ComputeQueue(2, 4)
    assert queue.submit(lambda _: 7).future.result(5) == 7
    failing = queue.submit(lambda _: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        failing.future.result(5)
    queue.close()


def test_waiting_work_runs_in_order_of_arrival(gate: Gate) -> None:
    queue = ComputeQueue(1, 10)
    queue.submit(gate)
    seen: list[int] = []
    tickets = [queue.submit(lambda _, i=i: seen.append(i)) for i in range(5)]  # type: ignore[misc]
    gate.open.set()
    for ticket in tickets:
        ticket.future.result(5)
    assert seen == [0, 1, 2, 3, 4]
    assert tickets[0].waited_s is not None
    assert tickets[0].waited_s > 0
    queue.close()


def test_more_than_may_wait_is_refused_with_an_estimate(gate: Gate) -> None:
    queue = ComputeQueue(1, 2, pace=known_pace(units_per_s=100.0))
    queue.submit(gate, cost=500.0)
    assert gate.running.wait(5)
    queue.submit(gate, cost=300.0)
    queue.require_room()
    queue.submit(gate, cost=200.0)
    with pytest.raises(Overloaded) as refused:
        queue.submit(gate)
    assert refused.value.retry_after_s == pytest.approx(10.0, rel=0.05)
    with pytest.raises(Overloaded):
        queue.require_room()
    queue.close()


def test_large_work_leaves_the_last_slot_free(gate: Gate) -> None:
    queue = ComputeQueue(2, 10, large_s=1.0, pace=known_pace(units_per_s=1.0))
    queue.submit(gate, cost=10.0)
    assert gate.running.wait(5)
    second = queue.submit(gate, cost=10.0)
    small = queue.submit(lambda _: "small", cost=0.1)
    assert small.future.result(5) == "small"  # it overtook the second large one
    assert not second.future.running()
    gate.open.set()
    assert second.future.result(5) == "done"
    queue.close()


def test_with_one_slot_large_work_runs_too() -> None:
    queue = ComputeQueue(1, 10, large_s=1.0, pace=known_pace(units_per_s=1.0))
    assert queue.submit(lambda _: 1, cost=100.0).future.result(5) == 1
    queue.close()


def test_cancelled_while_waiting_never_runs(gate: Gate) -> None:
    queue = ComputeQueue(1, 10)
    queue.submit(gate)
    assert gate.running.wait(5)
    ran = threading.Event()
    ticket = queue.submit(lambda _: ran.set())
    queue.cancel(ticket)
    assert queue.waiting == 0
    with pytest.raises(CancelledError):
        ticket.future.result(5)
    gate.open.set()
    assert queue.submit(lambda _: 1).future.result(5) == 1
    assert not ran.is_set()
    queue.close()


def test_cancelled_while_running_is_told(gate: Gate) -> None:
    queue = ComputeQueue(1, 10)
    ticket = queue.submit(gate)
    assert gate.running.wait(5)
    queue.cancel(ticket)
    ticket.future.result(5)
    assert gate.gave_up
    queue.close()


def test_work_past_its_deadline_does_not_start(gate: Gate) -> None:
    queue = ComputeQueue(1, 10)
    queue.submit(gate)
    assert gate.running.wait(5)
    ticket = queue.submit(lambda _: 1, deadline_s=time.monotonic() + 0.02)
    time.sleep(0.05)
    gate.open.set()
    with pytest.raises(DeadlineExceeded):
        ticket.future.result(5)
    queue.close()


def test_closing_cancels_what_waits_and_what_runs(gate: Gate) -> None:
    queue = ComputeQueue(1, 10)
    running, waiting = queue.submit(gate), queue.submit(gate)
    assert gate.running.wait(5)
    queue.close()
    running.future.result(5)
    with pytest.raises(CancelledError):
        waiting.future.result(5)
    with pytest.raises(Overloaded):
        queue.submit(gate)


def test_a_finished_ticket_keeps_nothing_alive() -> None:
    import weakref

    class Tensors:
        pass

    tensors = Tensors()
    alive = weakref.ref(tensors)
    queue = ComputeQueue(1, 10)
    queue.submit(lambda _, held=tensors: 1).future.result(5)  # type: ignore[misc]
    del tensors
    until = time.monotonic() + 5
    while alive() is not None:
        assert time.monotonic() < until, "a thread that waits still holds the request's arrays"
        time.sleep(0.005)
    queue.close()


def test_many_threads_at_once() -> None:
    queue = ComputeQueue(4, 10_000)
    tickets: list[Ticket[int]] = []

    def submit() -> None:
        tickets.extend(queue.submit(lambda _: 1, cost=1.0) for _ in range(200))

    threads = [threading.Thread(target=submit) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(ticket.future.result(10) for ticket in tickets) == 1600
    queue.close()


def test_the_pace_follows_what_was_measured() -> None:
    pace = Pace()
    for _ in range(100):
        pace.learn(cost=1e9, seconds=2.0)
    assert pace.estimate_s(5e8) == pytest.approx(1.0, rel=0.01)
    for _ in range(100):
        pace.learn(cost=1e9, seconds=0.5)
    assert pace.estimate_s(5e8) == pytest.approx(0.25, rel=0.05)


def known_pace(units_per_s: float) -> Pace:
    pace = Pace()
    for _ in range(1000):
        pace.learn(units_per_s, 1.0)
    return pace
