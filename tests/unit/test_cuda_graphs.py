"""Graphs of plans that repeat: recorded the second time, launched from then on, and bounded."""

from __future__ import annotations

from typing import Any, cast

import pytest

from convgrad_service.backends.cuda.graphs import KEPT, Graphs
from convgrad_service.backends.cuda.launch import Kernels
from convgrad_service.plans.cuda_program import Clear, Step

Steps = tuple[Step, ...]


class Stream:
    """Notes what it is told, as a capture or at once."""

    def __init__(self) -> None:
        self.ptr = id(self)
        self.done: list[str] = []
        self.capture: list[str] | None = None

    def put(self, what: str) -> None:
        (self.done if self.capture is None else self.capture).append(what)

    def begin_capture(self) -> None:
        self.capture = []

    def end_capture(self) -> Graph:
        recorded, self.capture = self.capture, None
        assert recorded is not None
        return Graph(recorded)


class Graph:
    def __init__(self, recorded: list[str]) -> None:
        self.recorded = recorded

    def launch(self, stream: Stream) -> None:
        stream.done.append(f"graph of {' '.join(self.recorded)}")


class Steppers:
    """Stands for `Kernels`."""

    fails = False

    def run(self, steps: Steps, addresses: dict[str, int], stream: Stream) -> None:
        if self.fails:
            raise RuntimeError("refused")
        for step in steps:
            assert isinstance(step, Clear)
            stream.put(f"{step.buffer}@{addresses[step.buffer]}")


@pytest.fixture
def steppers() -> Steppers:
    return Steppers()


@pytest.fixture
def graphs(steppers: Steppers) -> Graphs:
    return Graphs(cast(Kernels, steppers))


def steps_of(name: str) -> Steps:
    return Clear(name, 4), Clear(name, 8)


def test_the_second_run_records(graphs: Graphs) -> None:
    stream, steps = Stream(), steps_of("a")
    held: list[Any] = [graphs.run(steps, {"a": 1}, stream) for _ in range(4)]
    assert stream.done == ["a@1", "a@1", *["graph of a@1 a@1"] * 3]
    assert held[0] is None
    assert held[1] is held[2] is held[3]


def test_other_addresses_and_other_plans_are_others(graphs: Graphs) -> None:
    stream, steps = Stream(), steps_of("a")
    for address in (1, 2):
        graphs.run(steps, {"a": address}, stream)
    graphs.run(steps_of("a"), {"a": 1}, stream)  # equal, but not the same
    assert stream.done == ["a@1", "a@1", "a@2", "a@2", "a@1", "a@1"]


def test_only_the_latest_are_remembered(graphs: Graphs) -> None:
    stream, steps = Stream(), steps_of("a")
    for address in range(KEPT + 1):
        graphs.run(steps, {"a": address}, stream)
    stream.done.clear()
    graphs.run(steps, {"a": 0}, stream)
    assert stream.done == ["a@0", "a@0"], "forgotten"
    graphs.run(steps, {"a": KEPT}, stream)
    assert stream.done[2:] == [f"graph of a@{KEPT} a@{KEPT}"]


def test_a_recording_that_fails_ends(graphs: Graphs, steppers: Steppers) -> None:
    stream, steps = Stream(), steps_of("a")
    graphs.run(steps, {"a": 1}, stream)
    steppers.fails = True
    with pytest.raises(RuntimeError, match="refused"):
        graphs.run(steps, {"a": 1}, stream)
    assert stream.capture is None
    steppers.fails = False
    graphs.run(steps, {"a": 1}, stream)
    assert stream.done[2:] == ["graph of a@1 a@1"]


def test_other_streams_record_their_own(graphs: Graphs) -> None:
    """Their kernels count in zeros of their own."""
    first, second, steps = Stream(), Stream(), steps_of("a")
    for _ in range(3):
        graphs.run(steps, {"a": 1}, first)
    graphs.run(steps, {"a": 1}, second)
    assert first.done[-1] == "graph of a@1 a@1"
    assert second.done == ["a@1", "a@1"]
