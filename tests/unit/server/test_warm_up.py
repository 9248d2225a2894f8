"""What a warm-up file states, and that it is computed once before the server is ready."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from convgrad.errors import DeviceOutOfMemory
from convgrad_service.backends.base import Outcome
from convgrad_service.problems import Problem
from convgrad_service.server.settings import Settings
from convgrad_service.server.warm_up import read_warm_up, warm_up
from tests.support.fake_backends import Zeros

LAYER: dict[str, Any] = {
    "kind": "conv", "ndim": 2, "C": 8, "K": 16, "groups": 4, "input_size": [9, 7],
    "output_size": [5, 4], "kernel_size": [3, 3], "stride": [2, 2], "padding": [1, 1],
    "dilation": [1, 1],
}  # fmt: skip
POOL: dict[str, Any] = {
    "kind": "maxpool", "ndim": 3, "C": 4, "input_size": [4, 4, 4], "output_size": [2, 2, 2],
    "kernel_size": [2, 2, 2], "stride": [2, 2, 2], "padding": [0, 0, 0], "dilation": [1, 1, 1],
}  # fmt: skip
TENSOR = {"shape": [2, 3, 8, 8], "dtype": "bfloat16"}
WEIGHT = {"shape": [4, 3, 3, 3], "dtype": "bfloat16"}
REQUEST = {"operation": "conv_fwd", "input": TENSOR, "weight": WEIGHT, "padding": 1}


class Recorder(Zeros):
    """What it was asked to compile and to compute."""

    def __init__(self) -> None:
        self.ahead: list[Problem] = []
        self.ran: list[Problem] = []

    def compile_ahead(self, problems: Sequence[Problem]) -> Future[None] | None:
        assert not self.ran, "all are begun before the first is waited for"
        self.ahead += problems
        return None

    def run(self, problem: Problem, tensors: Mapping[str, Any], *others: Any) -> Outcome:
        for name, spec in problem.inputs.items():
            assert tensors[name].shape == spec.shape
        self.ran.append(problem)
        if problem.operation == "conv_bwd_data":
            raise DeviceOutOfMemory("no room")
        return super().run(problem, tensors)


def stated(path: Path, *lines: Any) -> list[Problem]:
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return read_warm_up(path)


def test_requests_in_lines(tmp_path: Path) -> None:
    values = {"values": [[[[1.0, 2.0], [3.0, 4.0]]]], "dtype": "float32"}
    pool = {"operation": "maxpool2d_fwd", "input": values, "kernel_size": 2}
    first, second = stated(tmp_path / "requests", REQUEST, pool, REQUEST)
    assert first.operation == "conv_fwd"
    assert first.outputs["output"].shape == (2, 4, 8, 8)
    assert second.inputs["input"].shape == (1, 1, 2, 2)


@pytest.mark.parametrize(
    ("layout", "x", "weight"),
    [
        (None, (2, 8, 9, 7), (16, 2, 3, 3)),
        ("NHWC", (2, 9, 7, 8), (16, 3, 3, 2)),
        ("NHWGC", (2, 9, 7, 4, 2), (4, 4, 3, 3, 2)),
    ],
)
def test_layers_of_networks(
    layout: str | None, x: tuple[int, ...], weight: tuple[int, ...], tmp_path: Path
) -> None:
    given = {"batch": 2, "dtype": "float16", "layout": layout, "layers": [LAYER]}
    forward, data, gradient = stated(tmp_path / "layers.json", given)
    assert forward.inputs["input"].shape == data.outputs["grad_input"].shape == x
    assert forward.inputs["weight"].shape == gradient.outputs["grad_weight"].shape == weight
    assert {str(spec.dtype) for spec in forward.inputs.values()} == {"float16"}


@pytest.mark.parametrize(
    ("given", "output"),
    [
        ({"kind": "conv_transpose", "output_padding": [1, 1]}, (1, 16, 18, 14)),
        ({"kind": "avg_pool", "input_size": [8, 7], "ceil_mode": True}, (1, 8, 5, 4)),
        ({"kind": "adaptive_avg_pool", "output_size": [3, 2]}, (1, 8, 3, 2)),
        ({"kind": "adaptive_max_pool", "output_size": [3, 2]}, (1, 8, 3, 2)),
    ],
)
def test_other_kinds_of_layers(
    given: dict[str, Any], output: tuple[int, ...], tmp_path: Path
) -> None:
    forward, backward = stated(tmp_path / "layers.json", [{**LAYER, **given}])
    assert forward.operation == f"{given['kind']}_fwd"
    assert backward.operation.startswith(given["kind"])
    assert forward.outputs["output"].shape == backward.inputs["grad_output"].shape == output


def test_a_list_of_layers_with_batches_of_their_own(tmp_path: Path) -> None:
    found = stated(tmp_path / "layers.json", [{**LAYER, "batch": [1, 8]}, POOL])
    batches = [next(iter(problem.inputs.values())).shape[0] for problem in found]
    assert batches == [1, 1, 1, 8, 8, 8, 1, 1]
    assert [problem.operation for problem in found[-2:]] == ["maxpool3d_fwd", "maxpool3d_bwd"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({**REQUEST, "operation": "conv"}, r'line 2: expected an operation .* got "conv"'),
        ({**REQUEST, "stride": "two"}, "line 2: .*stride"),
        ({**REQUEST, "weight": {"shape": [4, 5, 3, 3], "dtype": "bfloat16"}}, "line 2: .*channels"),
        ({**REQUEST, "weight": {"shape": [4, 3, 3, 3], "dtype": "int8"}}, "line 2: .*int8"),
        ({**REQUEST, "operation": []}, r"line 2: expected an operation .* got \[\]"),
        ({**REQUEST, "weight": {"shape": 4, "dtype": "int8"}}, "line 2: weight: .* dtype to be"),
        ({**REQUEST, "weight": {"shape": 4, "dtype": "float16"}}, "line 2: weight: .*list.* got 4"),
        ({**REQUEST, "weight": {"shape": [-4], "dtype": "float16"}}, "line 2: weight: .* got -4"),
        ([1], "line 2: expected an object"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(line: Any, said: str, tmp_path: Path) -> None:
    path = tmp_path / "requests"
    with pytest.raises(ValueError, match=said):
        stated(path, REQUEST, line)
    with pytest.raises(ValidationError, match=said):
        Settings(warm_up=path)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"C": "64"}, 'C is "64"; expected an integer'),
        ({"groups": 1.5}, "groups is 1.5; expected an integer"),
        ({"kind": ["conv"]}, r'kind is \["conv"\]; expected one of conv, conv_t'),
        ({"stride": 2}, "stride is 2; expected a list of integers"),
        ({"padding": [[1, 1, 1]]}, "padding is .*; expected a list of integers or of pairs"),
        ({"padding": [1]}, "the layer's padding has 1 values; expected 2"),
        ({"batch": "8"}, 'batch is "8"; expected an integer'),
        ({"layout": 3}, "layout is 3; expected text"),
    ],
)
def test_a_layer_of_other_types_is_refused(
    given: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=rf"layers\.json, layer 1 \(.*\): {said}"):
        stated(tmp_path / "layers.json", [LAYER, {**LAYER, **given}])


def test_a_file_with_a_byte_order_mark_is_read_and_one_in_utf_16_is_refused(tmp_path: Path) -> None:
    """As editors and shells on Windows write them."""
    path = tmp_path / "requests"
    path.write_text(json.dumps(REQUEST), encoding="utf-8-sig")
    assert len(read_warm_up(path)) == 1
    path.write_text(json.dumps(REQUEST), encoding="utf-16")
    with pytest.raises(ValueError, match=f"{path} cannot be read: 'utf-8' codec"):
        read_warm_up(path)


def test_a_layer_that_lacks_something_is_refused(tmp_path: Path) -> None:
    given = {key: value for key, value in LAYER.items() if key != "K"}
    with pytest.raises(ValueError, match=r"layer 0 .*'K'"):
        stated(tmp_path / "layers.json", [{**given, "name": "one"}])
    with pytest.raises(ValueError, match="cannot be read"):
        read_warm_up(tmp_path / "nothing")


def test_all_are_compiled_ahead_and_computed_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, backend = tmp_path / "layers.json", Recorder()
    problems = stated(path, [LAYER])
    warm_up(path, backend)
    assert backend.ahead == backend.ran == problems
    assert "no room" in caplog.text, "one that fails ends neither the others nor the server"
