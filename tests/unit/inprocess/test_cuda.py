"""Launches in the caller's process: what waits for what, without a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.core import tensor_maps
from convgrad_service.inprocess import cuda
from convgrad_service.inprocess.base import problem_of
from convgrad_service.plans.cuda.device import H200
from convgrad_service.plans.cuda.planner import plan_for
from convgrad_service.plans.cuda.program import ZEROS, Launch

CALLER = 7


class Recorded:
    """Stands for the loaded kernels, the zeros and the CUDA runtime, and notes what they do."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.cuda = SimpleNamespace(runtime=self, Event=self._event, Stream=self._stream)
        self._made = 100

    def _event(self, **_: Any) -> Any:
        self._made += 1
        return SimpleNamespace(ptr=self._made)

    _stream = _event

    def bind(
        self, steps: Sequence[Any], addresses: Mapping[str, int], buffers: Sequence[str]
    ) -> list[Any]:
        return [Noted(self, step, addresses, buffers) for step in steps]

    def of(self, user: tuple[int, ...]) -> int:
        return hash(user)

    def sides(self, count: int) -> tuple[int, list[tuple[int, int]]]:
        return 1, [(10 * n, n) for n in range(2, 2 + count)]

    def eventRecord(self, event: int, stream: int) -> None:  # noqa: N802 - CuPy's name
        self.log.append(("record", event, stream))

    def streamWaitEvent(self, stream: int, event: int) -> None:  # noqa: N802 - CuPy's name
        self.log.append(("wait", stream, event))


class Noted:
    """A step that notes when it is enqueued, and where it would find its buffers."""

    def __init__(
        self, recorded: Recorded, step: Any, addresses: Mapping[str, int], buffers: Sequence[str]
    ) -> None:
        self._log, self._step, self._buffers = recorded.log, step, buffers
        self.places = dict(addresses)

    def __call__(self, stream: int) -> None:
        self._log.append((self._step, stream))

    def point(self, addresses: Sequence[int]) -> None:
        self.places = dict(zip(self._buffers, addresses, strict=True))


def prepared(pixels: int) -> tuple[cuda.PreparedOnCuda, Recorded, Any]:
    x, w = (2, pixels, pixels, 128), (128, 3, 3, 128)
    tensors = dict.fromkeys(("grad_output", "input"), (x, "bfloat16"))
    parameters = {"layout": "NHWC", "padding": 1, "outputs": ["grad_input", "grad_weight"]}
    problem = problem_of("conv_backward", {**tensors, "weight": (w, "bfloat16")}, parameters)
    plan, recorded = plan_for(problem, H200, FAMILIES), Recorded()
    made: Any = recorded
    return cuda.PreparedOnCuda(problem, plan, made, made), recorded, plan


@pytest.mark.parametrize(("pixels", "capture"), [(128, 0), (8, 3)], ids=["long", "captured"])
def test_branches_fork_and_join(monkeypatch: pytest.MonkeyPatch, pixels: int, capture: int) -> None:
    monkeypatch.setattr(cuda, "capture_id", lambda stream: capture)
    operation, recorded, plan = prepared(pixels)
    assert len(plan.branches) == 2
    operation.launch([0] * 5, 0, CALLER)
    cut = plan.branches[1]
    assert recorded.log == [
        ("record", 1, CALLER),
        ("wait", 2, 1),
        *((step, CALLER) for step in plan.steps[:cut]),
        *((step, 2) for step in plan.steps[cut:]),
        ("record", 20, 2),
        ("wait", CALLER, 20),
    ]


def test_short_branches_run_one_after_another() -> None:
    """Forking would take the host longer than it saves."""
    operation, recorded, plan = prepared(8)
    for _ in range(2):
        operation.launch([0] * 5, 0, CALLER, capturing=False)
    assert recorded.log == [(step, CALLER) for step in plan.steps] * 2


def test_the_sides_are_joined_where_a_launch_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    operation, recorded, _ = prepared(128)

    def fail(step: Noted, stream: int) -> None:
        raise ValueError("refused")

    monkeypatch.setattr(Noted, "__call__", fail)
    with pytest.raises(ValueError, match="refused"):
        operation.launch([0] * 5, 0, CALLER, capturing=False)
    assert recorded.log[-2:] == [("record", 20, 2), ("wait", CALLER, 20)]


def test_each_launch_points_its_steps_at_its_own_buffers() -> None:
    """Every branch has zeros of its own, on every stream."""
    operation, _, plan = prepared(8)
    names = (*operation.inputs, *operation.outputs)
    seen = set()
    for stream, first in ((CALLER, 4096), (CALLER, 8192), (9, 8192), (9, 8192), (CALLER, 4096)):
        addresses = [first + 256 * index for index in range(len(names))]
        operation.launch(addresses, 2**20, stream, capturing=False)
        branches = operation._branches
        for index, branch in enumerate(branches):
            for step in branch:
                assert isinstance(step, Noted)
                assert [step.places[name] for name in names] == addresses
                assert step.places[ZEROS] == hash((stream, 0, index))
                seen.add((stream, index, step.places[ZEROS]))
        assert [item.name for item in plan.workspace] == [
            name for name in branches[-1][0].places if name not in (*names, ZEROS)
        ]
    assert len({zeros for *_, zeros in seen}) == len(seen)


@pytest.mark.parametrize("pixels", [8, 56, 128])
def test_a_block_pointed_elsewhere_is_one_filled_for_there(
    monkeypatch: pytest.MonkeyPatch, pixels: int
) -> None:
    def encoded(_: Any, address: int) -> bytes:
        return address.to_bytes(tensor_maps.MAP_BYTES, "little")

    def replace_address(at: int, address: int) -> int:
        ctypes.c_uint64.from_address(at).value = address
        return 0

    monkeypatch.setattr(tensor_maps, "_encoded", encoded)
    monkeypatch.setattr(tensor_maps, "_replace_address", lambda: replace_address)
    monkeypatch.setattr(tensor_maps, "_driver_version", lambda: tensor_maps.OLD_DRIVER + 1)
    operation, _, plan = prepared(pixels)
    buffers = operation._buffers
    here = {name: 2**20 * (index + 1) for index, name in enumerate(buffers)}
    there = {name: address + 2**30 for name, address in here.items()}
    launches = [step for step in plan.steps if isinstance(step, Launch)]
    assert launches
    for step in launches:
        block = step.arguments.block(here, buffers)
        block.point(list(there.values()))
        wanted = bytes(step.arguments.fill(there))
        assert ctypes.string_at(block.address, len(wanted)) == wanted


def test_counters_are_allocated_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[int] = [0]  # global, CUDA's default

    def exchange(mode: Any) -> int:
        modes.append(mode._obj.value)
        mode._obj.value = modes[-2]
        return 0

    def made(*_: Any, **__: Any) -> Any:
        assert modes[-1] == cuda._RELAXED
        return SimpleNamespace(ptr=2**24 * len(modes), synchronize=lambda: None)

    runtime = SimpleNamespace(memsetAsync=lambda *_: None, CUDARuntimeError=RuntimeError)
    driver = SimpleNamespace(cuThreadExchangeStreamCaptureMode=exchange)
    monkeypatch.setattr(cuda, "_driver", lambda: driver)
    zeros = cuda._ZeroBuffers(SimpleNamespace(Memory=made, Stream=made, runtime=runtime))
    places = [zeros.of((1, capture, 0)) for capture in range(3 * cuda.ZERO_BUFFERS)]
    assert len(set(places)) == len(places)
    assert modes == [0, *(cuda._RELAXED, 0) * 3]
