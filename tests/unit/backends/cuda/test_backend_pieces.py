"""What `CudaBackend` does when a device's memory runs out: finer pieces where these have the same
bits, a refusal where they do not. Plans are the H200's; computing is left out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from convgrad.contract import OPERATIONS, validate
from convgrad.errors import DeviceOutOfMemory
from convgrad_service.backends.base import Outcome
from convgrad_service.backends.cuda.backend import CudaBackend
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.plans.cuda.device import H200
from convgrad_service.plans.cuda.planner import plan_for
from convgrad_service.problems import Problem, problem_from

PARTS = 16


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Problem, dict[str, Any]], list[int]]:
    """Runs a problem on a device with room for one image at a time; the images of each piece."""
    made = object.__new__(CudaBackend)
    made._fault, made.device = None, H200
    made.plan = partial(plan_for, device=H200, families=FAMILIES)
    made._prepared = made._prepare  # type: ignore[assignment]
    made._kernels = SimpleNamespace(compile_ahead=lambda steps: None)  # type: ignore[assignment]
    monkeypatch.setattr(made, "_lane", lambda: contextlib.nullcontext(None))
    monkeypatch.setattr(made, "_parts", lambda problem: 1)
    monkeypatch.setattr(made, "_parts_by_free_memory", lambda problem: PARTS)

    def run(problem: Problem, tensors: dict[str, Any]) -> list[int]:
        images: list[int] = []

        def compute(part: Problem, inputs: Any, places: Any, lane: Any, cancelled: Any) -> Outcome:
            count = len(inputs["input"])
            if count > 1:
                raise DeviceOutOfMemory("no room")
            images.append(count)
            outputs = {
                name: np.full(spec.shape, len(images), spec.dtype.numpy)
                for name, spec in part.outputs.items()
            }
            return Outcome(outputs, "none", 0.0, 1, 0)

        monkeypatch.setattr(made, "_compute", compute)
        outcome = made.run(problem, tensors)
        assert outcome.pieces == len(images)
        found = outcome.outputs["output"]
        assert (found[:, 0, 0, 0] == np.arange(1, PARTS + 1)).all()
        return images

    return run


def stated(
    operation: str, channels: int, size: int, dtype: type, **more: Any
) -> tuple[Problem, dict[str, Any]]:
    tensors = {"input": np.zeros((PARTS, size, size, channels), dtype)}
    other = "weight" if operation == "conv_fwd" else "grad_output"
    shape = (channels, 3, 3, channels) if other == "weight" else (PARTS, size, size, channels)
    tensors[other] = np.zeros(shape, dtype)
    request = validate(OPERATIONS[operation].request, {**tensors, "layout": "NHWC", **more})
    return problem_from(operation, request), request.tensors()


def test_pieces_with_the_same_bits(
    computed: Callable[[Problem, dict[str, Any]], list[int]],
) -> None:
    assert computed(*stated("conv_fwd", 64, 112, np.float32, padding=1)) == [1] * PARTS


def test_pieces_with_other_bits_are_refused(
    computed: Callable[[Problem, dict[str, Any]], list[int]],
) -> None:
    """Single images would share out their sums, the whole does not."""
    with pytest.raises(DeviceOutOfMemory):
        computed(*stated("conv_fwd", 256, 14, np.float16, padding=1))


def test_sums_are_refused(computed: Callable[[Problem, dict[str, Any]], list[int]]) -> None:
    with pytest.raises(DeviceOutOfMemory):
        computed(*stated("grouped_conv_bwd_weight", 64, 20, np.float32, padding=1))
