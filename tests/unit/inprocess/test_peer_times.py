"""What is left to PyTorch, by the shipped measurements."""

from __future__ import annotations

from typing import Any

import pytest

from convgrad_service.inprocess import peer_times, problem_of
from convgrad_service.inprocess.peer_times import faster_peer

TIMES = {"conv_bwd_data": [10.0, 9.0], "grouped_conv_bwd_weight": [20.0, 21.0]}


def problem(operation: str, batch: int = 4, dtype: str = "bfloat16", **parameters: Any) -> Any:
    x, y, w = (batch, 9, 9, 8), (batch, 5, 5, 16), (16, 3, 3, 8)
    tensors = {
        "conv_bwd_data": {"grad_output": y, "weight": w},
        "grouped_conv_bwd_weight": {"input": x, "grad_output": y},
        "conv_backward": {"grad_output": y, "input": x, "weight": w},
    }[operation]
    more = {
        "conv_bwd_data": {"input_size": (9, 9)},
        "grouped_conv_bwd_weight": {"weight_size": (3, 3)},
        "conv_backward": {},
    }[operation]
    parameters = {"stride": 2, "padding": 1, "layout": "NHWC", **more, **parameters}
    return problem_of(
        operation, {name: (each, dtype) for name, each in tensors.items()}, parameters
    )


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    key = "4x8x9x9 16x3x3 2x2 1x1x1x1 1x1 g1 bfloat16 NHWC"
    shipped = {"A GPU": {"peer": "PyTorch 3", "layers": {key: TIMES}}}
    monkeypatch.setattr(peer_times, "_tables", lambda: shipped)


def test_a_gradient_that_was_slower_is_left() -> None:
    said = "PyTorch 3 is faster: 9.0 us, not 10.0"
    assert faster_peer(problem("conv_bwd_data"), "A GPU") == said
    only = {"outputs": ["grad_input"]}
    assert faster_peer(problem("conv_backward", **only), "A GPU") == said


def test_several_gradients_are_left_where_their_sum_was_slower() -> None:
    assert faster_peer(problem("grouped_conv_bwd_weight"), "A GPU") is None
    assert faster_peer(problem("conv_backward"), "A GPU") is None


def test_other_problems_are_not_left() -> None:
    assert faster_peer(problem("conv_bwd_data"), "Another GPU") is None
    assert faster_peer(problem("conv_bwd_data", batch=5), "A GPU") is None
    assert faster_peer(problem("conv_bwd_data", dtype="float16"), "A GPU") is None
    pooling = problem_of("maxpool2d_fwd", {"input": ((1, 1, 4, 4), "float32")}, {"kernel_size": 2})
    assert faster_peer(pooling, "A GPU") is None


def test_the_shipped_table_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for device, table in peer_times._tables().items():
        assert device.startswith("NVIDIA ")
        assert table["peer"].startswith("PyTorch ")
        for times in table["layers"].values():
            assert set(times) <= set(TIMES)
            assert any(theirs < peer_times.FASTER * own for own, theirs in times.values())
