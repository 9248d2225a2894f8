"""Launches in the caller's process: what waits for what, without a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.inprocess import cuda
from convgrad_service.inprocess.base import problem_of
from convgrad_service.plans.cuda.device import H200
from convgrad_service.plans.cuda.planner import plan_for

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

    def bind(self, steps: Sequence[Any], addresses: Mapping[str, int]) -> list[Any]:
        return [lambda stream, step=step: self.log.append((step, stream)) for step in steps]

    def of(self, user: tuple[int, ...]) -> int:
        return 0

    def sides(self, count: int) -> tuple[int, list[tuple[int, int]]]:
        return 1, [(10 * n, n) for n in range(2, 2 + count)]

    def eventRecord(self, event: int, stream: int) -> None:  # noqa: N802 - CuPy's name
        self.log.append(("record", event, stream))

    def streamWaitEvent(self, stream: int, event: int) -> None:  # noqa: N802 - CuPy's name
        self.log.append(("wait", stream, event))


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


def test_the_sides_are_joined_where_a_launch_fails() -> None:
    operation, recorded, _ = prepared(128)

    def bind(steps: Sequence[Any], addresses: Mapping[str, int]) -> list[Any]:
        def fail(stream: int) -> None:
            raise ValueError("refused")

        return [fail] * len(steps)

    recorded.bind = bind  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="refused"):
        operation.launch([0] * 5, 0, CALLER, capturing=False)
    assert recorded.log[-2:] == [("record", 20, 2), ("wait", CALLER, 20)]
