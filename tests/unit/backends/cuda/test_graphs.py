"""Graphs of plans that repeat: recorded the second time, launched from then on, and bounded."""

from __future__ import annotations

from typing import cast

import pytest

from convgrad_service.backends.cuda.graphs import MAX_GRAPHS, Graphs
from convgrad_service.backends.cuda.launch import Kernels
from convgrad_service.plans.cuda.program import Clear, CudaPlan, Step

Recorded = list[str] | None


class Stream:
    """Notes what it is told, as a capture or at once."""

    def __init__(self, non_blocking: bool = False) -> None:
        self.ptr = id(self)
        self.beside = non_blocking
        self.done: list[str] = []
        self.capture: Recorded = None

    def put(self, what: str) -> None:
        (self.done if self.capture is None else self.capture).append(what)

    def begin_capture(self) -> None:
        self.capture = []

    def end_capture(self) -> Graph:
        recorded, self.capture = self.capture, None
        assert recorded is not None
        return Graph(recorded)

    def record(self) -> Recorded:
        return self.capture

    def wait_event(self, event: Recorded) -> None:
        """What waits for a part of a recording is part of it."""
        self.capture = event
        if not self.beside:
            self.put("waited")


class Graph:
    def __init__(self, recorded: list[str]) -> None:
        self.recorded = recorded

    def launch(self, stream: Stream) -> None:
        stream.done.append(f"graph of {' '.join(self.recorded)}")


class Steppers:
    """Stands for `Kernels`."""

    fails = False
    fails_beside = False

    def run(self, steps: tuple[Step, ...], addresses: dict[str, int], stream: Stream) -> None:
        if self.fails or (self.fails_beside and stream.beside):
            raise RuntimeError("refused")
        for step in steps:
            assert isinstance(step, Clear)
            stream.put(f"{'|' * stream.beside}{step.buffer}@{addresses[step.buffer]}")


@pytest.fixture
def steppers() -> Steppers:
    return Steppers()


@pytest.fixture
def graphs(steppers: Steppers) -> Graphs:
    return Graphs(cast(Kernels, steppers), lambda: Stream(non_blocking=True))


def plan_of(name: str, branches: tuple[int, ...] = ()) -> CudaPlan:
    return CudaPlan(name, 0, 1, (), (Clear(name, 4), Clear(name, 8)), branches=branches)


def test_the_second_run_records(graphs: Graphs) -> None:
    stream, plan = Stream(), plan_of("a")
    for _ in range(4):
        graphs.run(plan, {"a": 1}, stream)
    assert stream.done == ["a@1", "a@1", *["graph of a@1 a@1"] * 3]


def test_other_addresses_and_other_plans_are_others(graphs: Graphs) -> None:
    stream, plan = Stream(), plan_of("a")
    for address in (1, 2):
        graphs.run(plan, {"a": address}, stream)
    graphs.run(plan_of("a"), {"a": 1}, stream)  # equal, but not the same
    assert stream.done == ["a@1", "a@1", "a@2", "a@2", "a@1", "a@1"]


def test_only_the_latest_are_remembered(graphs: Graphs) -> None:
    stream, plan = Stream(), plan_of("a")
    for address in range(MAX_GRAPHS + 1):
        graphs.run(plan, {"a": address}, stream)
    stream.done.clear()
    graphs.run(plan, {"a": 0}, stream)
    assert stream.done == ["a@0", "a@0"], "forgotten"
    graphs.run(plan, {"a": MAX_GRAPHS}, stream)
    assert stream.done[2:] == [f"graph of a@{MAX_GRAPHS} a@{MAX_GRAPHS}"]


def test_a_recording_that_fails_ends(graphs: Graphs, steppers: Steppers) -> None:
    stream, plan = Stream(), plan_of("a")
    graphs.run(plan, {"a": 1}, stream)
    steppers.fails = True
    with pytest.raises(RuntimeError, match="refused"):
        graphs.run(plan, {"a": 1}, stream)
    assert stream.capture is None
    steppers.fails = False
    graphs.run(plan, {"a": 1}, stream)
    assert stream.done[2:] == ["graph of a@1 a@1"]


def test_branches_are_recorded_side_by_side(graphs: Graphs) -> None:
    stream, plan = Stream(), plan_of("a", (0, 1))
    for _ in range(3):
        graphs.run(plan, {"a": 1}, stream)
    assert stream.done == ["a@1", "waited", *["graph of a@1 |a@1 waited"] * 2]


def test_no_recording_makes_a_stream(steppers: Steppers) -> None:
    made: list[Stream] = []

    def new_stream() -> Stream:
        assert stream.capture is None
        made.append(Stream(non_blocking=True))
        return made[-1]

    stream, plan = Stream(), plan_of("a", (0, 1))
    graphs = Graphs(cast(Kernels, steppers), new_stream)
    for _ in range(3):
        graphs.run(plan, {"a": 1}, stream)
    assert len(made) == 1


def test_a_branch_that_fails_is_waited_for(graphs: Graphs, steppers: Steppers) -> None:
    """What was launched beside the stream may still run."""
    stream, plan = Stream(), plan_of("a", (0, 1))
    steppers.fails_beside = True
    for run in (1, 2):
        with pytest.raises(RuntimeError, match="refused"):
            graphs.run(plan, {"a": 1}, stream)
        assert stream.done == ["a@1", "waited"] * run
    assert stream.capture is None


def test_what_branches_share_goes_first(graphs: Graphs) -> None:
    stream, plan = Stream(), plan_of("a", (1, 1))
    for _ in range(2):
        graphs.run(plan, {"a": 1}, stream)
    assert stream.done == ["a@1", "waited", "graph of a@1 |a@1 waited"]


def test_other_streams_record_their_own(graphs: Graphs) -> None:
    """Their kernels count in zeros of their own."""
    first, second, plan = Stream(), Stream(), plan_of("a")
    for _ in range(3):
        graphs.run(plan, {"a": 1}, first)
    graphs.run(plan, {"a": 1}, second)
    assert first.done[-1] == "graph of a@1 a@1"
    assert second.done == ["a@1", "a@1"]
