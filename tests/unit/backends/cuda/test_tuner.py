"""A user's own table of tuned layers: how it is measured, written, and used before the shipped."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.tuning.tuned import read_table, table_text, use_table
from convgrad_service.backends.cuda.tuning.tuner import tune
from convgrad_service.inprocess import use_tuning
from convgrad_service.plans.cuda.device import H200, CudaDevice
from convgrad_service.plans.cuda.planner import plan_for
from convgrad_service.plans.cuda.program import CudaPlan
from convgrad_service.problems.base import Problem
from convgrad_service.server.kernels_command import kernels
from convgrad_service.server.tune_command import tune_kernels
from convgrad_service.server.warm_up import read_warm_up

OTHER = replace(H200, name="NVIDIA H200 NVL")
LAYER = {
    "kind": "conv",
    "ndim": 2,
    "groups": 1,
    "C": 72,
    "K": 264,
    "kernel_size": [1, 1],
    "stride": [1, 1],
    "padding": [0, 0],
    "dilation": [1, 1],
    "input_size": [9, 9],
    "output_size": [9, 9],
    "dtype": "bfloat16",
    "layout": "NHWC",
}


class FakeBench:
    """Takes 10 us for every kernel but those named, which may also give wrong gradients."""

    def __init__(self, seconds: Mapping[str, float], wrong: str = "") -> None:
        self._seconds, self._wrong = seconds, wrong
        self.ran: list[str] = []

    @contextmanager
    def run(self, problem: Problem, plan: CudaPlan) -> Iterator[Any]:
        self.ran.append(plan.kernel)
        yield FakeRun(self._seconds.get(plan.kernel, 10e-6), 1.0 + (plan.kernel == self._wrong))


class FakeRun:
    def __init__(self, time_s: float, value: float) -> None:
        self._time_s, self._value = time_s, value

    def seconds(self) -> float:
        return self._time_s

    def result(self) -> Any:
        return np.full(4, self._value, np.float32)


@pytest.fixture(autouse=True)
def _no_table() -> Iterator[None]:
    yield
    use_table(None)


@pytest.fixture
def layers(tmp_path: Path) -> Path:
    path = tmp_path / "layers.json"
    path.write_text(json.dumps([LAYER, {**LAYER, "layout": "NCHW"}]))
    return path


@pytest.fixture
def gradients(layers: Path) -> list[Problem]:
    """Both gradients of the layer, channels last."""
    return [one for one in read_warm_up(layers) if "bwd" in one.operation][:2]


def kernel_of(problem: Problem, device: CudaDevice = H200) -> str:
    return plan_for(problem, device, FAMILIES).kernel


def others_of(problem: Problem) -> list[str]:
    """The candidates that are not chosen at present."""
    bench = FakeBench({})
    tune(problem, H200, bench)
    return sorted(set(bench.ran) - {kernel_of(problem)})


def test_a_faster_configuration_is_taken_from_the_users_table(
    gradients: list[Problem], tmp_path: Path
) -> None:
    for problem in gradients:
        use_table(None)
        fastest = others_of(problem)[0]
        found = tune(problem, H200, FakeBench({fastest: 8e-6}))
        assert found.key is not None
        assert found.entry is not None
        assert (found.was_s, found.now_s) == (10e-6, 8e-6)
        path = tmp_path / "tuning.json"
        path.write_text(table_text(H200, {found.key: found.entry}))
        use_tuning(path)
        assert kernel_of(problem) == fastest


def test_what_is_hardly_faster_or_wrong_is_not_taken(gradients: list[Problem]) -> None:
    problem = gradients[0]
    first, *_ = others_of(problem)
    assert tune(problem, H200, FakeBench({first: 9.8e-6})).entry is None
    assert tune(problem, H200, FakeBench({first: 5e-6}, wrong=first)).entry is None


def test_a_users_table_comes_before_the_shipped_one_and_holds_for_its_device_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shipped = {**LAYER, "C": 64, "K": 256, "input_size": [56, 56], "output_size": [56, 56]}
    layers = tmp_path / "layers.json"
    layers.write_text(json.dumps([{**shipped, "batch": 32}]))
    problem = next(one for one in read_warm_up(layers) if one.operation == "conv_bwd_data")
    before = kernel_of(problem)
    other = next(name for name in others_of(problem) if name.startswith("pointwise_gemm"))
    found = tune(problem, H200, FakeBench({other: 1e-6}))
    assert found.key is not None and found.entry is not None  # noqa: PT018
    path = tmp_path / "tuning.json"
    path.write_text(table_text(H200, {found.key: found.entry}))
    use_table(path)
    assert kernel_of(problem) == other != before
    path.write_text(table_text(OTHER, {found.key: found.entry}))
    use_table(path)
    assert kernel_of(problem) == before
    assert "NVIDIA H200 NVL" in caplog.text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read"),
        ("[]", "expected an object with device"),
        (table_text(H200, {"bwd_data 1": ("pointwise_gemm",)}), "a family and a configuration"),
    ],
)
def test_invalid_tables(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "tuning.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        use_table(path)


def test_the_command_writes_a_table(
    layers: Path, gradients: list[Problem], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fastest = others_of(gradients[0])[0]
    bench, out = FakeBench({fastest: 5e-6}), tmp_path / "new" / "tuning.json"
    command = ["--layers", str(layers), "--out", str(out)]
    assert tune_kernels(command, lambda _: (H200, bench)) == 0
    assert len(read_table(out)["layers"]) == 1
    said = capsys.readouterr().out
    assert "2 gradients timed, 1 with a faster kernel" in said
    assert "not tuned; expected 16-bit types, channels last" in said
    # The new configuration is the present one now, and stays in the table.
    assert tune_kernels(command, lambda _: (H200, FakeBench({}))) == 0
    assert len(read_table(out)["layers"]) == 1
    assert tune_kernels(command, lambda _: (OTHER, bench)) == 2
    assert "expected another --out" in capsys.readouterr().err


def test_the_command_without_layers_that_can_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "none.json"
    assert kernels(["tune", "--layers", str(missing)]) == 2
    assert "cannot be read" in capsys.readouterr().err
