"""Small problems that are run again: the same bits from a recording, on other tensors."""

from __future__ import annotations

import threading
from random import Random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from convgrad.contract import OPERATIONS, validate
from convgrad_service.backends.cpu import CpuBackend, replay
from convgrad_service.backends.cpu import backend as backend_module
from convgrad_service.problems import Problem, problem_from
from tests.support.kernels.harness import problem_and_tensors, with_layouts
from tests.support.numerics.arrays import DTYPES, draw, normals, rng_for
from tests.support.numerics.bounds import assert_same_bits
from tests.support.numerics.cases import Case, conv_cases
from tests.support.numerics.classes import CLASSES

Array = NDArray[Any]
TIMES, CASES = 4, 40


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", sorted(CLASSES))
def test_a_recording_has_the_bits_of_the_first_run(seed: int, name: str, threads: int) -> None:
    rng = Random(f"{seed} {name}")
    again = CpuBackend(threads)
    for _ in range(CASES):
        case = CLASSES[name](rng)
        layout = rng.choice(with_layouts(case.ndim, grouped=case.groups > 1))
        dtype = rng.choice(["float16", "bfloat16", "float32", "float64"])
        _compare(again, threads, case, seed, dtype, layout)
    again.close()


# Sums of two convolutions, whose operands the host concatenates.
@pytest.mark.parametrize("operation", ["conv_double_backward", "conv_transpose_double_backward"])
def test_copies_on_the_host_are_made_every_time(seed: int, operation: str) -> None:
    again = CpuBackend(1)
    for case in conv_cases(operation):
        _compare(again, 1, case, seed, "float32", None)
    again.close()


def _compare(
    again: CpuBackend, threads: int, case: Case, seed: int, dtype: str, layout: str | None
) -> None:
    """Run a case several times, each on other tensors, and compare with a backend's first run."""
    for turn in range(TIMES):
        problem, arrays = _drawn(case, seed + turn, dtype, layout)
        afresh = CpuBackend(threads)
        wanted = afresh.run(problem, arrays)
        found = again.run(problem, arrays)
        afresh.close()
        what = f"seed {seed}, turn {turn}: {case.operation} {case.id} {dtype} {layout}"
        assert found.kernel == wanted.kernel, what
        for output, array in wanted.outputs.items():
            assert_same_bits(found.outputs[output], array, f"{what} {output}")


def _drawn(case: Case, seed: int, dtype: str, layout: str | None) -> tuple[Problem, dict[str, Any]]:
    tensors = draw(case, rng_for(seed, case.id, dtype), DTYPES[dtype], normals)
    problem, arrays = problem_and_tensors(case, tensors, layout)
    return problem, dict(arrays)


def _conv(**own: Any) -> tuple[Problem, dict[str, Array]]:
    rng = np.random.default_rng(0)
    tensors = {
        "grad_output": rng.standard_normal((2, 8, 6, 6), np.float32),
        "weight": rng.standard_normal((8, 4, 3, 3), np.float32),
    }
    given = {**tensors, "padding": 1, "input_size": (6, 6), **own}
    request = validate(OPERATIONS["conv_bwd_data"].request, given)
    return problem_from("conv_bwd_data", request), tensors


def _recording(backend: CpuBackend) -> list[Any]:
    return list(backend._recordings._known.values())


def test_a_convolution_is_recorded_when_it_comes_again() -> None:
    backend = CpuBackend(1)
    problem, tensors = _conv()
    backend.run(problem, tensors)
    assert _recording(backend) == [None]
    first = backend.run(problem, tensors)
    assert isinstance(_recording(backend)[0], replay.Recording)
    again = backend.run(problem, tensors)
    assert_same_bits(again.outputs["grad_input"], first.outputs["grad_input"])
    assert again.outputs["grad_input"].ctypes.data % 64 == 0
    backend.close()


def test_outputs_are_written_where_the_caller_wants_them() -> None:
    backend = CpuBackend(1)
    problem, tensors = _conv()
    wanted = backend.run(problem, tensors).outputs["grad_input"]
    for _ in range(3):
        place = np.full_like(wanted, np.nan)
        found = backend.run(problem, tensors, out={"grad_input": place}).outputs["grad_input"]
        assert found is place
        assert_same_bits(place, wanted)
    backend.close()


def test_the_order_of_tensors_does_not_matter() -> None:
    backend = CpuBackend(1)
    problem, tensors = _conv()
    wanted = backend.run(problem, tensors).outputs["grad_input"]
    for _ in range(3):
        for given in (tensors, dict(reversed(tensors.items()))):
            assert_same_bits(backend.run(problem, given).outputs["grad_input"], wanted)
    backend.close()


def test_indices_are_checked_every_time() -> None:
    backend = CpuBackend(1)
    grad = np.ones((1, 1, 2, 2), np.float32)
    indices = np.array([[[[0, 2], [8, 10]]]], np.int64)
    own = {"kernel_size": 2, "input_size": (4, 4)}
    request = validate(
        OPERATIONS["maxpool2d_bwd"].request, {"grad_output": grad, "indices": indices, **own}
    )
    problem = problem_from("maxpool2d_bwd", request)
    for _ in range(3):
        backend.run(problem, {"grad_output": grad, "indices": indices})
    assert isinstance(_recording(backend)[0], replay.Recording)
    wrong = np.array([[[[0, 2], [8, 99]]]], np.int64)
    with pytest.raises(Exception, match="99"):
        backend.run(problem, {"grad_output": grad, "indices": wrong})
    backend.close()


def test_what_is_watched_for_cancellation_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "WATCHED_FLOPS", 1)
    backend = CpuBackend(1)
    problem, tensors = _conv()
    for _ in range(3):
        backend.run(problem, tensors, threading.Event())
    assert _recording(backend) == []
    backend.close()


def test_unusual_strides_are_run_as_before() -> None:
    backend = CpuBackend(1)
    problem, tensors = _conv()
    wanted = backend.run(problem, tensors).outputs["grad_input"]
    flipped = {**tensors, "grad_output": np.flip(np.flip(tensors["grad_output"], 3).copy(), 3)}
    for _ in range(3):
        assert_same_bits(backend.run(problem, flipped).outputs["grad_input"], wanted)
    backend.close()


def test_few_recordings_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "KEPT", 3)
    backend = CpuBackend(1)
    for padding in (0, 1, 2, 0, 1, 2, 0, 1):
        problem, tensors = _conv(padding=padding, input_size=(8 - 2 * padding,) * 2)
        backend.run(problem, tensors)
        assert len(_recording(backend)) <= 3
    backend.close()
