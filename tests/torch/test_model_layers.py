"""`layers_of`: what a model computes, as the server's ``--warm-up`` reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import convgrad.torch
from convgrad_service.server.warm_up import read_warm_up


class Model(nn.Module):  # type: ignore[misc]
    """One layer of each sort that PyTorch resolves before it computes, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Conv2d(3, 8, 4, padding="same")
        self.circular = nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular", groups=2)
        self.pool = nn.MaxPool2d(3, 2, ceil_mode=True)
        self.norm = nn.BatchNorm2d(8)
        self.point = nn.Conv2d(8, 8, 1)
        self.up = nn.ConvTranspose2d(8, 8, 2, 2)
        self.mean = nn.AvgPool2d(3, 1, 1, count_include_pad=False)
        self.adaptive = nn.Sequential(nn.AdaptiveAvgPool2d((12, None)), nn.AdaptiveMaxPool2d(12))
        self.signal = nn.Conv1d(8, 6, 5, stride=2, dilation=2)
        self.signal_pool = nn.MaxPool1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.pool(self.circular(self.same(x))))
        x = self.adaptive(self.mean(self.up(self.point(self.point(x)))))
        out: torch.Tensor = self.signal_pool(self.signal(x.flatten(2)))
        return out


def shapes_of(found: dict[str, Any], tmp_path: Path) -> list[tuple[str, tuple[int, ...]]]:
    """Each forward problem that a server would warm up, and the shape of its result."""
    path = tmp_path / "layers.json"
    path.write_text(json.dumps(found))
    return [
        (problem.operation, next(iter(problem.outputs.values())).shape)
        for problem in read_warm_up(path)
        if problem.operation.endswith("fwd")
    ]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_layers_are_those_that_are_computed(device: str, tmp_path: Path) -> None:
    with torch.device(device):
        model, x = Model(), torch.zeros(2, 3, 12, 12)
    found = convgrad.torch.layers_of(model, x)
    assert shapes_of(found, tmp_path) == [
        ("conv_fwd", (2, 8, 12, 12)),
        ("conv_fwd", (2, 8, 12, 12)),
        ("maxpool2d_fwd", (2, 8, 6, 6)),
        ("conv_fwd", (2, 8, 6, 6)),
        ("conv_transpose_fwd", (2, 8, 12, 12)),
        ("avg_pool_fwd", (2, 8, 12, 12)),
        ("adaptive_avg_pool_fwd", (2, 8, 12, 12)),
        ("adaptive_max_pool_fwd", (2, 8, 12, 12)),
        ("conv_fwd", (2, 6, 68)),
        ("maxpool2d_fwd", (2, 6, 1, 34)),
    ]
    assert [layer["count"] for layer in found["layers"]] == [1, 1, 1, 2, 1, 1, 1, 1, 1, 1]
    assert found["layers"][1]["input_size"] == [14, 14], "a circular padding is not zeros"
    assert model.training
    if device == "cpu":
        assert not model.norm.running_mean.any(), "statistics are left as they were"


def test_formats_are_those_of_the_computation() -> None:
    model = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16):
        (layer,) = convgrad.torch.layers_of(model, torch.zeros(1, 4, 8, 8))["layers"]
    assert (layer["dtype"], layer["layout"]) == ("bfloat16", "NHWC")


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_layers_of_replaced_modules(tmp_path: Path) -> None:
    model = Model()
    x = torch.zeros(2, 3, 12, 12)
    wanted = convgrad.torch.layers_of(model, x)["layers"]
    found = convgrad.torch.layers_of(convgrad.torch.nn.replace(model), x)
    assert found["layers"][:-1] == wanted[:-1]
    assert shapes_of(found, tmp_path)[-1] == ("maxpool1d_fwd", (2, 6, 34))


@pytest.mark.parametrize("last", [False, True])
def test_a_separable_convolution_is_two_layers(last: bool, tmp_path: Path) -> None:
    x, depthwise, pointwise = (
        torch.zeros(2, 4, 9, 9),
        torch.zeros(8, 1, 3, 3),
        torch.zeros(5, 8, 1, 1),
    )
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    found = convgrad.torch.layers_of(
        convgrad.torch.separable_conv2d, x, depthwise, pointwise, stride=2, padding=1
    )
    assert [layer["groups"] for layer in found["layers"]] == [4, 1]
    assert {layer["layout"] for layer in found["layers"]} == {"NHWC" if last else "NCHW"}
    shapes = [shape for _, shape in shapes_of(found, tmp_path)]
    assert shapes == ([(2, 5, 5, 8), (2, 5, 5, 5)] if last else [(2, 8, 5, 5), (2, 5, 5, 5)])


def test_an_empty_batch_has_no_layers() -> None:
    assert convgrad.torch.layers_of(nn.Conv2d(3, 4, 3), torch.zeros(0, 3, 8, 8)) == {"layers": []}
